"""Descriptions of modules, losses, metrics and optimizers as JSON, and objects made from them.

```python
text = json.dumps(describe(module))
module = Rebuilder(custom_objects={"Net": Net})(json.loads(text))
```

They name classes and functions, such as `flax.linen:Dense` or `my_package.nets:Net`, and hold their
arguments. No code runs that a description chooses: a name is looked up in a fixed table
(`known_modules`), in the objects that the user passes, and in those registered with Keras. Other
names are imported only if the user trusts the description.

Names of the table are never imported or followed through attributes, because the author of a file
would then choose which code runs when it is read. It is filled from lists of public names, one by
one because no function in it may read or write files, import modules, or call its arguments outside
a step.
"""

import dataclasses
import functools
import importlib
import inspect
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar

import jax.numpy as jnp
import numpy as np

from tnt_jax.keras_compat import configuration
from tnt_jax.keras_compat.configuration import Recorded, public_module
from tnt_jax.keras_compat.saving import keras_descriptions

_M = TypeVar("_M")
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
def known_modules() -> Mapping[str, Listed]:
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
    if (listed := known_modules().get(where)) is None:
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
        for where, listed in reversed(list(known_modules().items()))
        for name in reversed(listed.names)
        if not where.startswith("tnt_jax.") and hasattr(listed.module, name)
    ]
    return {
        id(getattr(known_modules()[where].module, name)): f"{where}:{name}" for where, name in names
    }


class NotDescribable(ValueError):
    """An object cannot be written as JSON; the message says which part and why."""


def describe(value: Any, *, where: str = "module") -> Any:
    """Returns JSON for plain values, and for objects the arguments of their constructors."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, (tuple, list)):
        items = [describe(item, where=f"{where}[{index}]") for index, item in enumerate(value)]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        return {
            "dict": [
                [describe(key, where=where), describe(item, where=f"{where}[{key!r}]")]
                for key, item in value.items()
            ]
        }
    if isinstance(value, np.generic):
        return describe(value.item(), where=where)
    if isinstance(value, functools.partial):
        parts = describe([value.func, list(value.args), value.keywords], where=where)
        return {"partial": parts}
    return _describe_object(value, where)


def _describe_object(value: Any, where: str) -> Any:
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if is_linen(value):
        return {"linen": [_name(type(value), where), _describe_fields(value, where), value.name]}
    if isinstance(value, type) and issubclass(value, np.generic):
        return {"dtype": np.dtype(value).name}
    if type(value).__module__.split(".")[0] == "keras" and hasattr(value, "get_config"):
        return {"keras": keras_descriptions.describe(value)}
    if isinstance(value, Recorded):
        args, kwargs = value.given_arguments
        parts = (describe(part, where=where) for part in (list(args), kwargs))
        return {"object": [_name(type(value), where), *parts]}
    if (
        isinstance(value, (FunctionType, type))
        or hasattr(value, "__wrapped__")
        or name_of(value) is not None
    ):
        return {"import": _name(value, where)}
    raise NotDescribable(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be "
        "written as JSON."
    )


def _describe_fields(module: Any, where: str) -> dict[str, Any]:
    fields = {}
    for field in dataclasses.fields(module):
        value = getattr(module, field.name)
        # Defaults such as initializers are closures or private functions, and are restored by
        # themselves.
        is_own = callable(value) and value is field.default and name_of(value) is None
        if field.init and field.name not in ("parent", "name") and not is_own:
            fields[field.name] = describe(value, where=f"{where}.{field.name}")
    return fields


def _name(value: Any, where: str) -> str:
    if (known := name_of(value)) is not None:
        return known
    name = f"{value.__module__}:{value.__qualname__}"
    if "<" in name:
        raise NotDescribable(
            f"{where} is {value.__qualname__}, which was defined inside a function and cannot be "
            "imported."
        )
    if _in_its_module(value) is not value:
        raise NotDescribable(f"{where} is {name}, but importing that name gives something else.")
    return name


def _in_its_module(value: Any) -> Any:
    """Returns the object that a class's or function's module has under its name, or None."""
    found: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        found = getattr(found, part, None)
    return found


def is_linen(value: Any) -> bool:
    """Returns whether a value is a Linen module, without importing Linen."""
    linen = sys.modules.get("flax.linen")
    return linen is not None and isinstance(value, linen.Module)


class Rebuilder:
    """Makes objects from results of `describe`."""

    def __init__(
        self,
        *,
        custom_objects: Mapping[str, Any] | None = None,
        trust: bool = False,
        caller: str = "load_model",
    ) -> None:
        self.custom_objects = dict(custom_objects or {})
        self.trust = trust
        self._caller = caller
        self._kinds: dict[Any, Callable[[Any], Any]] = {
            "float": _float,
            "tuple": self._tuple,
            "dict": self._dict,
            "dtype": _dtype,
            "import": self._find,
            "partial": self._partial,
            "linen": self._linen,
            "object": self._object,
            "keras": self._keras,
        }

    def __call__(self, description: Any) -> Any:
        """Returns the described object."""
        try:
            return self._rebuild(description)
        except RecursionError as error:
            raise ValueError("This description of a model is nested too deeply.") from error

    def _rebuild(self, description: Any) -> Any:
        if isinstance(description, list):
            return [self._rebuild(item) for item in description]
        if not isinstance(description, dict):
            return description
        kind = next(iter(description)) if len(description) == 1 else None
        if kind not in self._kinds:
            raise ValueError(f"This is not a description of a model: {_shown(description)}")
        return self._kinds[kind](description[kind])

    def _tuple(self, items: Any) -> tuple[Any, ...]:
        return tuple(self._rebuild(_list(items)))

    def _dict(self, pairs: Any) -> dict[Any, Any]:
        rebuilt = [self._rebuild(_list(pair, 2)) for pair in _list(pairs)]
        return construct(dict, "dict", [rebuilt], {})

    def _partial(self, content: Any) -> Any:
        function, args, kwargs = self._rebuild(_list(content, 3))
        if not callable(function):
            raise ValueError(f"This description of a partial names no function: {_shown(content)}")
        return construct(functools.partial, "functools.partial", [function, *_list(args)], kwargs)

    def _linen(self, content: Any) -> Any:
        import flax.linen as nn

        name, fields, own_name = _list(content, 3)
        cls = self._find(name)
        if not (inspect.isclass(cls) and issubclass(cls, nn.Module)):
            raise ValueError(f"{name} is not a flax.linen.Module.")
        if (
            not isinstance(fields, dict)
            or not isinstance(own_name, str | None)
            or {"parent", "name"} & fields.keys()
        ):
            raise ValueError(f"This is not a description of a flax.linen.Module: {_shown(content)}")
        named = {"name": own_name} if own_name else {}
        return construct(
            cls, name, [], {field: self._rebuild(value) for field, value in fields.items()} | named
        )

    def _object(self, content: Any) -> Any:
        name, args, kwargs = _list(content, 3)
        cls = self._find(name)
        if not (inspect.isclass(cls) and issubclass(cls, Recorded)):
            raise ValueError(f"{name} is not a loss, metric, optimizer or schedule of tnt_jax.")
        return construct(cls, name, _list(self._rebuild(args)), self._rebuild(kwargs))

    def _keras(self, content: Any) -> Any:
        return keras_descriptions.rebuild(
            content, custom_objects=self.custom_objects, trust=self.trust
        )

    def _find(self, name: Any) -> Any:
        if not isinstance(name, str):
            raise ValueError(
                "A description names classes and functions by strings, but this one has "
                f"{_shown(name)}."
            )
        if (found := find(name)) is not None:
            return found
        short = name.rpartition(":")[2]
        for known, key in (
            (self.custom_objects, name),
            (self.custom_objects, short),
            (configuration.registered_with_keras(), short),
        ):
            if key in known:
                return known[key]
        if self.trust:
            return _imported(name)
        raise ValueError(
            f"The description names {_shown(name)}, which {self._caller} does not know by itself. "
            f"Pass it as custom_objects={{{_shown(short)}: ...}}, or pass trust=True if you trust "
            "whoever wrote the description: then what it names is imported, which runs code."
        )


def _imported(name: str) -> Any:
    module, _, path = name.partition(":")
    try:
        found: Any = sys.modules.get(module) or importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{name} cannot be imported: {error}. Make the module importable, or pass "
            "custom_objects=..."
        ) from error
    return found


def construct(function: Callable[..., Any], name: str, args: list[Any], kwargs: Any) -> Any:
    """Returns the result of a function for arguments from a description."""
    if not isinstance(kwargs, dict) or not all(isinstance(key, str) for key in kwargs):
        raise ValueError(f"The description gives {name} arguments without names: {_shown(kwargs)}")
    try:
        return function(*args, **kwargs)
    except Exception as error:
        raise ValueError(
            f"{name} cannot be created with the arguments of the description: {error}"
        ) from error


def model_from(config: Any, rebuild: Rebuilder, kind: Callable[..., _M]) -> _M:
    """Returns a model from a result of `Model.get_config`, with fresh weights, not compiled."""
    if (
        not isinstance(config, Mapping)
        or "options" not in config
        or not {"keras", "module"} & set(config)
    ):
        raise ValueError(
            "A configuration is what Model.get_config returned: a dict with 'options' and with "
            "'module' or 'keras'."
        )
    module = rebuild({"keras": config["keras"]} if "keras" in config else config["module"])
    return model_around(module, config["options"], rebuild, kind)


def model_around(module: Any, options: Any, rebuild: Rebuilder, kind: Callable[..., _M]) -> _M:
    """Returns a model that wraps a module, with the described options."""
    given = described_arguments(
        rebuild(options), kind, leave_out=("module", "variables", "ranks_per_host")
    )
    return construct(kind, "tnt_jax.Model", [module], given)


def described_arguments(
    given: Any, function: Any, *, leave_out: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns a description, which must be the arguments of a function."""
    parameters = inspect.signature(function).parameters
    takes_any = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters.values())
    known = parameters.keys() - set(leave_out)
    named = given.keys() if isinstance(given, dict) else {None}
    if not (named <= known or (takes_any and named.isdisjoint({None, *leave_out}))):
        raise ValueError(
            f"A saved model has these arguments of {function.__name__}: {sorted(known)}, but this "
            f"one has {given!r:.200}."
        )
    return given


def _list(content: Any, length: int | None = None) -> list[Any]:
    if not isinstance(content, list) or length not in (None, len(content)):
        expected = "a list" if length is None else f"a list of {length}"
        raise ValueError(f"A description of a model has {expected} here, not {_shown(content)}.")
    return content


def _float(text: Any) -> float:
    if text not in ("nan", "inf", "-inf"):
        raise ValueError(
            f"A description names the floats nan, inf and -inf, but this one has {_shown(text)}."
        )
    return float(text)


def _dtype(name: Any) -> Any:
    if not isinstance(name, str) or name not in DTYPE_NAMES:
        raise ValueError(
            "A description names dtypes such as float32 and bfloat16, but this one has "
            f"{_shown(name)}."
        )
    return jnp.dtype(name)


def _shown(value: Any) -> str:
    return json.dumps(value, default=lambda other: f"<{type(other).__name__}>")[:200]
