"""The classes and functions that the description of a model may name: a fixed table.

The names of a description are looked up in the table. They are never imported or followed through
attributes, because the author of a file would then choose which code runs when it is read. The
table is filled from lists of public names. They are listed one by one because no function in the
table may read or write files, import modules, or call its arguments outside a step.
"""

import functools
import inspect
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

from tnt_jax.keras_compat.configuration import public_module

_BUILTINS = ("bool", "complex", "float", "int")
_LINEN = """
    BatchNorm Bidirectional Conv ConvLSTMCell ConvLocal ConvTranspose Dense DenseGeneral Dropout
    Einsum Embed GRUCell GroupNorm InstanceNorm LSTMCell LayerNorm MGUCell MultiHeadAttention
    MultiHeadDotProductAttention OptimizedLSTMCell PReLU RMSNorm RNN SelfAttention Sequential
    SimpleCell SpectralNorm WeightNorm avg_pool combine_masks dot_product_attention
    make_attention_mask make_causal_mask max_pool
""".split()
_ACTIVATIONS = """
    celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu log_sigmoid
    log_softmax logsumexp mish one_hot relu relu6 selu sigmoid silu soft_sign softmax softplus
    sparse_plus sparse_sigmoid squareplus standardize swish tanh
""".split()
_INITIALIZERS = """
    constant delta_orthogonal glorot_normal glorot_uniform he_normal he_uniform lecun_normal
    lecun_uniform normal ones orthogonal truncated_normal uniform variance_scaling zeros
""".split()
_NUMPY = """
    abs absolute add arccos arcsin arcsinh arctan arctan2 arctanh argmax argmin clip concatenate cos
    cosh cumsum divide dot einsum exp exp2 expand_dims expm1 isfinite isnan log log10 log1p log2
    logaddexp matmul max maximum mean min minimum multiply nan_to_num negative power prod ravel
    reciprocal reshape round sign sin sinh sqrt square squeeze std subtract sum swapaxes tan tanh
    tensordot transpose var where
""".split()
_DTYPES = """
    bool_ int4 int8 int16 int32 int64 uint4 uint8 uint16 uint32 uint64 bfloat16 float16 float32
    float64 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz complex64
    complex128
""".split()
DTYPE_NAMES = frozenset(name.removesuffix("_") for name in _DTYPES)
"""The names of the dtypes that a description may name."""
_OPTAX_LOSSES = """
    convex_kl_divergence cosine_distance cosine_similarity ctc_loss hinge_loss huber_loss
    kl_divergence kl_divergence_with_log_targets l2_loss log_cosh poly_loss_cross_entropy
    safe_softmax_cross_entropy sigmoid_binary_cross_entropy sigmoid_focal_loss smooth_labels
    softmax_cross_entropy softmax_cross_entropy_with_integer_labels squared_error
""".split()
_OPTAX_SCHEDULES = """
    constant_schedule cosine_decay_schedule cosine_onecycle_schedule exponential_decay
    linear_onecycle_schedule linear_schedule piecewise_constant_schedule polynomial_schedule
    warmup_constant_schedule warmup_cosine_decay_schedule warmup_exponential_decay_schedule
""".split()
_LOSSES = """
    binary_crossentropy binary_focal_crossentropy categorical_crossentropy
    categorical_focal_crossentropy categorical_hinge cosine_similarity hinge huber kl_divergence
    log_cosh mean_absolute_error mean_absolute_percentage_error mean_squared_error
    mean_squared_logarithmic_error poisson sparse_categorical_crossentropy squared_hinge
""".split()
_METRICS = """
    binary_accuracy categorical_accuracy sparse_categorical_accuracy
    sparse_top_k_categorical_accuracy top_k_categorical_accuracy
""".split()
_MODELS = """
    Attention BasicBlock BottleneckBlock CNN CifarResNet ResNet ResNetSmall TextClassifier
    Transformer sinusoids
""".split()
_SCHEDULES = """
    Constant CosineDecay CosineDecayRestarts ExponentialDecay InverseTimeDecay
    PiecewiseConstantDecay PolynomialDecay GradualWarmup InverseSquareRoot WarmupSteps
""".split()


class Listed(NamedTuple):
    """A module, and those of its names that a description may give; versions differ in them."""

    module: ModuleType
    names: Sequence[str]
    base: type | None = None  # Its public subclasses are listed, too.


# Both caches depend on nothing but what is installed.
@functools.cache
def modules() -> Mapping[str, Listed]:
    """Returns what a description may name, by module."""
    import builtins

    import flax.linen
    import jax.nn.initializers
    import jax.numpy
    import optax

    from tnt_jax import models
    from tnt_jax.keras_compat import losses, metrics, optimizers, schedules

    listed = [
        Listed(builtins, _BUILTINS),
        Listed(models, _MODELS),
        Listed(losses, _LOSSES, losses.Loss),
        Listed(metrics, _METRICS, metrics.Metric),
        Listed(optimizers, (), optimizers.Optimizer),
        Listed(schedules, _SCHEDULES),
        Listed(flax.linen, _LINEN),
        Listed(jax.nn, _ACTIVATIONS),
        Listed(jax.nn.initializers, _INITIALIZERS),
        Listed(jax.numpy, (*_NUMPY, *_DTYPES)),
        Listed(optax.losses, _OPTAX_LOSSES),
        Listed(optax.schedules, _OPTAX_SCHEDULES),
    ]
    return {public_module(entry.module.__name__): entry for entry in listed}


def find(name: str) -> Any:
    """Returns what a description calls `module:name`; None if it may not."""
    where, _, short = name.partition(":")
    if (listed := modules().get(where)) is None:
        return None
    module, names, base = listed
    if short in names:
        return getattr(module, short, None)
    if base is None or short not in module.__all__:
        return None
    found = getattr(module, short)
    return found if inspect.isclass(found) and issubclass(found, base) else None


def name_of(value: Any) -> str | None:
    """Returns the name of a class or function in the table, or None."""
    where = str(getattr(value, "__module__", ""))
    if where.partition(".")[0] == "tnt_jax":
        # Its files are not imported: that of the value is.
        room = ".".join(public_module(where).split(".")[:2])
        name = f"{room}:{getattr(value, '__name__', '')}"
        return name if find(name) is value else None
    # The modules keep their objects alive, so that no other object can have the id of one.
    return _others_by_id().get(id(value))


@functools.cache
def _others_by_id() -> dict[int, str]:
    """Returns the names of what others than tnt_jax have made; the first of several names."""
    names = [
        (where, name)
        for where, listed in reversed(list(modules().items()))
        for name in reversed(listed.names)
        if not where.startswith("tnt_jax.") and hasattr(listed.module, name)
    ]
    return {id(getattr(modules()[where].module, name)): f"{where}:{name}" for where, name in names}
