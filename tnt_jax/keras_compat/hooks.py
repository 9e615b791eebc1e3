"""Between the loop and the callbacks: what runs around each step, and which callbacks come by themselves."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

from tnt_jax.keras_compat.callbacks import CallbackList, History, LazyLogs, ProgbarLogger
from tnt_jax.runtime import init, is_master_rank

Phase = Literal["train", "test", "predict"]


class PhaseHooks:
    """Calls the batch hooks of a phase, with logs that are computed when somebody reads them.

    Args:
        phase: Which hooks to call.
        callbacks: Whose hooks.
        model: Object with `stop_training`, `rows_in_batch` and `epoch_sums`.
        read: From the sums of an epoch so far to its logs.
    """

    def __init__(self, phase: Phase, callbacks: CallbackList, *, model: Any, read: Callable[[Any], dict[str, float]]) -> None:
        self._begin, self._end = f"on_{phase}_batch_begin", f"on_{phase}_batch_end"
        self._callbacks, self._model, self._read = callbacks, model, read
        self._has_end = callbacks.has_batch_hook(self._end)
        self._stops = phase == "train"

    def on_batch_begin(self, index: int) -> None:
        """Runs before step `index`."""
        self._callbacks.call_batch(self._begin, index, {})

    def on_batch_end(self, index: int, sums: Any, num_rows: int) -> bool:
        """Runs after step `index` was started; returns whether a callback asked to stop."""
        self._model.rows_in_batch, self._model.epoch_sums = num_rows, sums
        if self._has_end:
            self._callbacks.call_batch(self._end, index, {} if sums is None else LazyLogs(lambda: self._read(sums)))
        return self._stops and self._model.stop_training


def complete(callbacks: Any, *, verbose: int | str, in_training: bool) -> list[Any]:
    """Returns the user's callbacks with a `History` and, where this process prints, a `ProgbarLogger`.

    Args:
        callbacks: A callback, a sequence of them, or None.
        verbose: 0, 1, 2 or `"auto"`, which is 1.
        in_training: Whether a `History` belongs to them.
    """
    if verbose not in (0, 1, 2, "auto"):
        raise ValueError(f"verbose must be 0 (silent), 1 (bar), 2 (one line per epoch) or 'auto', but is {verbose!r}.")
    given: list[Any] = _flat(callbacks)
    plain = [getattr(callback, "callback", callback) for callback in given]
    prints = is_master_rank() or init().settings.output_on_all_devices
    # History comes last, as in Keras 3: other callbacks may add to the logs that it records.
    history = [] if not in_training or any(isinstance(c, History) for c in plain) else [History()]
    has_bar = any(type(c).__name__ == "ProgbarLogger" for c in plain)
    bar = [ProgbarLogger(1 if verbose == "auto" else int(verbose))] if verbose and prints and not has_bar else []
    return given + history + bar


def _flat(callbacks: Any) -> list[Any]:
    """Returns callbacks given as one, as None, or in nested sequences, in one list."""
    if isinstance(callbacks, Sequence):
        return [callback for part in callbacks for callback in _flat(part)]
    return [] if callbacks is None else [callbacks]
