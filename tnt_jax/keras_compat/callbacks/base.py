"""The base class of callbacks, and the processes on which they run, print and write files.

Every callback runs on every process with the same numbers, so that decisions agree. On the master
only are prints shown, and files written by callbacks of tnt_jax. Two wrappers change that:

    report = OnMaster(UploadReport())
    log = OnAllRanks(CSVLogger(f"log-{tnt_jax.get_rank()}.csv"))
    model.fit(..., callbacks=[report, log])
"""

import contextlib
import copy
import importlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import jax

from tnt_jax.distributed.joining.runtime import is_master_rank
from tnt_jax.distributed.liveness.rendezvous import acting_alone

# The processes that take part in a hook: all of them together, the master alone, or each one by
# itself.
Scope = Literal["all_processes", "main_process", "per_process"]

# Callbacks that control training or return its result; every process must make their decisions.
DECIDING = """
    EarlyStopping LearningRateScheduler ReduceLROnPlateau LearningRateWarmup TerminateOnNaN
    SwapEMAWeights OptunaPruning BackupAndRestore RayReport History
""".split()
# Keras's own callbacks that write files or send data.
_KERAS_WRITERS = "ModelCheckpoint CSVLogger TensorBoard BackupAndRestore RemoteMonitor".split()
_REJECTED = {
    "BaseLogger": "It averages logs by itself, but logs are averages over all ranks already: "
    "leave it out.",
    "OrbaxCheckpoint": "It reads the variables of a Keras model: use "
    "tnt_jax.callbacks.OrbaxCheckpoint.",
}

_scope: ContextVar[Scope] = ContextVar("tnt_jax_callback_scope", default="all_processes")


def import_for(what: str, module: str, package: str) -> Any:
    """Returns an optional module; a ModuleNotFoundError says that `what` needs its package."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        name = module.partition(".")[0]
        raise ModuleNotFoundError(f"{what} needs {name}: pip install {package}.") from error


def flat(callbacks: Any) -> list[Any]:
    """Returns callbacks, given as one, as None, or in nested sequences, as one list."""
    if isinstance(callbacks, Sequence) and not isinstance(callbacks, str):
        return [callback for part in callbacks for callback in flat(part)]
    return [] if callbacks is None else [callbacks]


def unwrapped(callbacks: Any) -> list[Any]:
    """Returns callbacks as one list, without `OnMaster` and `OnAllRanks`."""
    return [getattr(callback, "callback", callback) for callback in flat(callbacks)]


class _Wrapper:
    def __init__(self, callback: Any) -> None:
        if isinstance(callback, (_Wrapper, type)) or not hasattr(callback, "set_model"):
            raise TypeError(
                f"{type(self).__name__} takes one unwrapped callback, but got {callback!r}."
            )
        check_known(callback)
        self.callback = callback


class OnMaster(_Wrapper):
    """Runs a callback on the master process only, for instance to print or send something once.

    Args:
        callback: Any callback except those that control training; it must not change the model.

    Raises:
        ValueError: If the callback controls training, such as `EarlyStopping`: the processes would
            diverge.
    """

    def __init__(self, callback: Any) -> None:
        super().__init__(callback)
        name = first_base(callback, DECIDING)
        if name is not None:
            raise ValueError(
                f"{name} must run on every process, because it controls training: pass it without "
                "OnMaster. It prints on the master only."
            )


class OnAllRanks(_Wrapper):
    """Lets a callback print and write files on every process; give each process its own path."""


def controls_training(callback: Any) -> bool:
    """Returns whether every process needs a callback, because it decides how training goes on."""
    inner = getattr(callback, "callback", callback)
    return first_base(inner, DECIDING) is not None and type(inner).__name__ != "History"


def current_scope() -> Scope:
    """Returns the processes that take part in the running hook; outside hooks all of them."""
    return _scope.get()


def check_changes_model(what: str) -> None:
    """Raises a RuntimeError if the master alone, of several processes, would change the model."""
    if current_scope() == "main_process":
        raise RuntimeError(
            f"{what} on the master alone would make its model differ from the other processes'. "
            "Pass the callback without OnMaster, so that every process does it."
        )


def check_can_read(array: jax.Array) -> None:
    """Raises a RuntimeError if the master alone would read, and wait for, what several hold."""
    is_here = array.is_fully_addressable or array.is_fully_replicated
    if not is_here and current_scope() == "main_process":
        raise RuntimeError(
            f"An array {list(array.shape)} is sharded over several processes, so that the master "
            "alone cannot read it. Pass the callback without OnMaster, so that every process does."
        )


def check_known(callback: Any) -> None:
    """Raises a ValueError for unsupported callbacks, with an alternative."""
    for cls in type(callback).__mro__:
        name = cls.__name__
        if name in _REJECTED and not cls.__module__.startswith("tnt_jax."):
            raise ValueError(f"The callback {name} is not supported. {_REJECTED[name]}")


@dataclass(frozen=True)
class CallbackScope:
    """A callback, the processes on which it runs, and what it may do there."""

    callback: Any
    scope: Scope
    runs: bool
    is_silent: bool

    def bind(self, hook: str) -> Callable | None:
        """Returns the function that runs a hook in this scope, or None if it does not run here."""
        function = getattr(self.callback, hook)
        if not self.runs:
            return None
        if self.scope == "all_processes" and not self.is_silent:
            return function
        return self.entered()(function)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Sets the scope and the silence while the callback runs."""
        token = _scope.set(self.scope)
        try:
            with contextlib.ExitStack() as stack:
                if self.scope == "main_process":
                    stack.enter_context(acting_alone(type(self.callback).__name__))
                if self.is_silent:
                    stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
                yield
        finally:
            _scope.reset(token)


def callback_scope(
    given: Any, *, num_processes: int, is_master: bool, prints: bool
) -> CallbackScope:
    """Returns the scope of a user's callback."""
    callback = given.callback if isinstance(given, _Wrapper) else given
    if isinstance(callback, type) or not hasattr(callback, "set_model"):
        hint = f" Create one: {callback.__name__}(...)." if isinstance(callback, type) else ""
        raise TypeError(
            f"callbacks must be tnt_jax or Keras callback objects, but got {callback!r}.{hint}"
        )
    check_known(callback)
    if num_processes == 1:
        return CallbackScope(callback, "all_processes", runs=True, is_silent=False)
    if isinstance(given, OnAllRanks):
        return CallbackScope(callback, "per_process", runs=True, is_silent=False)
    if isinstance(given, OnMaster) or is_keras_writer(callback):
        return CallbackScope(callback, "main_process", runs=is_master, is_silent=False)
    return CallbackScope(callback, "all_processes", runs=True, is_silent=not prints)


def is_keras_writer(callback: Any, names: Sequence[str] = _KERAS_WRITERS) -> bool:
    """Returns whether a callback is a Keras callback that writes files, or a subclass of one."""
    named = [cls for cls in type(callback).__mro__ if cls.__name__ in names]
    return any(c.__module__.split(".")[0] in ("keras", "tf_keras", "tensorflow") for c in named)


def first_base(callback: Any, names: Sequence[str]) -> str | None:
    """Returns the first of the names that a class of a callback has, or None."""
    return next((cls.__name__ for cls in type(callback).__mro__ if cls.__name__ in names), None)


def say(callback: Any, text: str) -> None:
    """Prints a text of a callback that is to be verbose."""
    if callback.verbose:
        print(text, flush=True)


class StepCount:
    """Counts the steps of a model as a callback sees them: in groups, maybe from within an epoch.

    That is where a resumed run begins, or a process that becomes the master.
    """

    def __init__(self) -> None:
        # Steps of the model so far, known from the first one that is seen, and those seen.
        self.done = self.of_run = 0
        # Batches of the epoch that are done; None until that is known.
        self._batches: int | None = None

    def begin_epoch(self) -> None:
        """Forgets the batches of the epoch before."""
        self._batches = None

    def begin(self, batch: int, model: Any) -> None:
        """Notes where an epoch begins, if this is its first step."""
        if self._batches is None:
            self.done, self._batches = _steps_of(model), batch

    def end(self, batch: int, model: Any, num_batches: int | None) -> None:
        """Counts the steps up to a batch of an epoch, whose number of batches may be known."""
        # A group that the end of the data leaves incomplete has the number of a whole one.
        reached = min(batch + 1, num_batches or batch + 1)
        if self._batches is None:
            self.done, self._batches = _steps_of(model) - reached, 0
        self.done += reached - self._batches
        self.of_run += reached - self._batches
        self._batches = reached


def _steps_of(model: Any) -> int:
    return int(model.state.step) if model.built else 0


class Callback:
    """Base class of callbacks: override the hooks you need, with Keras's names and order.

    Every process calls every hook with the same global numbers; only the master shows what a hook
    prints. A hook that writes files should check `self.writes` first. `OnMaster` and `OnAllRanks`
    arrange it otherwise. Logs of a batch are averages over the epoch so far: reading them waits for
    the devices, and not reading them costs nothing.

    Attributes:
        model: The running `tnt_jax.Model`; set before the first hook. It offers `stop_training`,
            `optimizer.learning_rate`, `optimizer.iterations`, `get_weights`, `set_weights`, `save`,
            `save_weights` and `load_weights`.
        params: `epochs`, `steps`, `verbose`.
        siblings: All callbacks of the run, including this one.
        scope: The processes that take part in the actions of this callback.
    """

    # Whether it acts after all others, whatever its position in the list.
    runs_last = False
    # Attributes that `state` returns, by their names without a leading underscore.
    _state_names: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.model: Any = None
        self.params: dict[str, Any] = {}
        self.siblings: list[Any] = []
        self.scope: Scope = "all_processes"

    @property
    def writes(self) -> bool:
        """Whether this process may write: the master, or in `OnAllRanks` each process."""
        return self.scope == "per_process" or is_master_rank()

    def set_model(self, model: Any) -> None:
        """Receives the model before the first hook."""
        self.model = model

    def set_params(self, params: dict[str, Any]) -> None:
        """Receives `epochs`, `steps` and `verbose` before the first hook."""
        self.params = params

    def state(self) -> dict[str, Any]:
        """Returns what a resumed run needs: JSON values, and lists of NumPy arrays, by name."""
        return {name.removeprefix("_"): getattr(self, name) for name in self._state_names}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Receives the result of `state`, after `on_train_begin` of the resumed run."""
        for name in self._state_names:
            setattr(self, name, copy.deepcopy(state[name.removeprefix("_")]))

    def on_generation(self) -> None:
        """Runs when other processes than before train on, in an elastic job."""

    def on_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs before a training step; an older name of `on_train_batch_begin`."""

    def on_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs after a training step; an older name of `on_train_batch_end`."""

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Runs once before training."""

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Runs once after training, with the logs of the last epoch; not after an exception."""

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs before epoch `epoch`, counted from 0."""

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs after an epoch and its validation, with training logs and `val_` logs.

        Later callbacks, and finally the `History`, see what earlier ones add to these logs.
        """

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs before step `batch` of the epoch."""
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs after step `batch` has begun; reading its logs, means so far, waits for devices."""
        self.on_batch_end(batch, logs)

    def on_test_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Runs before an evaluation."""

    def on_test_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Runs after an evaluation, with its logs."""

    def on_test_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs before a step of an evaluation."""

    def on_test_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs after a step of an evaluation was started."""

    def on_predict_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Runs before a prediction."""

    def on_predict_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Runs after a prediction."""

    def on_predict_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs before a step of a prediction."""

    def on_predict_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs after a step of a prediction."""
