"""The callbacks of one `fit`, `evaluate` or `predict`: calls each hook in order."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tnt_jax.distributed import goodput, stall, timeline
from tnt_jax.distributed.runtime import get_process_count, init, is_master_rank
from tnt_jax.keras_compat.callbacks.base import Callback
from tnt_jax.keras_compat.callbacks.history import History
from tnt_jax.keras_compat.callbacks.monitor import direction
from tnt_jax.keras_compat.callbacks.progbar import ProgbarLogger
from tnt_jax.keras_compat.callbacks.scope import CallbackScope, callback_scope, is_keras_backup

_PHASES = ("train", "test", "predict")
_BATCH_HOOKS = [f"on_{phase}_batch_{moment}" for phase in _PHASES for moment in ("begin", "end")]


class CallbackList:
    """Calls the hooks of several callbacks in order.

    `fit` creates one. In a custom loop every process creates one and calls its hooks, which have
    Keras's names:

        hooks = CallbackList(callbacks, add_history=True, model=model, epochs=3, steps=100)
        hooks.on_epoch_begin(epoch)
        hooks.on_train_batch_end(step, model.train_on_batch(x, y, return_dict=True))

    Args:
        callbacks: Callbacks to call, including Keras's own and those in `OnMaster` or `OnAllRanks`.
        add_history: Whether to append a `History`, unless there is one.
        add_progbar: Whether to append a `ProgbarLogger` on processes that print, unless there is
            one.
        model: The model that they see.
        **params: Parameters that they see: `epochs`, `steps`, `verbose`.

    Attributes:
        callbacks: The callbacks without wrappers.

    Raises:
        ValueError: If a callback cannot work here; the message says what to do instead.
    """

    def __init__(
        self,
        callbacks: Sequence[Any] | None = None,
        add_history: bool = False,
        add_progbar: bool = False,
        model: Any = None,
        **params: Any,
    ) -> None:
        self._model = model
        self._here = stall.here()
        self._is_alone = get_process_count() == 1
        prints = is_master_rank() or init().settings.output_on_all_devices
        callbacks = [*(callbacks or ())]
        plain = [getattr(callback, "callback", callback) for callback in callbacks]
        if add_history and not any(isinstance(callback, History) for callback in plain):
            callbacks.append(History())
        if (
            add_progbar
            and prints
            and not any(type(callback).__name__ == "ProgbarLogger" for callback in plain)
        ):
            callbacks.append(ProgbarLogger())
        self._scoped = [
            callback_scope(
                given, num_processes=get_process_count(), is_master=is_master_rank(), prints=prints
            )
            for given in callbacks
        ]
        self._scoped.sort(key=lambda scoped: getattr(scoped.callback, "runs_last", False))
        self.callbacks = [scoped.callback for scoped in self._scoped]
        for scoped in self._scoped:
            self._introduce(scoped, params)
        # A batch hook that no callback overrides costs nothing: the loop runs ahead of the devices.
        self._batch_hooks = {hook: self._functions(hook) for hook in _BATCH_HOOKS}

    def call(self, hook: str, *args: Any) -> None:
        """Calls one hook, such as `on_epoch_end`, of every callback.

        The callbacks share one copy of the logs and may add to it.
        """
        args = tuple(dict(arg) if isinstance(arg, Mapping) else arg for arg in args)
        for scoped in self._scoped:
            restores = (
                hook == "on_train_begin" and not self._is_alone and is_keras_backup(scoped.callback)
            )
            # On the master alone: it changes the master's model, possibly from a local disk, and
            # the others follow below.
            function = (replace(scoped, scope="per_process") if restores else scoped).bind(hook)
            if function is not None:
                name = f"{type(scoped.callback).__name__}.{hook}"
                with (
                    stall.in_phase("callback", name, spent="callbacks"),
                    timeline.span(name, "callback"),
                ):
                    function(*args)
            if restores:
                self._model.resumption.adopt_master_state()

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Returns the function that calls a hook, such as `on_epoch_end`, of every callback."""
        if not hasattr(Callback, name) or not name.startswith("on_"):
            raise AttributeError(f"CallbackList has no attribute {name!r}.")
        if name in _BATCH_HOOKS:
            return lambda batch, logs=None: self.call_batch(
                name, batch, {} if logs is None else logs
            )
        if "_epoch_" in name:
            return lambda epoch, logs=None: self.call(name, epoch, logs or {})
        return lambda logs=None: self.call(name, logs or {})

    def call_batch(self, hook: str, batch: int, logs: Mapping[str, float] | None) -> None:
        """Calls one batch hook, such as `on_train_batch_end`, of the callbacks that have it."""
        if not self._batch_hooks[hook]:
            return
        here = self._here
        outer = here.doing
        try:
            with goodput.phase("callbacks"):
                for doing, function in self._batch_hooks[hook]:
                    here.doing = doing
                    function(batch, logs)
        finally:
            here.doing = outer

    def has_batch_hook(self, hook: str) -> bool:
        """Returns whether any callback has this batch hook."""
        return bool(self._batch_hooks[hook])

    def clear_screen(self) -> None:
        """Removes the bars of calls that have ended by an error."""
        for callback in self.callbacks:
            if isinstance(callback, ProgbarLogger):
                callback.clear()

    def _introduce(self, scoped: CallbackScope, params: dict[str, Any]) -> None:
        callback = scoped.callback
        if getattr(callback, "mode", None) == "auto" and hasattr(callback, "monitor"):
            # Keras's own rule reads the metrics of a Keras model.
            callback.mode = direction(callback.monitor, self._model)
        if hasattr(callback, "siblings"):
            callback.siblings = self.callbacks
            callback.scope = scoped.scope
        if scoped.runs:
            with scoped.entered():
                if self._model is not None:
                    callback.set_model(self._model)
                # As in Keras, whose bar asks for the number of epochs of an evaluation, too.
                is_ours = type(callback).__module__.startswith("tnt_jax.")
                callback.set_params(params if is_ours else {"epochs": 1} | params)

    def _functions(self, hook: str) -> list[tuple[tuple[stall.Phase, str], Callable]]:
        functions = [
            (f"{type(scoped.callback).__name__}.{hook}", scoped.bind(hook))
            for scoped in self._scoped
            if overrides(scoped.callback, hook)
        ]
        return [
            (("callback", name), timeline.recorded(function, name, "callback"))
            for name, function in functions
            if function is not None
        ]


def overrides(callback: Any, hook: str) -> bool:
    """Returns whether a callback's class overrides a batch hook of its library's base class.

    A class in between counts, too.

    `on_batch_begin` and `on_batch_end` count as the hooks of training, which call them.
    """
    names = [hook, hook.replace("_train", "")] if "_train_" in hook else [hook]
    return any(_defines(callback, name) for name in names)


def _defines(callback: Any, name: str) -> bool:
    function = getattr(type(callback), name, None)
    is_inherited = any(
        function is cls.__dict__.get(name)
        for cls in type(callback).__mro__
        if cls.__name__ == "Callback"
    )
    return name in vars(callback) or (function is not None and not is_inherited)
