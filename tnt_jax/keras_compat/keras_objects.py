"""Keras objects among the arguments of a user, and names that only Keras knows.

Keras is an optional package: this module imports it only to look up a name that tnt_jax does not
have.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from types import ModuleType
from typing import Any

from tnt_jax.keras_compat.names import snake_case

_ABSTRACT = (
    "Loss",
    "LossFunctionWrapper",
    "Metric",
    "MeanMetricWrapper",
    "Optimizer",
    "LossScaleOptimizer",
    "MultiOptimizer",
    "OptimizerMap",
)


def is_keras(value: Any, kind: str) -> bool:
    """Returns whether a value is an instance of a Keras class; False if Keras was never imported.

    Args:
        value: Anything.
        kind: Module and class in Keras, such as `"losses.Loss"`.
    """
    if "keras" not in sys.modules:
        return False
    module, name = kind.split(".")
    return issubclass(type(value), getattr(getattr(sys.modules["keras"], module), name))


def require_jax_backend() -> ModuleType:
    """Returns the imported Keras.

    Raises:
        ValueError: If it uses a backend other than JAX.
    """
    keras = sys.modules["keras"]
    backend = keras.backend.backend()
    if backend != "jax":
        raise ValueError(
            f"Keras objects need Keras's JAX backend, but Keras uses {backend!r}. Set "
            "KERAS_BACKEND=jax in the environment before Keras is imported."
        )
    return keras


def mask_of_outputs(outputs: Any) -> Any:
    """Returns the mask `[rows, ...]` of outputs, or None.

    Layers such as `Embedding(mask_zero=True)` make such masks.
    """
    if "keras" not in sys.modules:
        return None
    from keras.src.backend import (
        get_keras_mask,
    )  # There is no public access to the mask of a tensor.

    return get_keras_mask(outputs)


def find_class(name: str, kind: str) -> type | None:
    """Returns the Keras class with a name, or None.

    It is None if Keras is missing, uses another backend, or has no such class. Keras is imported,
    on the JAX backend unless the environment says otherwise.

    Args:
        name: As in Keras: CamelCase, or in snake_case; for optimizers also in lower case.
        kind: `"losses"`, `"metrics"` or `"optimizers"`.
    """
    keras = _import_keras()
    if keras is None or keras.backend.backend() != "jax":
        return None
    classes = {
        key: value
        for key, value in vars(getattr(keras, kind)).items()
        if inspect.isclass(value) and key not in _ABSTRACT
    }
    known = {snake_case(key): value for key, value in classes.items()} | {
        key.lower(): value for key, value in classes.items()
    }
    return (known | classes).get(name)


def advice() -> str:
    """Returns the part of an error about an unknown name that concerns Keras."""
    if importlib.util.find_spec("keras") is None:
        return " Names of Keras beyond these need Keras: pip install keras."
    backend = (
        sys.modules["keras"].backend.backend()
        if "keras" in sys.modules
        else os.environ.get("KERAS_BACKEND", "jax")
    )
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
