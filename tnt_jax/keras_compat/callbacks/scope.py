"""The processes on which a callback runs, and on which it may print and write files.

Every callback runs on every process with the same numbers, so that decisions agree. Only the master
shows what a callback prints, and the callbacks of tnt_jax write files on the master only. Two
wrappers change that:

    report = OnMaster(UploadReport())
    log = OnAllRanks(CSVLogger(f"log-{tnt_jax.get_rank()}.csv"))
    model.fit(..., callbacks=[report, log])
"""

import contextlib
import io
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import jax

from tnt_jax.distributed.rendezvous import acting_alone

# The processes that take part in a hook: all of them together, the master alone, or each one by
# itself.
Scope = Literal["all_processes", "main_process", "per_process"]

# Callbacks that control training or return its result; every process must make their decisions.
DECIDING = (
    "EarlyStopping", "LearningRateScheduler", "ReduceLROnPlateau", "LearningRateWarmup",
    "TerminateOnNaN", "SwapEMAWeights", "OptunaPruning",
    "BackupAndRestore", "RayReport", "History",
)  # fmt: skip
# Keras's own callbacks that write files or send data.
_KERAS_WRITERS = (
    "ModelCheckpoint",
    "CSVLogger",
    "TensorBoard",
    "BackupAndRestore",
    "RemoteMonitor",
)
_REJECTED = {
    "BaseLogger": "It averages logs by itself, but logs are averages over all ranks already: "
    "leave it out.",
    "OrbaxCheckpoint": "It reads the variables of a Keras model: use "
    "tnt_jax.callbacks.OrbaxCheckpoint.",
}

_scope: ContextVar[Scope] = ContextVar("tnt_jax_callback_scope", default="all_processes")


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
    """Lets a callback print and write files on every process; give each process its own path.

    Args:
        callback: Any callback.
    """


def is_wrapped(callback: Any) -> bool:
    """Returns whether a callback is in `OnMaster` or `OnAllRanks`."""
    return isinstance(callback, _Wrapper)


def controls_training(callback: Any) -> bool:
    """Returns whether every process needs a callback, because it decides how training goes on."""
    inner = getattr(callback, "callback", callback)
    return first_base(inner, DECIDING) is not None and type(inner).__name__ != "History"


def current_scope() -> Scope:
    """Returns the processes that take part in the running hook.

    Outside hooks the result is `"all_processes"`.
    """
    return _scope.get()


def check_changes_model(what: str) -> None:
    """Raises a RuntimeError if the master alone is about to change the model.

    In a job of one process this is allowed.

    Args:
        what: The action, for the message.
    """
    if current_scope() == "main_process":
        raise RuntimeError(
            f"{what} on the master alone would make its model differ from the other processes'. "
            "Pass the callback without OnMaster, so that every process does it."
        )


def check_can_read(array: jax.Array) -> None:
    """Raises a RuntimeError if the master alone is about to read what several processes hold.

    It would wait for the others.

    Args:
        array: Array of the training state.
    """
    is_here = array.is_fully_addressable or array.is_fully_replicated
    if not is_here and current_scope() == "main_process":
        raise RuntimeError(
            f"An array {list(array.shape)} lies in parts on several processes, so that the master "
            "alone cannot read it. Pass the callback without OnMaster, so that every process does."
        )


def check_known(callback: Any) -> None:
    """Raises a ValueError for unsupported callbacks, with an alternative."""
    found = (
        cls
        for cls in type(callback).__mro__
        if cls.__name__ in _REJECTED and not cls.__module__.startswith("tnt_jax.")
    )
    name = next((cls.__name__ for cls in found), None)
    if name is not None:
        raise ValueError(f"The callback {name} is not supported. {_REJECTED[name]}")


@dataclass(frozen=True)
class CallbackScope:
    """A callback, the processes on which it runs, and what it may do there.

    Attributes:
        callback: The callback itself, without a wrapper.
        scope: The processes that take part in its actions.
        runs: Whether its hooks run on this process.
        is_silent: Whether its output on this process is dropped.
    """

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

        def run(*args: Any) -> None:
            with self.entered():
                function(*args)

        return run

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Sets the scope and the silence while the callback runs."""
        token = _scope.set(self.scope)
        is_alone = self.scope == "main_process"
        try:
            with (
                acting_alone(type(self.callback).__name__)
                if is_alone
                else contextlib.nullcontext(),
                contextlib.redirect_stdout(io.StringIO())
                if self.is_silent
                else contextlib.nullcontext(),
            ):
                yield
        finally:
            _scope.reset(token)


def callback_scope(
    given: Any, *, num_processes: int, is_master: bool, prints: bool
) -> CallbackScope:
    """Returns the scope of a user's callback.

    Args:
        given: A callback, or one in `OnMaster` or `OnAllRanks`.
        num_processes: Number of processes in the job.
        is_master: Whether this process is the master.
        prints: Whether this process shows the output of all callbacks.

    Raises:
        ValueError: If the callback cannot work here.
        TypeError: If it is not a callback.
    """
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


def is_keras_writer(callback: Any) -> bool:
    """Returns whether a callback is a Keras callback that writes files, or a subclass of one."""
    return any(
        cls.__name__ in _KERAS_WRITERS and _is_of_keras(cls) for cls in type(callback).__mro__
    )


def is_keras_backup(callback: Any) -> bool:
    """Returns whether a callback is Keras's `BackupAndRestore`, or a subclass of it."""
    return any(
        cls.__name__ == "BackupAndRestore" and _is_of_keras(cls) for cls in type(callback).__mro__
    )


def _is_of_keras(cls: type) -> bool:
    return cls.__module__.split(".")[0] in ("keras", "tf_keras", "tensorflow")


def first_base(callback: Any, names: tuple[str, ...]) -> str | None:
    """Returns the first of the names that a class of a callback has, or None."""
    return next((cls.__name__ for cls in type(callback).__mro__ if cls.__name__ in names), None)
