"""The state of the callbacks of a run, as a backup holds it.

A callback of tnt_jax says by `state` what it needs; of Keras's own callbacks the attributes are
known that decide how training goes on.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tnt_jax.keras_compat.callbacks.base import Callback
from tnt_jax.log import logger

# Keras 3.15, keras/src/callbacks: what on_train_begin sets and later hooks change.
_KERAS_ATTRIBUTES = {
    "EarlyStopping": ("wait", "stopped_epoch", "best", "best_weights", "best_epoch"),
    "ReduceLROnPlateau": ("best", "wait", "cooldown_counter"),
    "ModelCheckpoint": ("best",),
}
States = list[tuple[str, dict[str, Any]]]


def collect(callbacks: Iterable[Any]) -> tuple[States, dict[str, np.ndarray]]:
    """Returns the states of callbacks as JSON values, and their arrays by path."""
    states: States = []
    arrays: dict[str, np.ndarray] = {}
    for index, callback in enumerate(callbacks):
        # A copy: training and callbacks change their state while the backup is written.
        state = copy.deepcopy(_state_of(callback))
        for name, value in state.items():
            if _is_arrays(value):
                path = f"callbacks/{index}/{name}"
                arrays |= {f"{path}/{number}": array for number, array in enumerate(value)}
                state[name] = {"num_arrays": len(value)}
        states.append((type(callback).__name__, state))
    return states, arrays


def restore(callbacks: Iterable[Any], states: Sequence[Any], arrays: Mapping[str, Any]) -> None:
    """Gives callbacks the state that callbacks of the same class had, in their order.

    Args:
        callbacks: The callbacks of the resumed run.
        states: States of the interrupted run.
        arrays: Its arrays by path.
    """
    found = _by_name(
        (
            name,
            {
                key: _restored(value, f"callbacks/{index}/{key}", arrays)
                for key, value in state.items()
            },
        )
        for index, (name, state) in enumerate(states)
    )
    own = _by_name((type(callback).__name__, callback) for callback in callbacks)
    for place, callback in own.items():
        if state := found.get(place):
            _set_state(callback, state)
    missing = [
        name for (name, number), state in found.items() if state and (name, number) not in own
    ]
    if missing:
        logger.warning(
            "The interrupted run had callbacks that this one has not: %s. Their state is lost.",
            ", ".join(missing),
        )


def numbered(arrays: Mapping[str, np.ndarray], prefix: str) -> list[np.ndarray]:
    """Returns the arrays at `prefix/0`, `prefix/1` and so on."""
    numbers = sorted(
        int(path.removeprefix(f"{prefix}/")) for path in arrays if path.startswith(f"{prefix}/")
    )
    return [arrays[f"{prefix}/{number}"] for number in numbers]


def _by_name(pairs: Iterable[tuple[str, Any]]) -> dict[tuple[str, int], Any]:
    """Returns values by name and by how many of the same name come before."""
    counts = Counter[str]()
    found = {}
    for name, value in pairs:
        found[name, counts[name]] = value
        counts[name] += 1
    return found


def _state_of(callback: Any) -> dict[str, Any]:
    if isinstance(callback, Callback):
        return callback.state()
    return {
        name: float(value) if isinstance(value, np.floating) else value
        for name in _keras_attributes(callback)
        if (value := getattr(callback, name, None)) is not None
    }


def _set_state(callback: Any, state: dict[str, Any]) -> None:
    if isinstance(callback, Callback):
        callback.set_state(state)
        return
    for name in _keras_attributes(callback):
        if name in state:
            setattr(callback, name, state[name])


def _keras_attributes(callback: Any) -> tuple[str, ...]:
    return next(
        (
            _KERAS_ATTRIBUTES[cls.__name__]
            for cls in type(callback).__mro__
            if cls.__name__ in _KERAS_ATTRIBUTES and cls.__module__.startswith("keras.")
        ),
        (),
    )


def _restored(value: Any, path: str, arrays: Mapping[str, np.ndarray]) -> Any:
    is_kept_apart = isinstance(value, dict) and set(value) == {"num_arrays"}
    return numbered(arrays, path) if is_kept_apart else value


def _is_arrays(value: Any) -> bool:
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, np.ndarray) for item in value)
    )
