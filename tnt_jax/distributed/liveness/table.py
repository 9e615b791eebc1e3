"""The table of a job's processes: which are there, where each is, and how it has left.

It lies in the coordination service; this module alone knows its keys.
"""

import contextlib
import json
import os
import select
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax

from tnt_jax import _jax
from tnt_jax.cluster.devices import machine_id
from tnt_jax.settings import LOST_EXIT_CODE, STALLED_EXIT_CODE

_PIDS, _FIRST, _LEFT = "tnt_jax/pid", "tnt_jax/first_left", "tnt_jax/left"
_CALL, _ANSWERS = "tnt_jax/roll_call", "tnt_jax/roll_call_answers"
_NOTES = "tnt_jax/stall/note"
ANSWER_TIMEOUT_S = 5.0
"""Seconds that a process has to answer: one that holds Python's lock, or has no core, is late."""
# What a process still computes after the last of the others has had its values ends within the
# second time.
_FAILURE_PATIENCE_S, _END_PATIENCE_S = 1.0, 4.0


@dataclass(frozen=True)
class ExitNotice:
    """How a process left the job.

    Attributes:
        because: Number of the process that it would have waited for, or None.
        is_lost: Whether it ended without leaving the job, or does not run.
        is_stalled: Whether it makes no progress, so that all processes end; `how` says why.
    """

    process: int
    code: int | None
    how: str
    because: int | None = None
    is_lost: bool = False
    is_stalled: bool = False

    @property
    def is_failure(self) -> bool:
        """Whether it failed or was lost."""
        return bool(self.code) or self.is_lost

    @property
    def patience_s(self) -> float:
        """Seconds that a process waits for it before it ends as well."""
        return _FAILURE_PATIENCE_S if self.is_failure else _END_PATIENCE_S

    @property
    def code_of_others(self) -> int:
        """Exit code of the processes that cannot go on without it."""
        if self.is_stalled:
            return STALLED_EXIT_CODE
        if self.is_lost:
            return LOST_EXIT_CODE
        return 1 if self.code is None else self.code


def exchange(
    name: str, text: str, process: int, num_processes: int, *, timeout_s: int
) -> list[str]:
    """Returns the texts of all processes at the start, before anyone watches whether they come."""
    client, folder = _jax.coordination_client(), f"tnt_jax/{name}"
    client.key_value_set(f"{folder}/{process}", text)
    client.wait_at_barrier(folder, timeout_s * 1000)
    texts = _by_process(client, folder)
    return [texts[other] for other in range(num_processes)]


def post_pid(client: Any, process: int) -> None:
    """Tells the other processes of this machine the process id of this one."""
    client.key_value_set(f"{_PIDS}/{machine_id('pid')}/{process}", str(os.getpid()))


def local_peers(client: Any, process: int) -> "LocalPeers":
    """Returns the other processes of this machine; all must have posted their ids."""
    pids = _by_process(client, f"{_PIDS}/{machine_id('pid')}")
    return LocalPeers({other: int(pid) for other, pid in pids.items() if other != process})


class LocalPeers:
    """Processes that are watched by process file descriptors; several threads may ask."""

    def __init__(self, pids: Mapping[int, int] | None = None) -> None:
        self._processes: dict[int, int] = {}
        self._lock = threading.Lock()
        for process, pid in (pids or {}).items():
            # It has left already, or the system has no such call: then closed connections are all
            # that tells.
            with contextlib.suppress(OSError):
                self._processes[os.pidfd_open(pid)] = process

    def running(self) -> set[int]:
        """Returns the numbers of those whose end has not been taken."""
        return set(self._processes.values())

    def take_ended(self) -> list[int]:
        """Returns the numbers of those that have ended, each once."""
        ready = select.poll()
        for descriptor in list(self._processes):
            ready.register(descriptor, select.POLLIN)
        ended = []
        for descriptor, _ in ready.poll(0):
            with self._lock:
                process = self._processes.pop(descriptor, None)
            if process is not None:  # Otherwise another thread has taken it.
                os.close(descriptor)
                ended.append(process)
        return ended


def post_notice(client: Any, process: int, notice: ExitNotice) -> None:
    """Says how a process has left, unless that is said, and has all processes look for it."""
    _set_once(client, f"{_LEFT}/{notice.process}", json.dumps(asdict(notice)))
    wake(client, process)


def notices(client: Any) -> list[ExitNotice]:
    """Returns how processes have left; nothing if the service has ended, and with it the job."""
    try:
        return [ExitNotice(**json.loads(text)) for _, text in client.key_value_dir_get(_LEFT)]
    except jax.errors.JaxRuntimeError:
        return []


def wake(client: Any, process: int) -> None:
    """Has the threads of all processes look for exit notices and for a roll call."""
    _set_once(client, _FIRST, str(process))


def is_awake(client: Any) -> bool:
    """Returns whether the processes are to look for exit notices and for a roll call."""
    return peek(client, _FIRST) is not None


def peek(client: Any, key: str) -> str | None:
    """Returns the value of any key, None if it has none or the service does not answer."""
    try:
        return _jax.value_of_key(client, key)
    except jax.errors.JaxRuntimeError:  # If the service has ended, so has the job.
        return None


def call_roll(client: Any, process: int) -> None:
    """Asks all processes to say that they are alive, and answers for this one."""
    # A process of another machine cannot be watched, and the service notices its end only after
    # `TNT_HEARTBEAT_TIMEOUT_S` seconds. A broken connection does not say which of the others has
    # ended, as those that fail as a consequence close theirs, too.
    for folder in (_CALL, _ANSWERS):
        _set_once(client, f"{folder}/{process}", f"{time.time():.3f}")
    wake(client, process)


def answer_roll(client: Any, process: int) -> bool:
    """Answers if any process has called the roll; returns whether one has."""
    try:
        is_called = bool(client.key_value_dir_get(_CALL))
    except jax.errors.JaxRuntimeError:  # The service has ended, and with it the job.
        return False
    if is_called:
        _set_once(client, f"{_ANSWERS}/{process}", f"{time.time():.3f}")
    return is_called


def unanswered(client: Any, num_processes: int) -> set[int]:
    """Returns the processes that have not answered yet; none if the service has ended."""
    try:
        return set(range(num_processes)) - set(_by_process(client, _ANSWERS))
    except jax.errors.JaxRuntimeError:
        return set()


def post_place(client: Any, process: int, text: str) -> None:
    """Says where a process is in its script."""
    client.key_value_set(f"{_NOTES}/{process}", text, allow_overwrite=True)


def places(client: Any) -> dict[int, str]:
    """Returns where each process was last, by process."""
    return _by_process(client, _NOTES)


def _by_process(client: Any, folder: str) -> dict[int, str]:
    return {int(key.rpartition("/")[2]): text for key, text in client.key_value_dir_get(folder)}


def _set_once(client: Any, key: str, text: str) -> None:
    # It is there already, or the service has ended.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        client.key_value_set(key, text)
