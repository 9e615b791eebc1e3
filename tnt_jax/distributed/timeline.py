"""A timeline of what the host does, in Chrome's trace format: for chrome://tracing and Perfetto.

With `TNT_TIMELINE=FILE`, which `tnt-jax --timeline FILE` sets, each process writes what it calls,
waits for, compiles and runs (`with span("train step", "step", step=5):`). Process 0 writes FILE,
process 1 FILE with `.1` before its ending. Times are those of the hosts' clocks, in microseconds.
What devices do, `jax.profiler` records.
"""

import atexit
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, TextIO, TypeVar

from tnt_jax.job import Slot

_F = TypeVar("_F", bound=Callable)
_NOTHING = nullcontext()


class Timeline:
    """A new file of events of this process, one a line, in the order in which they end."""

    def __init__(self, path: Path, process: int) -> None:
        self._process, self._pid = process, os.getpid()
        # The monotonic clock, set by that of the host once.
        self._origin_ns = time.time_ns() - time.perf_counter_ns()
        self._lock = threading.Lock()
        self._threads: set[int] = set()
        # Each line reaches the file at once: a process may end without leaving Python.
        self._file: TextIO | None = path.open("w", buffering=1)
        self._file.write("[\n")
        own = f"process {process} on {socket.gethostname()}"
        self._write("process_name", "M", 0, args={"name": own})

    @contextmanager
    def span(self, name: str, category: str, arguments: dict[str, Any]) -> Iterator[None]:
        """Records how long the block takes."""
        start_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(name, category, start_ns, time.perf_counter_ns(), arguments)

    def add(
        self, name: str, category: str, start_ns: int, end_ns: int, arguments: dict[str, Any]
    ) -> None:
        """Records an event of the current thread between two times of `time.perf_counter_ns`."""
        thread = threading.get_native_id()
        if thread not in self._threads:
            self._threads.add(thread)
            self._write("thread_name", "M", thread, args={"name": threading.current_thread().name})
        start_us, length_us = (self._origin_ns + start_ns) / 1000, (end_ns - start_ns) / 1000
        self._write(name, "X", thread, cat=category, ts=start_us, dur=length_us, args=arguments)

    def close(self) -> None:
        """Ends the file."""
        # A process that os.fork has made shares the file.
        if self._file is not None and os.getpid() == self._pid:
            with self._lock:
                self._file.write("{}]\n")
                self._file.close()
        self._file = None

    def _write(self, name: str, kind: str, thread: int, **others: Any) -> None:
        event = {"name": name, "ph": kind, "pid": self._process, "tid": thread, **others}
        with self._lock:
            if self._file is not None and os.getpid() == self._pid:
                self._file.write(json.dumps(event) + ",\n")


_timeline = Slot[Timeline | None](lambda: None, close=Timeline.close, lasts=True)


def start(path: str, process: int) -> None:
    """Begins to record what this process does; files of others than process 0 have its number."""
    file = Path(path)
    own = file.with_name(f"{file.stem}.{process}{file.suffix}") if process else file
    _timeline.set(Timeline(own, process))
    atexit.register(stop)


def stop() -> None:
    """Ends the file; does nothing if none was begun."""
    _timeline.close(_timeline.get())
    _timeline.set(None)


current = _timeline.get
"""Returns the timeline of this job; None if nothing is recorded."""


def span(name: str, category: str, **arguments: Any) -> AbstractContextManager[None]:
    """Returns a context manager that records how long its block takes, if anything is recorded.

    The category is `"call"`, `"wait"`, `"data"`, `"step"`, `"callback"` or `"compile"`.
    """
    timeline = _timeline.get()
    return _NOTHING if timeline is None else timeline.span(name, category, arguments)


def recorded(function: _F, name: str, category: str) -> _F:
    """Returns a function whose calls are recorded, if anything is; else the function itself."""
    timeline = _timeline.get()
    return function if timeline is None else timeline.span(name, category, {})(function)


def add(name: str, category: str, start_ns: int, **arguments: Any) -> None:
    """Records an event that ends at this moment, if anything is recorded; see `Timeline.add`."""
    if (timeline := _timeline.get()) is not None:
        timeline.add(name, category, start_ns, time.perf_counter_ns(), arguments)


def add_compilation(event: str, start_s: float, end_s: float) -> None:
    """Records an event of JAX's compiler between two times of `time.time`, if anything is."""
    # JAX takes both times itself, so a thread that is interrupted on its way here shifts nothing.
    if (timeline := _timeline.get()) is not None:
        name = event.rsplit("/", 1)[1].removesuffix("_duration")
        ahead_ns = _wall_clock_ahead_ns()
        start_ns, end_ns = (round(1e9 * wall) - ahead_ns for wall in (start_s, end_s))
        timeline.add(name, "compile", start_ns, end_ns, {})


def _wall_clock_ahead_ns() -> int:
    """Returns `time.time_ns` minus `time.perf_counter_ns`, of the reading that took least time."""
    readings = [(time.perf_counter_ns(), time.time_ns(), time.perf_counter_ns()) for _ in range(3)]
    before, wall, after = min(readings, key=lambda reading: reading[2] - reading[0])
    return wall - (before + after) // 2
