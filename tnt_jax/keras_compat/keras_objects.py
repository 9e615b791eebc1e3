"""Real Keras objects among the arguments of a user, and names that only Keras knows.

Keras is an optional package: nothing here imports it unless a name is looked up that tnt_jax does not have.
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

_ABSTRACT = ("Loss", "LossFunctionWrapper", "Metric", "MeanMetricWrapper", "Optimizer", "LossScaleOptimizer", "MultiOptimizer")


def is_keras(value: Any, kind: str) -> bool:
    """Tells whether a value is an instance of a Keras class; where Keras was never imported, nothing is.

    Args:
        value: Anything.
        kind: Module and class within Keras, such as `"losses.Loss"`.
    """
    if "keras" not in sys.modules:
        return False
    module, name = kind.split(".")
    return isinstance(value, getattr(getattr(sys.modules["keras"], module), name))


def require_jax_backend() -> ModuleType:
    """Returns the imported Keras.

    Raises:
        ValueError: If it runs on another backend than JAX.
    """
    keras = sys.modules["keras"]
    backend = keras.backend.backend()
    if backend != "jax":
        raise ValueError(
            f"Keras objects work here on Keras's JAX backend only, but Keras runs on {backend!r}. Set KERAS_BACKEND=jax in the "
            "environment before Keras is imported."
        )
    return keras


def mask_of_outputs(outputs: Any) -> Any:
    """Returns the mask `[rows, ...]` that a layer such as `Embedding(mask_zero=True)` gave to outputs; None if there is none."""
    if "keras" not in sys.modules:
        return None
    from keras.src.backend import get_keras_mask  # The mask of a tensor has no public name.

    return get_keras_mask(outputs)


def find_class(name: str, kind: str) -> type | None:
    """Returns the class of Keras that has a name, None if Keras is not there, on another backend, or has no such class.

    Keras is imported, on the JAX backend unless the environment says otherwise.

    Args:
        name: As in Keras: CamelCase, or in snake_case; for optimizers also in lower case.
        kind: `"losses"`, `"metrics"` or `"optimizers"`.
    """
    keras = _import_keras()
    if keras is None or keras.backend.backend() != "jax":
        return None
    classes = {key: value for key, value in vars(getattr(keras, kind)).items() if inspect.isclass(value) and key not in _ABSTRACT}
    known = {snake_case(key): value for key, value in classes.items()} | {key.lower(): value for key, value in classes.items()}
    return (known | classes).get(name)


def advice() -> str:
    """Returns what an error about an unknown name says about Keras."""
    if importlib.util.find_spec("keras") is None:
        return " Names of Keras beyond these need Keras: pip install keras."
    backend = sys.modules["keras"].backend.backend() if "keras" in sys.modules else os.environ.get("KERAS_BACKEND", "jax")
    if backend != "jax":
        return f" Names of Keras beyond these need its JAX backend, but Keras runs on {backend!r}: set KERAS_BACKEND=jax."
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
