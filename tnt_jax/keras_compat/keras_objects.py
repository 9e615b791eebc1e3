"""Keras objects among a user's arguments, and names in Keras's spellings, such as `mse` and `MSE`.

Keras is optional, and imported only to look up a name that tnt_jax does not have.
"""

import difflib
import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, TypeVar

C = TypeVar("C")
T = TypeVar("T")


def classes_of(modules: Iterable[ModuleType], base: type[C]) -> dict[str, type[C]]:
    """Returns the public classes by name that modules define, of those that derive from `base`."""
    return {
        name: cls
        for module in modules
        for name, cls in vars(module).items()
        if isinstance(cls, type) and issubclass(cls, base) and cls is not base
        if cls.__module__ == module.__name__ and not name.startswith("_")
    }


# Short names of losses and metrics.
ALIASES = {
    "bce": "BinaryCrossentropy",
    "kld": "KLDivergence",
    "mae": "MeanAbsoluteError",
    "mape": "MeanAbsolutePercentageError",
    "mse": "MeanSquaredError",
    "msle": "MeanSquaredLogarithmicError",
}


def find(name: str, classes: Mapping[str, T], aliases: Mapping[str, str] = ALIASES) -> T | None:
    """Returns the class of a name, or None."""
    short = {alias: classes[class_name] for alias, class_name in aliases.items()}
    upper = {alias.upper(): entry for alias, entry in short.items()}
    snake = {snake_case(class_name): entry for class_name, entry in classes.items()}
    return (short | upper | snake | dict(classes)).get(name)


def unknown(name: str, listed: Iterable[str], *, kind: str, advice: str) -> ValueError:
    """Returns the error for an unknown name, with the known names and the nearest one."""
    listed = sorted(set(listed))
    nearest = difflib.get_close_matches(name.lower(), listed, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    return ValueError(f"Unknown {kind} {name!r}.{hint} Known names: {', '.join(listed)}.{advice}")


def snake_case(name: str) -> str:
    """Returns a CamelCase name in snake_case by Keras's rule: `KLDivergence` is `kl_divergence`."""
    return re.sub(
        "([a-z])([A-Z])", r"\1_\2", re.sub("(.)([A-Z][a-z]+)", r"\1_\2", re.sub(r"\W+", "", name))
    ).lower()


_ABSTRACT = """
    Loss LossFunctionWrapper Metric MeanMetricWrapper Optimizer LossScaleOptimizer MultiOptimizer
    OptimizerMap
""".split()


def is_keras(value: Any, kind: str = "models.Model") -> bool:
    """Returns whether a value is an instance of a Keras class, without importing Keras."""
    if "keras" not in sys.modules:
        return False
    module, name = kind.split(".")
    return issubclass(type(value), getattr(getattr(sys.modules["keras"], module), name))


def require_jax_backend() -> ModuleType:
    """Returns the imported Keras."""
    keras = sys.modules["keras"]
    backend = keras.backend.backend()
    if backend != "jax":
        raise ValueError(
            f"Keras objects need Keras's JAX backend, but Keras uses {backend!r}. Set "
            "KERAS_BACKEND=jax in the environment before Keras is imported."
        )
    return keras


def mask_of_outputs(outputs: Any) -> Any:
    """Returns the mask `[rows, ...]` of outputs, as of `Embedding(mask_zero=True)`, or None."""
    if "keras" not in sys.modules:
        return None
    # There is no public access to the mask of a tensor.
    from keras.src.backend import get_keras_mask

    return get_keras_mask(outputs)


def find_class(name: str, kind: str) -> type | None:
    """Returns the Keras class of a name, or None, as without Keras or on another backend."""
    keras = _import_keras()
    if keras is None or keras.backend.backend() != "jax":
        return None
    members = vars(getattr(keras, kind)).items()
    classes = {key: x for key, x in members if inspect.isclass(x) and key not in _ABSTRACT}
    lower = {key.lower(): value for key, value in classes.items()}
    return find(name, lower | classes, {})


def advice() -> str:
    """Returns the part of an error about an unknown name that concerns Keras."""
    if importlib.util.find_spec("keras") is None:
        return " Names of Keras beyond these need Keras: pip install keras."
    keras = sys.modules.get("keras")
    backend = keras.backend.backend() if keras else os.environ.get("KERAS_BACKEND", "jax")
    if backend != "jax":
        return (
            f" Names of Keras beyond these need its JAX backend, but Keras uses {backend!r}: set "
            "KERAS_BACKEND=jax."
        )
    return " Names of Keras beyond these are known too, but this is none of them."


def _import_keras() -> ModuleType | None:
    if "keras" in sys.modules or importlib.util.find_spec("keras") is None:
        return sys.modules.get("keras")
    is_chosen = "KERAS_BACKEND" in os.environ
    os.environ.setdefault("KERAS_BACKEND", "jax")
    try:
        return importlib.import_module("keras")
    finally:
        if not is_chosen:
            del os.environ["KERAS_BACKEND"]
