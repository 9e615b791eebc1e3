"""On which processes a callback runs, and on which it may print and write files.

Every callback runs on every process with the same numbers, so that decisions agree; what it prints is shown by the master only,
and delivered callbacks write files on the master only. Two wrappers change that:

    model.fit(..., callbacks=[OnMaster(UploadReport()), OnAllRanks(CSVLogger(f"log-{tnt_jax.get_rank()}.csv"))])
"""

import contextlib
import io
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

# Who takes part in what a hook does: all processes together, the master alone, or each process by itself.
Company = Literal["together", "master", "each"]

# Callbacks that steer training or return its result; what they decide must be decided on every process.
_DECIDING = (
    "EarlyStopping", "LearningRateScheduler", "ReduceLROnPlateau", "LearningRateWarmup", "TerminateOnNaN", "SwapEMAWeights",
    "BackupAndRestore", "History",
)  # fmt: skip
# Real Keras callbacks that write files or send data.
_KERAS_WRITERS = ("ModelCheckpoint", "CSVLogger", "TensorBoard", "BackupAndRestore", "RemoteMonitor")
_REJECTED = {
    "BaseLogger": "It averages logs by itself, but logs are averages over all ranks already: leave it out.",
    "OrbaxCheckpoint": "It reads the variables of a Keras model: use tnt_jax.callbacks.ModelCheckpoint with a directory.",
}

_company: ContextVar[Company] = ContextVar("tnt_jax_callback_company", default="together")


class _Wrapper:
    def __init__(self, callback: Any) -> None:
        if isinstance(callback, (_Wrapper, type)) or not hasattr(callback, "set_model"):
            raise TypeError(f"{type(self).__name__} takes one callback that is not wrapped yet, but got {callback!r}.")
        check_known(callback)
        self.callback = callback


class OnMaster(_Wrapper):
    """Runs a callback on the master process only, for instance to print, to time or to send something once.

    Args:
        callback: Any callback but those that steer training; it must not change the model.

    Raises:
        ValueError: If the callback steers training, such as `EarlyStopping`: the processes would part.
    """

    def __init__(self, callback: Any) -> None:
        super().__init__(callback)
        name = _first_base(callback, _DECIDING)
        if name is not None:
            raise ValueError(
                f"{name} must run on every process, because it steers training: pass it without OnMaster. It prints on the master only."
            )


class OnAllRanks(_Wrapper):
    """Lets a callback print and write files on every process; give each process a path of its own.

    Args:
        callback: Any callback.
    """


def company() -> Company:
    """Returns which processes take part in what the running hook does; `"together"` outside hooks."""
    return _company.get()


def check_changes_model(what: str) -> None:
    """Raises a RuntimeError if the master alone is about to change the model in a job of several processes.

    Args:
        what: What is about to happen, for the message.
    """
    if company() == "master":
        raise RuntimeError(
            f"{what} on the master alone would make its model differ from the other processes'. "
            "Pass the callback without OnMaster, so that every process does it."
        )


def check_known(callback: Any) -> None:
    """Raises a ValueError for callbacks that cannot work here, with what to do instead."""
    name = _first_base(callback, tuple(_REJECTED))
    if name is not None:
        raise ValueError(f"The callback {name} is not supported. {_REJECTED[name]}")


@dataclass(frozen=True)
class Placed:
    """A callback and where it runs.

    Attributes:
        callback: The callback itself, without a wrapper.
        company: With whom it acts.
        runs: Whether its hooks run on this process.
        is_silent: Whether what it prints on this process is dropped.
    """

    callback: Any
    company: Company
    runs: bool
    is_silent: bool

    def bind(self, hook: str) -> Callable | None:
        """Returns the function that runs a hook as it should, or None where it does not run."""
        function = getattr(self.callback, hook)
        if not self.runs:
            return None
        if self.company == "together" and not self.is_silent:
            return function

        def run(*args: Any) -> None:
            with self.entered():
                function(*args)

        return run

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Sets company and silence for as long as the callback runs."""
        token = _company.set(self.company)
        try:
            with contextlib.redirect_stdout(io.StringIO()) if self.is_silent else contextlib.nullcontext():
                yield
        finally:
            _company.reset(token)


def place(given: Any, *, num_processes: int, is_master: bool, speaks: bool) -> Placed:
    """Returns where a callback that the user gave runs.

    Args:
        given: A callback, or one in `OnMaster` or `OnAllRanks`.
        num_processes: Processes of the job.
        is_master: Whether this process is the master.
        speaks: Whether output of all callbacks is shown on this process.

    Raises:
        ValueError: If the callback cannot work here.
        TypeError: If it is no callback.
    """
    callback = given.callback if isinstance(given, _Wrapper) else given
    if isinstance(callback, type) or not hasattr(callback, "set_model"):
        hint = f" Create one: {callback.__name__}(...)." if isinstance(callback, type) else ""
        raise TypeError(f"callbacks must be tnt_jax or Keras callback objects, but got {callback!r}.{hint}")
    check_known(callback)
    if num_processes == 1:
        return Placed(callback, "together", runs=True, is_silent=False)
    if isinstance(given, OnAllRanks):
        return Placed(callback, "each", runs=True, is_silent=False)
    if isinstance(given, OnMaster) or is_keras_writer(callback):
        return Placed(callback, "master", runs=is_master, is_silent=False)
    return Placed(callback, "together", runs=True, is_silent=not speaks)


def is_keras_writer(callback: Any) -> bool:
    """Tells whether a callback is one of Keras's own that write files, or derived from one."""
    return any(cls.__name__ in _KERAS_WRITERS and _is_of_keras(cls) for cls in type(callback).__mro__)


def is_keras_backup(callback: Any) -> bool:
    """Tells whether a callback is Keras's own `BackupAndRestore`, or derived from it."""
    return any(cls.__name__ == "BackupAndRestore" and _is_of_keras(cls) for cls in type(callback).__mro__)


def _is_of_keras(cls: type) -> bool:
    return cls.__module__.split(".")[0] in ("keras", "tf_keras", "tensorflow")


def _first_base(callback: Any, names: tuple[str, ...]) -> str | None:
    return next((cls.__name__ for cls in type(callback).__mro__ if cls.__name__ in names), None)
