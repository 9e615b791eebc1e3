"""Checks that all processes have the same callbacks, apart from those that only the master has.

A callback that some processes have and others have not would make them wait for each other forever.
"""

import inspect
import json
from collections.abc import Sequence
from typing import Any

from tnt_jax.distributed.collectives import call_on_all_processes
from tnt_jax.distributed.comparison import compare
from tnt_jax.distributed.rendezvous import meet
from tnt_jax.distributed.runtime import is_master_rank
from tnt_jax.keras_compat.callbacks.base import Callback
from tnt_jax.keras_compat.callbacks.history import History
from tnt_jax.keras_compat.callbacks.scope import (
    DECIDING,
    OnMaster,
    controls_training,
    first_base,
    is_keras_writer,
    is_wrapped,
)
from tnt_jax.keras_compat.comparable import comparable, flat
from tnt_jax.log import logger

# Callbacks whose hooks exchange something, or decide how training goes on.
_COMPARED = (*DECIDING, "ModelCheckpoint")
_ADVICE = (
    "Construct callbacks with the same arguments on every process; OnAllRanks(...) lets each "
    "process have its own."
)
# Callbacks of the libraries that may end training between two steps, or call functions that do.
_STOPPING = ("TerminateOnNaN", "LambdaCallback")


class _OfMaster(Callback):
    """Stands on the other processes for a callback that only the master has.

    Attributes:
        may_stop: Whether that callback may end training between two steps.
    """

    def __init__(self, may_stop: bool) -> None:
        super().__init__()
        self.may_stop = may_stop


def agree_on_callbacks(callbacks: Sequence[Any], call: str) -> list[Any]:
    """Returns the callbacks of a call; those that only the master has run there, as in `OnMaster`.

    Settings are compared of callbacks that control training or save together.

    Args:
        callbacks: The user's callbacks on this process.
        call: The call, such as `Model.fit`.

    Returns:
        As many on every process, in the master's order.

    Raises:
        ValueError: On all processes, if lists differ in another way, if the master alone has a
            callback that controls training, or if settings differ.
    """
    agreed = _agree_on_kinds(callbacks, call)
    together = [item for item in agreed if not is_keras_writer(item)]
    compared = [item for item in together if first_base(item, _COMPARED) is not None]
    compare(call, describe_callbacks(compared), advice=_ADVICE)
    return agreed


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


def _agree_on_kinds(callbacks: Sequence[Any], call: str) -> list[Any]:
    own = [(_kind(item), _may_stop(item), controls_training(item)) for item in callbacks]
    lists: list[list[Any]] = [json.loads(text) for text in meet(call, json.dumps(own))]
    kinds = [[kind for kind, *_ in entries] for entries in lists]
    differing = next((process for process, item in enumerate(kinds) if item != kinds[0]), None)
    if differing is None:
        return list(callbacks)
    extras = _missing(kinds[0], kinds[differing])
    if extras is None or any(item != kinds[differing] for item in kinds[1:]):
        raise ValueError(
            f"Every process must pass the same callbacks to {call}, but process 0 has "
            f"[{', '.join(kinds[0])}] and process {differing} has [{', '.join(kinds[differing])}]. "
            "Only process 0, the master, may have further ones, which run there alone. Callbacks "
            "that write files do so on the master alone."
        )
    for index in extras:
        if lists[0][index][2]:
            raise ValueError(
                f"{kinds[0][index]} must be passed to {call} on every process, because it "
                "controls training, but only process 0 has it. It prints on the master only."
            )
    return call_on_all_processes(lambda: _completed(callbacks, lists[0], extras, call))


def _missing(longer: Sequence[str], shorter: Sequence[str]) -> list[int] | None:
    """Returns the positions of what only `longer` has; None if it has not all of the other."""
    rest = list(shorter)
    extras = []
    for index, kind in enumerate(longer):
        if rest and kind == rest[0]:
            del rest[0]
        else:
            extras.append(index)
    return None if rest else extras


def _completed(
    callbacks: Sequence[Any], of_master: Sequence[Any], extras: Sequence[int], call: str
) -> list[Any]:
    """Returns the callbacks of this process with those of the master, or what stands for them."""
    if is_master_rank():
        names = ", ".join(of_master[index][0] for index in extras)
        logger.warning("Only the master passes %s to %s: it runs on the master alone.", names, call)
    own = iter(callbacks)
    found: list[Any] = []
    for index, (kind, may_stop, _) in enumerate(of_master):
        if index not in extras:
            found.append(next(own))
        elif not is_master_rank():
            found.append(History() if kind == "History" else OnMaster(_OfMaster(may_stop)))
        else:
            item = next(own)
            is_as_it_is = kind == "History" or is_wrapped(item)
            found.append(item if is_as_it_is else OnMaster(item))
    return found


def may_stop_within_epoch(callbacks: Sequence[Any]) -> bool:
    """Returns whether a callback may set `stop_training` between two steps of an epoch.

    Args:
        callbacks: Callbacks without wrappers, of the same kinds on every process.
    """
    return any(map(_may_stop, callbacks))


def _may_stop(callback: Any) -> bool:
    inner = getattr(callback, "callback", callback)
    if isinstance(inner, _OfMaster):
        return inner.may_stop
    is_of_library = type(inner).__module__.partition(".")[0] in ("tnt_jax", "keras")
    return not is_of_library or type(inner).__name__ in _STOPPING


def _kind(callback: Any) -> str:
    inner = getattr(callback, "callback", None)
    return (
        type(callback).__name__ if inner is None else f"{type(callback).__name__}({_kind(inner)})"
    )
