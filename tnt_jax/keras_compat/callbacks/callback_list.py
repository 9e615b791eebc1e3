"""The list of callbacks of one `fit`, `evaluate` or `predict`: calls every hook in order, where it runs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tnt_jax.keras_compat.callbacks.monitor import direction
from tnt_jax.keras_compat.callbacks.placement import Placed, is_keras_backup, place
from tnt_jax.runtime import get_process_count, init, is_master_rank

_PHASES = ("train", "test", "predict")
_BATCH_HOOKS = [f"on_{phase}_batch_{moment}" for phase in _PHASES for moment in ("begin", "end")]


class CallbackList:
    """Calls the hooks of several callbacks in order.

    Args:
        callbacks: Callbacks to call; real Keras ones and those in `OnMaster` or `OnAllRanks` among them.
        model: Model they see.
        params: Parameters they see.

    Attributes:
        callbacks: The callbacks without wrappers.

    Raises:
        ValueError: If a callback cannot work here; the message says what to do instead.
    """

    def __init__(self, callbacks: Sequence[Any], *, model: Any, params: dict[str, Any]) -> None:
        self._model = model
        self._is_alone = get_process_count() == 1
        speaks = is_master_rank() or init().settings.output_on_all_devices
        self._placed = [
            place(given, num_processes=get_process_count(), is_master=is_master_rank(), speaks=speaks) for given in callbacks
        ]
        self._placed.sort(key=lambda placed: getattr(placed.callback, "runs_last", False))
        self.callbacks = [placed.callback for placed in self._placed]
        for placed in self._placed:
            self._introduce(placed, params)
        # A batch hook that nobody overrides costs nothing: the loop runs ahead of the devices.
        self._batch_hooks = {hook: self._functions(hook) for hook in _BATCH_HOOKS}

    def call(self, hook: str, *args: Any) -> None:
        """Calls one hook, such as `on_epoch_end`, of every callback; they share one copy of the logs and may add to it."""
        args = tuple(dict(arg) if isinstance(arg, Mapping) else arg for arg in args)
        for placed in self._placed:
            restores = hook == "on_train_begin" and not self._is_alone and is_keras_backup(placed.callback)
            # Alone: it changes the master's model, from what may be the master's own disk, and the others follow below.
            function = (replace(placed, company="each") if restores else placed).bind(hook)
            if function is not None:
                function(*args)
            if restores:
                self._model.adopt_master_state()

    def call_batch(self, hook: str, batch: int, logs: Mapping[str, float] | None) -> None:
        """Calls one hook of a batch, such as `on_train_batch_end`, of the callbacks that have it."""
        for function in self._batch_hooks[hook]:
            function(batch, logs)

    def has_batch_hook(self, hook: str) -> bool:
        """Tells whether any callback has this hook of a batch."""
        return bool(self._batch_hooks[hook])

    def _introduce(self, placed: Placed, params: dict[str, Any]) -> None:
        callback = placed.callback
        if getattr(callback, "mode", None) == "auto" and hasattr(callback, "monitor"):
            # Keras's own rule looks into the metrics of a Keras model.
            callback.mode = direction(callback.monitor, self._model)
        if hasattr(callback, "siblings"):
            callback.siblings = self.callbacks
            callback.company = placed.company
        if placed.runs:
            with placed.entered():
                callback.set_model(self._model)
                callback.set_params(params)

    def _functions(self, hook: str) -> list[Callable]:
        functions = [placed.bind(hook) for placed in self._placed if overrides(placed.callback, hook)]
        return [function for function in functions if function is not None]


def overrides(callback: Any, hook: str) -> bool:
    """Tells whether a callback's own class, or one between it and its library's base class, defines a hook of a batch.

    `on_batch_begin` and `on_batch_end` count as the hooks of training, which call them.
    """
    names = [hook, hook.replace("_train", "")] if "_train_" in hook else [hook]
    return any(_defines(callback, name) for name in names)


def _defines(callback: Any, name: str) -> bool:
    function = getattr(type(callback), name, None)
    is_inherited = any(function is cls.__dict__.get(name) for cls in type(callback).__mro__ if cls.__name__ == "Callback")
    return name in vars(callback) or (function is not None and not is_inherited)
