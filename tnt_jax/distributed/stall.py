"""Reports which call of this process waits for which other processes when a job stalls.

Data-parallel calls complete only when every process makes them. Each process records its position
in plain attributes, which cost a step next to nothing:

    with stall.calling("Model.fit"):
        stall.here().epoch, stall.here().step = 1, 5
        with stall.waiting("sum of gradients"):
            ...

Every few seconds a thread posts a changed note to the job's coordination service. If a process has
not moved for `TNT_STALL_WARNING_S` seconds, the thread reads the notes of all processes and warns.
"""

import atexit
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import jax

from tnt_jax import _jax
from tnt_jax.distributed import timeline
from tnt_jax.job import Slot
from tnt_jax.log import logger

_KEY = "tnt_jax/stall"
_LONGEST_TICK_S = 10.0
# A process that waits for one whose script has ended would wait forever, so it learns of this
# sooner.
_LEFT_S = 5.0
# The time limit for calls to the service that do not wait.
_LONGEST_CALL_S = 2.0
_P = ParamSpec("_P")
_T = TypeVar("_T")


@dataclass(frozen=True)
class Note:
    """The position of a process in its script.

    Attributes:
        meetings: Number of calls so far in which all processes take part.
        calls: Running public calls, the outermost first.
        epoch: Epoch of the training loop, from 1 on; 0 outside of one.
        step: Step of the loop, from 1 on; 0 before the first.
        waits: What the process waits for; empty if it knows of no wait for other processes.
        members: The processes among which it waits; empty for all.
        runs: Whether it runs or compiles the program of a step, in which it may wait.
        has_left: Whether the script has ended.
        stuck_s: Seconds since the last change of the above.
    """

    meetings: int = 0
    calls: tuple[str, ...] = ()
    epoch: int = 0
    step: int = 0
    waits: str = ""
    members: tuple[int, ...] = ()
    runs: bool = False
    has_left: bool = False
    stuck_s: float = 0.0

    @property
    def order(self) -> tuple[int, int, int]:
        """How far the process has got."""
        return self.meetings, self.epoch, self.step

    def __str__(self) -> str:
        """Returns where the process is, in words."""
        if self.has_left:
            return "at the end of its script"
        if not self.calls:
            return f"in {self.waits}" if self.waits else "in no such call"
        *outer, last = self.calls
        inner = f" (called in {outer[0]})" if outer else ""
        epoch = f", epoch {self.epoch}" if self.epoch else ""
        step = f", step {self.step}" if self.step else ""
        return f"in {last}{inner}{epoch}{step}"


class Here:
    """The position of this process; see `Note`.

    Attributes:
        forsaken: A sentence saying that it waits for a process that has left; empty if none is
            known.
    """

    def __init__(self) -> None:
        self.meetings = self.epoch = self.step = 0
        self.calls: tuple[str, ...] = ()
        self.runs = self.has_left = False
        self.forsaken = ""
        # By thread: XLA's threads wait for the ring, and a thread reads the data.
        self.waits: dict[int, str] = {}
        self.members: tuple[int, ...] = ()

    def note(self) -> Note:
        """A copy that can be sent."""
        # Copied in one operation, as another thread may add an entry at the same time.
        waits = next(iter(dict(self.waits).values()), "")
        return Note(
            self.meetings, self.calls, self.epoch, self.step, waits, self.members, self.runs,
            self.has_left,
        )  # fmt: skip


_here = Slot(Here)


def here() -> Here:
    """Returns where this process is in its job."""
    return _here.get()


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Records that this thread waits for other processes within the block.

    Args:
        what: The call that waits, as a user writes it, or what it waits for.
    """
    thread = threading.get_ident()
    waits = here().waits
    before = waits.get(thread)
    waits[thread] = what
    try:
        with timeline.span(what, "wait"):
            yield
    finally:
        if before is None:
            del waits[thread]
        else:
            waits[thread] = before


@contextmanager
def among(members: Sequence[int]) -> Iterator[None]:
    """Notes that what this process waits for within the block is one of `members` alone.

    Args:
        members: Processes; empty for all.
    """
    own = here()
    outer = own.members
    own.members = tuple(members)
    try:
        yield
    finally:
        own.members = outer


@contextmanager
def calling(name: str) -> Iterator[None]:
    """Records that a public call, which every process must make, runs within the block.

    Args:
        name: Name of the call, as a user writes it.
    """
    own = here()
    outer = own.calls, own.epoch, own.step, own.runs
    own.calls, own.epoch, own.step, own.runs = (*own.calls, name), 0, 0, False
    try:
        with timeline.span(name, "call"):
            yield
    finally:
        own.calls, own.epoch, own.step, own.runs = outer


def called(name: str) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Returns a decorator for public functions that every process must call; see `calling`."""

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            with calling(name):
                return function(*args, **kwargs)

        return call

    return decorate


def describe_stall(notes: Sequence[Note], process: int) -> str | None:
    """Returns a sentence on what a process waits for, or None if no other process blocks it.

    Args:
        notes: The note of each process.
        process: The process.
    """
    own = notes[process]
    members = own.members or range(len(notes))
    others = [number for number in members if number != process]
    behind = [
        number for number in others if notes[number].has_left or notes[number].order < own.order
    ]
    if not behind and (own.waits or own.runs):
        # All have got equally far: those that do not wait are busy elsewhere.
        behind = [number for number in others if not (notes[number].waits or notes[number].runs)]
    if not behind and own.waits:
        # All wait, in different calls or for a lost message.
        behind = [
            number
            for number in others
            if notes[number].order != own.order or notes[number].calls != own.calls
        ] or others
    if not behind or own.has_left:
        return None
    named = ", ".join(f"process {number} ({notes[number]})" for number in behind[:8])
    more = f" and {len(behind) - 8} more" if len(behind) > 8 else ""
    what = f" ({own.waits})" if own.waits and own.calls and own.waits != own.calls[-1] else ""
    return f"Process {process} has waited {own.stuck_s:.0f} s {own}{what} for {named}{more}."


class _Watch:
    """The thread that posts this process's note and warns of stalls.

    Attributes:
        pid: The process that it belongs to.
    """

    def __init__(self, patience_s: float) -> None:
        self.pid = os.getpid()
        self._here = here()
        self._patience_s = patience_s
        self._tick_s = min(patience_s / 6, _LONGEST_TICK_S)
        self._client, self._process = _jax.coordination_client(), jax.process_index()
        self._posted: Any = None
        self._changed_at = time.monotonic()
        self._last = Note()
        self._lock = threading.Lock()
        # When the next warning is due, in seconds without progress, by process.
        self._due: dict[int, float] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tnt_jax-stall", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread: it must not be in a call to the service at the interpreter's exit."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(_LONGEST_CALL_S)

    def leave(self) -> None:
        """Tells the other processes that this process's script has ended."""
        self._here.has_left = True
        self._post(self._here.note(), stuck_s=0.0)
        self.stop()

    def _run(self) -> None:
        while not self._stopped.wait(self._tick_s):
            try:
                self._look()
            except jax.errors.JaxRuntimeError as error:
                # The service has gone, and the job with it.
                logger.debug("No notes of other processes: %s", error)
                return

    def _look(self) -> None:
        note = self._here.note()
        if note != self._last:
            self._last = note
            self._changed_at = time.monotonic()
        stuck_s = time.monotonic() - self._changed_at
        is_stuck = stuck_s >= min(_LEFT_S, self._patience_s) and bool(note.calls or note.waits)
        if not self._stopped.is_set():
            self._post(note, stuck_s if is_stuck else 0.0)
        # The master warns for all, because its output may be the only one that is shown.
        if is_stuck or self._process == 0:
            self._warn(self._read())

    def _post(self, note: Note, stuck_s: float) -> None:
        with self._lock:
            if self._posted == (note, stuck_s):
                return
            text = json.dumps(asdict(note) | {"stuck_s": stuck_s})
            self._client.key_value_set(f"{_KEY}/{self._process}", text, allow_overwrite=True)
            self._posted = (note, stuck_s)

    def _read(self) -> list[Note]:
        texts = {
            int(key.rsplit("/", 1)[1]): text for key, text in self._client.key_value_dir_get(_KEY)
        }
        notes = {number: json.loads(text) for number, text in texts.items()}
        found = {
            number: Note(
                **values | {"calls": tuple(values["calls"]), "members": tuple(values["members"])}
            )
            for number, values in notes.items()
        }
        return [found.get(number, Note()) for number in range(jax.process_count())]

    def _warn(self, notes: list[Note]) -> None:
        speaks_for = range(len(notes)) if self._process == 0 else [self._process]
        told = []
        for process in speaks_for:
            note = notes[process]
            if not note.stuck_s:
                self._due.pop(process, None)
                continue
            members = note.members or range(len(notes))
            is_hopeless = any(notes[number].has_left for number in members)
            due = self._due.get(
                process, min(_LEFT_S, self._patience_s) if is_hopeless else self._patience_s
            )
            text = describe_stall(notes, process) if note.stuck_s >= due else None
            if text is not None and process == self._process and is_hopeless:
                self._here.forsaken = text
            if text is not None:
                told.append(text)
                self._due[process] = 3 * max(
                    note.stuck_s, self._patience_s
                )  # The longer the stall, the rarer the warnings.
        if told:
            advice = (
                "Every process must make the same calls in the same order "
                '("Calls that all processes must make", docs/launching.md).'
            )
            logger.warning("%s %s", " ".join(told), advice, extra={"on_every_process": True})


def _end_watch(watch: _Watch | None) -> None:
    if watch is not None:
        watch.stop()
        atexit.unregister(_leave)


_watch = Slot[_Watch | None](lambda: None, close=_end_watch)


def start_watching(patience_s: float) -> None:
    """Starts the thread that warns of stalls; called once the process has joined its job.

    The thread ends with the job.

    Args:
        patience_s: Seconds without progress before the first warning.
    """
    if _watch.get() is None:
        watch = _Watch(patience_s)
        _watch.set(watch)
        atexit.register(_leave, watch)


def _leave(watch: _Watch) -> None:
    # A process made by os.fork shares the connection to the service and must not use it.
    if os.getpid() == watch.pid:
        try:
            watch.leave()
        except jax.errors.JaxRuntimeError as error:
            logger.debug("The coordination service has gone: %s", error)
