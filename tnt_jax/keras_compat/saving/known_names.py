"""The classes and functions that the description of a model may name: a fixed table.

The names of a description are looked up in the table. They are never imported or followed through
attributes, because the author of a file would then choose which code runs when it is read. The
table is filled from lists of public names. They are listed one by one because no function in the
table may read or write files, import modules, or call its arguments outside a step.
"""

import functools
import inspect
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

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


# Both caches depend on nothing but what is installed.
@functools.cache
def table() -> Mapping[str, Any]:
    """Returns what a description may name, by `module:name`; an object may have several names."""
    import builtins

    import flax.linen
    import jax.nn.initializers
    import jax.numpy
    import optax

    from tnt_jax import models
    from tnt_jax.keras_compat import losses, metrics, optimizers, schedules

    listed: list[tuple[ModuleType, Iterable[str]]] = [
        (builtins, _BUILTINS),
        (models, _MODELS),
        (losses, (*_subclasses(losses, losses.Loss), *_LOSSES)),
        (metrics, (*_subclasses(metrics, metrics.Metric), *_METRICS)),
        (optimizers, _subclasses(optimizers, optimizers.Optimizer)),
        (schedules, _SCHEDULES),
        (flax.linen, _LINEN),
        (jax.nn, _ACTIVATIONS),
        (jax.nn.initializers, _INITIALIZERS),
        (jax.numpy, (*_NUMPY, *_DTYPES)),
        (optax.losses, _OPTAX_LOSSES),
        (optax.schedules, _OPTAX_SCHEDULES),
    ]
    # Versions of JAX, Flax and Optax differ in their public names.
    return {
        f"{_public(module)}:{name}": getattr(module, name)
        for module, names in listed
        for name in names
        if hasattr(module, name)
    }


def _subclasses(module: ModuleType, base: type) -> list[str]:
    """Returns the public names of tnt_jax's classes of one kind."""
    return [
        name
        for name in module.__all__
        if inspect.isclass(found := getattr(module, name)) and issubclass(found, base)
    ]


def dtype_names() -> frozenset[str]:
    """Returns the names of the dtypes that a description may name."""
    return frozenset(name.removesuffix("_") for name in _DTYPES)


def name_of(value: Any) -> str | None:
    """Returns the name of a class or function in the table, or None."""
    # The table keeps its objects alive, so that no other object can have the id of one.
    return _names_by_id().get(id(value))


@functools.cache
def _names_by_id() -> dict[int, str]:
    return {id(value): name for name, value in reversed(list(table().items()))}


def _public(module: ModuleType) -> str:
    return module.__name__.replace("tnt_jax.keras_compat.", "tnt_jax.")
