"""The other processes of a job on this machine, whose end the system tells at once."""

import contextlib
import os
import select
import threading


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
