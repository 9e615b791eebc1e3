"""The state of this process's job: what lives from its first use until `tnt_jax.shutdown()`.

    _warned = Slot[set[str]](set)  # In the file that owns it.
    ...
    _warned.get().add(name)

One object holds all of it, and `shutdown` drops that object, so that two jobs one after the other
in one process start alike. What a module keeps for the life of the process instead says why there.
"""

import hashlib
import hmac
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar

_T = TypeVar("_T")
_P = ParamSpec("_P")


class _Job:
    """The values of all slots, in the order in which they were made."""

    def __init__(self) -> None:
        self.values: dict[Slot[Any], Any] = {}


class Slot(Generic[_T]):
    """A value that each job has once, made when it is first asked for.

    Args:
        make: Makes the value of a job; it may ask for other slots.
        close: Is given the value, unless that is None, when the job ends, before the values that
            were made earlier are closed; for threads, connections and hooks.
        lasts: Whether the value stays when the process leaves its devices and the other processes
            to go on with others, in an elastic job.
    """

    def __init__(
        self,
        make: Callable[[], _T],
        *,
        close: Callable[[Any], None] | None = None,
        lasts: bool = False,
    ) -> None:
        self._make = make
        self._close = close
        self.lasts = lasts

    def get(self) -> _T:
        """Returns the value."""
        values = _job.values
        if self not in values:
            with _lock:
                if self not in values:
                    values[self] = self._make()
        return values[self]

    def set(self, value: _T) -> None:
        """Replaces the value, without closing the one before; it counts as made now."""
        _job.values.pop(self, None)
        _job.values[self] = value

    def close(self, value: _T) -> None:
        """Closes a value of this slot."""
        if self._close is not None and value is not None:
            self._close(value)


def once_per_job(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Makes a function return what it returned before in this job for the same arguments.

    Args:
        function: Takes arguments that can be hashed.
    """
    results = Slot[dict[Any, Any]](dict)

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        known = results.get()
        key = args, tuple(sorted(kwargs.items()))
        if key not in known:
            known[key] = function(*args, **kwargs)
        return known[key]

    return call


secret = Slot[bytes](bytes, lasts=True)
"""Secret of the processes of the job; empty if they were started without one."""


def sign(purpose: str, data: bytes) -> bytes:
    """Returns what shows that a process of this job wrote data: 32 bytes, by HMAC-SHA-256.

    Args:
        purpose: What the data are, such as their key, so that they cannot be taken for others.
        data: The data.
    """
    # The length tells the purpose from the data.
    message = f"{len(purpose)} {purpose}".encode() + data
    return hmac.digest(secret.get(), message, hashlib.sha256)


def check_signature(purpose: str, data: bytes, signature: bytes) -> None:
    """Raises a RuntimeError unless a process of this job made the signature by `sign`."""
    if not hmac.compare_digest(sign(purpose, data), signature):
        raise RuntimeError(
            f"{purpose} was not written by a process of this job: its signature is wrong. Either "
            "the processes have different values of TNT_JOB_SECRET, which must be the same for "
            "all of them, or somebody else on the network reached the job. See "
            "docs/launching.md#a-trusted-network."
        )


def end_job() -> None:
    """Closes the values of the job, the latest first, and drops them all.

    Every value is closed, also after one that cannot be.

    Raises:
        Exception: What the last of them raised that could not be closed.
    """
    _end(lambda slot: True)


def end_generation() -> None:
    """Closes and drops, like `end_job`, the values that do not last beyond the devices in use."""
    _end(lambda slot: not slot.lasts)


def _end(drops: Callable[[Slot[Any]], bool]) -> None:
    global _job
    kept = _Job()
    try:
        with ExitStack() as closing:
            for slot, value in _job.values.items():
                if drops(slot):
                    closing.callback(slot.close, value)
                else:
                    kept.values[slot] = value
    finally:
        _job = kept


_job = _Job()
# Guards the making of values, whatever the job.
_lock = threading.RLock()
