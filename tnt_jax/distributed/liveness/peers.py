"""Finds the processes that do not answer any more, when a connection has broken for no known cause.

A process of another machine cannot be watched, and the coordination service notices its end only
after `TNT_HEARTBEAT_TIMEOUT_S` seconds. A broken connection between two processes does not say
which of the others has ended, as those that fail as a consequence close theirs, too.
"""

import contextlib
import os
import select
import threading
import time
from typing import Any

import jax


class LocalPeers:
    """Processes that are watched by process file descriptors; several threads may ask."""

    def __init__(self) -> None:
        self._processes: dict[int, int] = {}
        self._lock = threading.Lock()

    def add(self, process: int, pid: int) -> None:
        """Begins to watch a process.

        Args:
            process: Its number in the job.
            pid: Its process id.
        """
        # It has left already, or the system has no such call: then closed connections are all that
        # tells.
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


_CALL, _ANSWERS = "tnt_jax/roll_call", "tnt_jax/roll_call_answers"
ANSWER_TIMEOUT_S = 5.0
"""Seconds that a process has to answer: one that holds Python's lock, or has no core, is late."""


def call(client: Any, process: int) -> None:
    """Asks all processes to say that they are alive, and answers for this one.

    Args:
        client: Client of the coordination service.
        process: Number of this process.
    """
    _set(client, f"{_CALL}/{process}")
    _set(client, f"{_ANSWERS}/{process}")


def answer(client: Any, process: int) -> bool:
    """Answers if any process has asked; returns whether one has."""
    try:
        is_called = bool(client.key_value_dir_get(_CALL))
    except jax.errors.JaxRuntimeError:  # The service has ended, and with it the job.
        return False
    if is_called:
        _set(client, f"{_ANSWERS}/{process}")
    return is_called


def missing(client: Any, num_processes: int) -> set[int]:
    """Returns the processes that have not answered yet; none if the service has ended."""
    try:
        answers = client.key_value_dir_get(_ANSWERS)
    except jax.errors.JaxRuntimeError:
        return set()
    return set(range(num_processes)) - {int(key.rpartition("/")[2]) for key, _ in answers}


def _set(client: Any, key: str) -> None:
    # It is there already, or the service has ended.
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        client.key_value_set(key, f"{time.time():.3f}")
