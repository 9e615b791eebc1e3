"""Jobs that go on without processes that are lost, and with others in their place.

A `Link` is the line between a process of an elastic job and the launcher, which forms its
generations; `tnt_jax/launch/membership.py` explains these, and the messages of both.

XLA's sums between CPU processes wait half an hour for a process that is alive but has left them,
and XLA offers no way to end them. So the sockets between the processes are shut down (`cut`): those
that were accepted at a port where this process has begun to listen as it opened its devices, and
those to such a port of another one.
"""

import contextlib
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple, TypeVar

from tnt_jax.settings import read_settings

_BEAT_S = 1.0
_TICK_S = 0.01
_T = TypeVar("_T")


class Interrupted(RuntimeError):
    """Raised where a process waits for others once its generation has ended."""


@dataclass(frozen=True)
class Generation:
    """The processes that train together from here on.

    Attributes:
        number: 0 for those that the launcher has started first.
        index: The number of this process among them, -1 for one that has not joined.
        size: How many they are.
        address: `host:port` where the first one coordinates them.
        source: Index of the process with the newest state.
    """

    number: int
    index: int
    size: int
    address: str = ""
    source: int = 0


class Link:
    """A process's line to the launcher.

    Attributes:
        planned: Processes that the launcher has started first, and the number of this one's rank.
        generation: The one that this process belongs to.
    """

    def __init__(self, descriptor: int, *, rank: int, planned: int, joins: bool) -> None:
        os.set_inheritable(descriptor, False)
        self.rank, self.planned = rank, planned
        self.generation = Generation(0, -1 if joins else rank, planned)
        # Why generations have ended, or end after the step that runs, by their numbers.
        self._ends: dict[int, str] = {}
        self._ends_after_step: dict[int, str] = {}
        self._on_end: list[Callable[[], None]] = []
        self._results: list[Any] = []
        self._latest = -1
        self._formed: Generation | None = None
        self._socket = socket.socket(fileno=descriptor)
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._pid = os.getpid()
        self._send(kind="here")
        threading.Thread(target=self._listen, name="tnt_jax-link", daemon=True).start()

    @property
    def has_joined(self) -> bool:
        """Whether this process belongs to a generation."""
        return self.generation.index >= 0

    @property
    def ended(self) -> str:
        """Why the generation of this process has ended; empty while it trains."""
        return self._ends.get(self.generation.number, "")

    @property
    def ends_after_step(self) -> str:
        """Why it has ended, or ends after the step that runs; else empty."""
        return self.ended or self._ends_after_step.get(self.generation.number, "")

    def when_ended(self, function: Callable[[], None]) -> None:
        """Has a function called that ends waiting for others, as soon as a process is lost.

        That is from a thread. Where a process joins, it is called before this one goes to the next
        generation.
        """
        with self._changed:
            if not self.ended:
                self._on_end.append(function)
                return
        function()

    def result_of(self, call: int) -> Any:
        """Returns the result of a call of the script that the others have ended, or None."""
        return self._results[call] if call < len(self._results) else None

    def report_result(self, call: int, result: Any) -> None:
        """Reports that a call of the script has ended, with a JSON value."""
        self._send(kind="ended", call=call, result=result)

    def await_result(self, call: int, *, trains: bool) -> Any:
        """Returns the result of a call of the script once the others have ended it.

        After one that trains this process lacks the trained state, so it goes on only to join in a
        later one, which the others must have begun.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.result_of(call) is not None and (not trains or self._latest > call)
            )
        return self.result_of(call)

    def report_obstacle(self, obstacle: str, *, call: int, sizes: Sequence[int] | None) -> None:
        """Reports why the generation cannot change from here on; empty if it can.

        `call` is the one that a process can join, -1 if it cannot; `sizes` are the numbers of
        processes that can train, None for all.
        """
        self._send(kind="can_change", obstacle=obstacle, call=call, sizes=sizes)

    def report_step(self, place: str) -> None:
        """Reports that the first step of a generation is done; `place` in words."""
        self._send(kind="on", place=place)

    def report_stuck(self, index: int, why: str) -> None:
        """Reports that a process of the generation makes no progress."""
        self._send(kind="stuck", number=self.generation.number, index=index, why=why)

    def refuse(self, why: str) -> None:
        """Reports that this process, which was to join, cannot."""
        self._send(kind="refuses", why=why)

    def await_end(self, timeout_s: float) -> bool:
        """Returns whether the generation has ended, or ends within some seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: bool(self.ended), timeout_s)

    def next_generation(self, message: Mapping[str, Any]) -> Generation | None:
        """Reports that this process is ready, and returns the generation that it belongs to.

        Returns None once the others have ended the call that it was to join.
        """
        with self._changed:
            self._formed = None
        self._send(kind="ready", number=self.generation.number, **message)

        def is_decided() -> bool:
            return self._formed is not None or (
                not self.has_joined and self.result_of(message["call"]) is not None
            )

        with self._changed:
            self._changed.wait_for(is_decided)
            formed = self._formed
        if formed is not None:
            self._end_waiting()
            self.generation = formed
        return formed

    def _send(self, **message: Any) -> None:
        if os.getpid() == self._pid:
            # Without the launcher this process is ended by its supervisor.
            with self._sending:
                self._socket.sendall(json.dumps(message).encode() + b"\n")

    def _listen(self) -> None:
        waiting, sent_at = b"", time.monotonic()
        while True:
            ready, _, _ = select.select([self._socket], [], [], _BEAT_S)
            if time.monotonic() - sent_at >= _BEAT_S:
                sent_at = time.monotonic()
                self._send(kind="here")
            if not ready:
                continue
            data = self._socket.recv(1 << 16)
            if not data:
                return
            *lines, waiting = (waiting + data).split(b"\n")
            for line in lines:
                self._take(json.loads(line))

    def _take(self, message: dict[str, Any]) -> None:
        kind = message.pop("kind")
        with self._changed:
            if kind == "calls":
                self._results, self._latest = message["results"], message["latest"]
            elif kind == "form":
                self._formed = Generation(**message)
            elif kind == "interrupt":
                ends = self._ends if message["at_once"] else self._ends_after_step
                ends[message["number"]] = message["why"]
            self._changed.notify_all()
        if self.ended:
            self._end_waiting()

    def _end_waiting(self) -> None:
        with self._changed:
            functions, self._on_end = self._on_end, []
        for function in functions:
            function()


@cache
def link() -> Link | None:
    """Returns the line to the launcher, which outlives generations; None in other jobs."""
    if "TNT_ELASTIC_FD" not in os.environ:
        return None
    settings = read_settings()
    assert settings.elastic_fd is not None
    assert settings.process_id is not None and settings.num_processes is not None
    # Processes that this one starts are no part of the job.
    del os.environ["TNT_ELASTIC_FD"]
    return Link(
        settings.elastic_fd,
        rank=settings.process_id,
        planned=settings.num_processes,
        joins=settings.joins,
    )


def is_complete() -> bool:
    """Returns whether no process is missing: in an elastic job, as many train as were planned."""
    own = link()
    return own is None or own.generation.size == own.planned


def unless_ended(function: Callable[[], _T]) -> _T:
    """Returns the result of a function; raises `Interrupted` if the generation ends meanwhile.

    Its thread is then left to itself: the function may wait for a process that is lost.
    """
    raise_if_ended()
    running: Future[_T] = Future()

    def run() -> None:
        try:
            running.set_result(function())
        except BaseException as error:  # Raised again by the caller.
            running.set_exception(error)

    try:
        threading.Thread(target=run, name="tnt_jax-call", daemon=True).start()
    except RuntimeError:  # Python 3.12 starts no thread while it ends.
        run()
    while True:
        try:
            return running.result(_TICK_S)
        except TimeoutError:
            raise_if_ended()


def raise_if_ended() -> None:
    """Raises `Interrupted` if this process's generation has ended."""
    own = link()
    if own is not None and own.ended:
        raise Interrupted(f"{own.ended}.")


def raise_after_step() -> None:
    """Raises `Interrupted` between two steps if the generation has ended, or ends here."""
    own = link()
    if own is not None and own.ends_after_step:
        raise Interrupted(f"{own.ends_after_step}.")


_LISTENS = "0A"


class _Connection(NamedTuple):
    inode: str
    local_port: int
    remote_port: int
    listens: bool


def _connections() -> Iterator[_Connection]:
    """Yields the TCP sockets of this machine's network; see proc_net_tcp in the kernel's texts."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{name}") as table:
            for line in table.readlines()[1:]:
                fields = line.split()
                local, remote = (int(text.rpartition(":")[2], 16) for text in fields[1:3])
                yield _Connection(fields[9], local, remote, fields[3] == _LISTENS)


def _descriptors() -> dict[str, int]:
    """Returns the descriptors of this process's sockets, by inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found[target[8:-1]] = int(name)
    return found


def listening_ports() -> set[int]:
    """Returns the ports on which this process listens."""
    own = _descriptors()
    return {item.local_port for item in _connections() if item.listens and item.inode in own}


def cut(own_ports: Collection[int], ports_of_others: Collection[int]) -> None:
    """Shuts down the connections that came to own ports, and those to ports of others."""
    descriptors = _descriptors()
    for item in _connections():
        is_between = item.local_port in own_ports or item.remote_port in ports_of_others
        if item.listens or not is_between or item.inode not in descriptors:
            continue
        # It may have been closed meanwhile, and its number may belong to another file.
        with contextlib.suppress(OSError):
            copy = os.dup(descriptors[item.inode])
            try:
                if os.readlink(f"/proc/self/fd/{copy}") == f"socket:[{item.inode}]":
                    with socket.socket(fileno=os.dup(copy)) as connection:
                        connection.shutdown(socket.SHUT_RDWR)
            finally:
                os.close(copy)
