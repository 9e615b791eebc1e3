"""Where the time of a run goes: how much of it computes, and what the rest is spent on.

The thread that trains is always in one phase (`with phase("saving"):`), and the clock, that of the
timeline, is read when the phase changes. With `TNT_GOODPUT=FILE` the master keeps the account in a
file, one line of JSON a run, so that the times of a run that was started again add up.
"""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import jax

from tnt_jax.distributed import timeline
from tnt_jax.files import replacing
from tnt_jax.job import Slot
from tnt_jax.log import logger

Phase = Literal[
    "computing",
    "data",
    "saving",
    "compiling",
    "validating",
    "callbacks",
    "starting",
    "restarting",
    "lost",
    "other",
]
_PHASES: tuple[Phase, ...] = get_args(Phase)
# Nanoseconds between two writes of the file while steps run.
_WRITE_NS = 5_000_000_000


class Account:
    """The time of a thread, by phase, from `started_s` seconds since 1970 on.

    `earlier` is what `notes` returned last in an earlier start of the same run, or None. `thread`
    is the one that makes the account, and then the one that trains.
    """

    def __init__(
        self, *, started_s: float | None = None, earlier: Mapping[str, Any] | None = None
    ) -> None:
        self.thread = threading.get_ident()
        self._phase: Phase = "other"
        self._since_ns = time.perf_counter_ns()
        self._spent_ns = dict.fromkeys(_PHASES, 0)
        # Start and length of programs that were compiled: outer ones contain inner ones.
        self._compiled: list[tuple[int, int]] = []
        self._earlier_step = self._num_restarts = self._lost_steps = 0
        self._num_steps = self._step = 0
        now_s = time.time()
        if earlier is None:
            self._spent_ns["starting"] = _as_ns(now_s - (started_s or now_s))
            return
        self._spent_ns = {name: _as_ns(earlier[f"{name}_s"]) for name in _PHASES}
        # The clock may have been set back since.
        self._spent_ns["restarting"] += _as_ns(now_s - earlier["until"])
        self._num_restarts, self._lost_steps = earlier["restarts"] + 1, earlier["lost_steps"]
        self._num_steps, self._earlier_step = earlier["steps"], earlier["step"]
        # Until training goes on: it may end before.
        self._step = self._earlier_step

    def switch(self, phase: Phase) -> Phase:
        """Begins a phase, and returns the one that ends."""
        now_ns = time.perf_counter_ns()
        before = self._phase
        self._spent_ns[before] += now_ns - self._since_ns
        self._phase, self._since_ns = phase, now_ns
        return before

    def move(self, seconds: float, phase: Phase) -> None:
        """Counts seconds that have just passed under another phase than the one that runs."""
        self._spent_ns[phase] += _as_ns(seconds)
        self._spent_ns[self._phase] -= _as_ns(seconds)

    def add_compilation(self, duration_s: float) -> None:
        """Counts a compilation that has just ended; what it contains was counted already."""
        duration_ns, inner_ns = _as_ns(duration_s), 0
        start_ns = time.perf_counter_ns() - duration_ns
        while self._compiled and self._compiled[-1][0] >= start_ns:
            inner_ns += self._compiled.pop()[1]
        self._compiled.append((start_ns, duration_ns))
        self.move(max(duration_ns - inner_ns, 0) / 1e9, "compiling")

    def begin_training(self, step: int) -> None:
        """Notes the step from which training goes on; steps after it that are redone were lost."""
        lost = max(self._earlier_step - step, 0)
        if lost and self._num_steps:
            lost_ns = self._spent_ns["computing"] * min(lost / self._num_steps, 1)
            self._spent_ns["computing"] -= round(lost_ns)
            self._spent_ns["lost"] += round(lost_ns)
            self._lost_steps += lost
        self._earlier_step, self._step = 0, step

    def add_steps(self, count: int) -> None:
        """Counts training steps that were started."""
        self._num_steps += count
        self._step += count

    def report(self) -> dict[str, float]:
        """Returns seconds by phase, which add up to `total_s`, and the part that computes."""
        self.switch(self._phase)
        seconds = {f"{name}_s": ns / 1e9 for name, ns in self._spent_ns.items()}
        total = sum(seconds.values())
        return {name: round(value, 3) for name, value in seconds.items()} | {
            "total_s": round(total, 3),
            "goodput": round(seconds["computing_s"] / total, 4) if total else 0.0,
            "steps": self._num_steps,
            "lost_steps": self._lost_steps,
            "restarts": self._num_restarts,
        }

    def notes(self, *, is_finished: bool) -> dict[str, Any]:
        """Returns the report with what a later start of the same run needs."""
        more = {"step": self._step, "until": round(time.time(), 3), "finished": is_finished}
        return self.report() | more


class AccountFile:
    """A file of accounts, one line of JSON a run, of which the last is that of this run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written_ns = 0
        self._lines: list[str] = []
        self.earlier: dict[str, Any] | None = None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lines = path.read_text().splitlines() if path.exists() else []
        except (OSError, UnicodeDecodeError) as error:
            logger.warning("The account of the time in %s could not be read: %s", path, error)
        if self._lines and (last := _unfinished(self._lines[-1])) is not None:
            self.earlier = last
            self._lines.pop()

    def is_due(self, now_ns: int) -> bool:
        """Returns whether the last write is a while ago."""
        return now_ns - self._written_ns > _WRITE_NS

    def write(self, notes: Mapping[str, Any]) -> None:
        """Replaces the line of this run; a file that cannot be written costs a warning."""
        self._written_ns = time.perf_counter_ns()
        try:
            with replacing(self._path) as new:
                new.write_text("\n".join([*self._lines, json.dumps(notes)]) + "\n")
        except OSError as error:
            logger.warning("The account of the time could not be written: %s", error)


def _unfinished(line: str) -> dict[str, Any] | None:
    """Returns the notes of a run that has not ended; None for any other line."""
    try:
        notes = json.loads(line)
    except ValueError:
        return None
    numbers = [f"{name}_s" for name in _PHASES] + "until restarts lost_steps steps step".split()
    is_ours = isinstance(notes, dict) and all(
        isinstance(notes.get(name), int | float) for name in numbers
    )
    return notes if is_ours and notes.get("finished") is False else None


@dataclass
class _Books:
    account: Account = field(default_factory=Account)
    file: AccountFile | None = None
    is_open: bool = False
    is_keeper: bool = False

    def write(self, *, is_finished: bool) -> None:
        if self.file is not None and self.is_keeper:
            self.file.write(self.account.notes(is_finished=is_finished))


def _close(books: _Books) -> None:
    if books.is_open:
        jax.monitoring.unregister_event_time_span_listener(_note_compilation)


_books = Slot(_Books, close=_close, lasts=True)


def goodput() -> dict[str, float]:
    """Returns where the time of this job went so far, in this process and in starts before it.

    Returns:
        Seconds `computing_s`, waiting for `data_s`, `saving_s`, `compiling_s`, `validating_s`, in
        `callbacks_s`, `starting_s`, `restarting_s`, computing steps again that were `lost_s`, and
        `other_s`. They add up to `total_s`; `goodput` is the part that computes. Further `steps`,
        `lost_steps` and `restarts`.
    """
    return _books.get().account.report()


def open_account(*, path: str | None, launched_at: float | None, is_master: bool) -> None:
    """Begins the account of the job, which the master keeps in a file, if one is given."""
    books = _books.get()
    books.is_keeper = is_master
    if books.is_open:
        return
    books.is_open = True
    # Each process knows the earlier starts: it may become the master of an elastic job.
    books.file = AccountFile(Path(path)) if path else None
    earlier = None if books.file is None else books.file.earlier
    books.account = Account(started_s=launched_at, earlier=earlier)
    jax.monitoring.register_event_time_span_listener(_note_compilation)


def account() -> Account:
    """Returns the account of the job."""
    return _books.get().account


def note_steps(count: int, now_ns: int) -> None:
    """Counts training steps that were started, and writes the file if that is a while ago."""
    books = _books.get()
    books.account.add_steps(count)
    if books.file is not None and books.file.is_due(now_ns):
        books.write(is_finished=False)


@contextmanager
def training() -> Iterator[None]:
    """Counts the block as computing; logs and writes the account when it ends."""
    books = _books.get()
    before = books.account.switch("computing")
    books.account.thread = threading.get_ident()
    is_finished = False
    try:
        yield
        is_finished = True
    finally:
        books.account.switch(before)
        logger.info("Goodput: %s", json.dumps(books.account.report()))
        books.write(is_finished=is_finished)


@contextmanager
def phase(name: Phase) -> Iterator[None]:
    """Counts the block under a phase, if the thread is the one that trains."""
    own = _books.get().account
    if threading.get_ident() != own.thread:
        yield
        return
    before = own.switch(name)
    try:
        yield
    finally:
        own.switch(before)


def _note_compilation(event: str, start_time: float, end_time: float, **_: Any) -> None:
    """Takes note that JAX has just traced, lowered or compiled a program, if it was that."""
    if event.startswith("/jax/core/compile/"):
        timeline.add_compilation(event, start_time, end_time)
        own = _books.get().account
        if threading.get_ident() == own.thread:
            own.add_compilation(end_time - start_time)


def _as_ns(seconds: float) -> int:
    return max(round(seconds * 1e9), 0)
