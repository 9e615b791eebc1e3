"""Checks that all processes have the same callbacks.

A callback that only some processes have would make them wait for the others forever.
"""

from collections.abc import Sequence
from typing import Any

from tnt_jax.distributed.rendezvous import meet

# Callbacks of the libraries that may end training between two steps, or call functions that do.
_STOPPING = ("TerminateOnNaN", "LambdaCallback")


def check_same_everywhere(callbacks: Sequence[Any]) -> None:
    """Raises an error on all processes if the kinds of callbacks of `fit` differ.

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
