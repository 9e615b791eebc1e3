"""Checks that all processes have the same callbacks.

A callback that only some processes have would make them wait for the others forever.
"""

import inspect
from collections.abc import Sequence
from typing import Any

from tnt_jax.distributed.comparison import compare
from tnt_jax.distributed.rendezvous import meet
from tnt_jax.keras_compat.callbacks.scope import DECIDING, first_base, is_keras_writer
from tnt_jax.keras_compat.comparable import comparable, flat

# Callbacks whose hooks exchange something, or decide how training goes on.
_COMPARED = (*DECIDING, "ModelCheckpoint")
_ADVICE = (
    "Construct callbacks with the same arguments on every process; OnAllRanks(...) lets each "
    "process have its own."
)
# Callbacks of the libraries that may end training between two steps, or call functions that do.
_STOPPING = ("TerminateOnNaN", "LambdaCallback")


def check_same_everywhere(callbacks: Sequence[Any]) -> None:
    """Raises an error on all processes if the kinds of callbacks of `fit`, or settings, differ.

    Settings are compared of callbacks that control training or save together.

    Args:
        callbacks: The user's callbacks on this process.

    Raises:
        ValueError: If they differ.
    """
    lists = meet("Model.fit", ", ".join(map(_kind, callbacks)))
    differing = next((process for process, text in enumerate(lists) if text != lists[0]), None)
    if differing is not None:
        raise ValueError(
            f"Every process must pass the same callbacks to fit, but process 0 has [{lists[0]}] "
            f"and process {differing} has [{lists[differing]}]. Do not add callbacks on some "
            "processes only: callbacks that write files do so on the master alone, and "
            "tnt_jax.callbacks.OnMaster(...) runs your own callback on the master alone."
        )
    together = [item for item in callbacks if not is_keras_writer(item)]
    compared = [item for item in together if first_base(item, _COMPARED) is not None]
    compare("Model.fit", describe_callbacks(compared), advice=_ADVICE)


def describe_callbacks(callbacks: Sequence[Any]) -> dict[str, str]:
    """Returns the settings of callbacks of tnt_jax and Keras, by name; what prints is left out.

    Args:
        callbacks: Callbacks without wrappers.
    """
    told: dict[str, str] = {}
    for number, callback in enumerate(callbacks):
        settings = {name: comparable(value) for name, value in _settings(callback).items()}
        told |= flat(f"callback {number + 1}, {type(callback).__name__}", settings)
    return told


def _settings(callback: Any) -> dict[str, Any]:
    """Returns the arguments of a callback's constructor that it keeps under their names."""
    library = ("tnt_jax", "keras")
    kinds = (cls for cls in type(callback).__mro__ if cls.__module__.partition(".")[0] in library)
    names = inspect.signature(next(kinds, type(callback)).__init__).parameters
    kept = [name for name in names if name not in ("self", "verbose") and hasattr(callback, name)]
    return {name: getattr(callback, name) for name in kept}


def may_stop_within_epoch(callbacks: Sequence[Any]) -> bool:
    """Returns whether a callback may set `stop_training` between two steps of an epoch.

    Args:
        callbacks: Callbacks without wrappers, of the same kinds on every process.
    """
    return any(
        type(callback).__module__.partition(".")[0] not in ("tnt_jax", "keras")
        or type(callback).__name__ in _STOPPING
        for callback in callbacks
    )


def _kind(callback: Any) -> str:
    inner = getattr(callback, "callback", None)
    return (
        type(callback).__name__ if inner is None else f"{type(callback).__name__}({_kind(inner)})"
    )
