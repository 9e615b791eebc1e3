"""The callbacks of one `fit`, `evaluate` or `predict`: calls each hook in order.

Checks first that all processes have the same: they would wait for each other forever.
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tnt_jax.distributed import goodput, timeline
from tnt_jax.distributed.elastic import link
from tnt_jax.distributed.host.collectives import call_on_all_processes
from tnt_jax.distributed.host.comparison import compare
from tnt_jax.distributed.joining.runtime import get_process_count, init, is_master_rank
from tnt_jax.distributed.leaving import gist
from tnt_jax.distributed.liveness import phases
from tnt_jax.distributed.liveness.rendezvous import meet
from tnt_jax.keras_compat.callbacks.base import (
    DECIDING,
    Callback,
    CallbackScope,
    OnAllRanks,
    OnMaster,
    callback_scope,
    controls_training,
    first_base,
    is_keras_writer,
    unwrapped,
)
from tnt_jax.keras_compat.callbacks.monitor import direction
from tnt_jax.keras_compat.callbacks.progbar import ProgbarLogger
from tnt_jax.keras_compat.callbacks.recording import History
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
_LIBRARIES = ("tnt_jax", "keras", "tf_keras", "tensorflow")


class _OfMaster(Callback):
    """Stands on the other processes for a callback that only the master has."""

    def __init__(self, may_stop: bool) -> None:
        super().__init__()
        self.may_stop = may_stop


def agree_on_callbacks(callbacks: Sequence[Any], call: str) -> list[Any]:
    """Returns as many callbacks on every process, in the master's order, or raises on all.

    Those of the master alone run there; settings of those that decide or save together must agree.
    """
    if get_process_count() == 1:
        return list(callbacks)
    agreed = _agree_on_kinds(callbacks, call)
    together = [item for item in agreed if not is_keras_writer(item)]
    compared = [item for item in together if first_base(item, _COMPARED) is not None]
    compare(call, describe_callbacks(compared), advice=_ADVICE)
    return agreed


def describe_callbacks(callbacks: Sequence[Any]) -> dict[str, str]:
    """Returns the settings of callbacks of tnt_jax and Keras, by name; what prints is left out."""
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
            is_as_it_is = kind == "History" or isinstance(item, (OnMaster, OnAllRanks))
            found.append(item if is_as_it_is else OnMaster(item))
    return found


def may_stop_within_epoch(callbacks: Sequence[Any]) -> bool:
    """Returns whether a callback may set `stop_training` between two steps of an epoch."""
    return any(map(_may_stop, callbacks))


def _may_stop(callback: Any) -> bool:
    inner = getattr(callback, "callback", callback)
    if isinstance(inner, _OfMaster):
        return inner.may_stop
    is_of_library = type(inner).__module__.partition(".")[0] in ("tnt_jax", "keras")
    return not is_of_library or type(inner).__name__ in _STOPPING


def _kind(callback: Any) -> str:
    inner, name = getattr(callback, "callback", None), type(callback).__name__
    return name if inner is None else f"{name}({_kind(inner)})"


def _outlasting_generation(function: Callable, name: str) -> Callable:
    """Returns a hook that ends if it waits for processes of an elastic job that are lost."""
    own = link()
    if own is None:
        return function

    def call(*args: Any) -> None:
        try:
            function(*args)
        except Exception as error:
            if not own.ended:
                raise
            logger.warning(
                "%s waited for other processes when the generation ended, and is not repeated: %s",
                name,
                gist(error),
            )

    return call


def _prints() -> bool:
    return is_master_rank() or init().settings.output_on_all_devices


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
            one; with `verbose=2` it prints a line per epoch.
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
        self._here = phases.here()
        given = [*(callbacks or ())]
        plain = unwrapped(given)
        # History comes last, as in Keras 3: other callbacks may add to the logs that it records.
        if add_history and not any(isinstance(callback, History) for callback in plain):
            given.append(History())
        has_bar = any(type(callback).__name__ == "ProgbarLogger" for callback in plain)
        # In an elastic job another process may become the one that prints.
        if add_progbar and not has_bar and (_prints() or link() is not None):
            given.append(ProgbarLogger(2 if params.get("verbose") == 2 else 1))
        self._given, self._params = given, params
        self._scoped = self._scopes()
        self.callbacks = [scoped.callback for scoped in self._scoped]
        for scoped in self._scoped:
            self._introduce(scoped)
        # A batch hook that no callback overrides costs nothing: the loop runs ahead of the devices.
        self._batch_hooks = {hook: self._functions(hook) for hook in _BATCH_HOOKS}

    def _scopes(self) -> list[CallbackScope]:
        """Returns the callbacks in the order of their calls, and on which processes they run."""
        prints = _prints()
        # An elastic job is as one of several processes from the start.
        number = get_process_count() if link() is None else 2
        scopes = [
            callback_scope(given, num_processes=number, is_master=is_master_rank(), prints=prints)
            for given in self._given
        ]
        return sorted(scopes, key=lambda scoped: getattr(scoped.callback, "runs_last", False))

    def renew(self) -> None:
        """Goes on among the processes of another generation of an elastic job.

        What ran on the master alone begins on a process that has become the master.
        """
        before, self._scoped = self._scoped, self._scopes()
        for scoped, earlier in zip(self._scoped, before, strict=True):
            callback = scoped.callback
            if scoped.runs and not earlier.runs:
                self._introduce(scoped)
                appends = getattr(callback, "append", None)
                with scoped.entered():
                    if appends is False:
                        callback.append = True  # Behind the rows of the earlier master.
                    callback.on_train_begin({})
                    if appends is False:
                        callback.append = False
            elif isinstance(callback, Callback):
                callback.on_generation()
        self._batch_hooks = {hook: self._functions(hook) for hook in _BATCH_HOOKS}

    def call(self, hook: str, *args: Any) -> None:
        """Calls a hook of every callback, with one copy of the logs, to which they may add."""
        args = tuple(dict(arg) if isinstance(arg, Mapping) else arg for arg in args)
        for scoped in self._scoped:
            restores = (
                hook == "on_train_begin"
                and get_process_count() > 1
                and is_keras_writer(scoped.callback, ["BackupAndRestore"])
            )
            # On the master alone: it changes the master's model, possibly from a local disk, and
            # the others follow below.
            function = (replace(scoped, scope="per_process") if restores else scoped).bind(hook)
            if function is not None:
                name = f"{type(scoped.callback).__name__}.{hook}"
                phase = phases.in_phase("callback", name, spent="callbacks")
                with phase, timeline.span(name, "callback"):
                    _outlasting_generation(function, name)(*args)
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

    def _introduce(self, scoped: CallbackScope) -> None:
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
                callback.set_params(self._params if is_ours else {"epochs": 1} | self._params)

    def _functions(self, hook: str) -> list[tuple[tuple[phases.Phase, str], Callable]]:
        functions: list[tuple[tuple[phases.Phase, str], Callable]] = []
        for scoped in self._scoped:
            function = scoped.bind(hook) if overrides(scoped.callback, hook) else None
            if function is not None:
                name = f"{type(scoped.callback).__name__}.{hook}"
                recorded = timeline.recorded(function, name, "callback")
                functions.append((("callback", name), _outlasting_generation(recorded, name)))
        return functions


def overrides(callback: Any, hook: str) -> bool:
    """Returns whether a callback's class, or one in between, overrides a hook of its library's.

    `on_batch_begin` and `on_batch_end` count as the hooks of training, which call them.
    """
    names = [hook, hook.replace("_train", "")] if "_train_" in hook else [hook]
    bases = [
        cls
        for cls in type(callback).__mro__
        if cls.__name__ == "Callback" and cls.__module__.partition(".")[0] in _LIBRARIES
    ]
    for name in names:
        function = getattr(type(callback), name, None)
        is_inherited = any(function is base.__dict__.get(name) for base in bases)
        if name in vars(callback) or (function is not None and not is_inherited):
            return True
    return False
