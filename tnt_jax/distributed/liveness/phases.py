"""Where this process is in its script: which call, which step, and what it does there.

Data-parallel calls complete only when every process makes them. Each process records its position
in plain attributes, which cost a step next to nothing:

    with phases.calling("Model.fit"):
        phases.here().epoch, phases.here().step = 1, 5
        with phases.waiting("sum of gradients"):
            ...

`watch` shows it to the other processes, which name the one that they wait for.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

from tnt_jax.distributed import goodput, timeline
from tnt_jax.job import Slot

Phase = Literal["", "data", "compile", "step", "steps", "callback", "loop", "save"]
_WORDS: dict[Phase, str] = {
    "data": "reading data",
    "compile": "compiling",
    "step": "running the step",
    "steps": "running a program of several steps",
    "callback": "in a callback",
    "loop": "in the body of its loop",
    "save": "saving or restoring",
}
# Phases that end only if every process takes part.
_OF_ALL: tuple[Phase, ...] = ("compile", "step", "steps")


@dataclass(frozen=True)
class Note:
    """The position of a process in its script.

    Attributes:
        meetings: Number of calls so far in which all processes take part.
        calls: Running public calls, the outermost first.
        epoch, step: Those of the training loop, from 1 on; 0 outside of one.
        phase: What the process does there; `"loop"` is the user's code between the steps of a
            custom training loop, and `""` all that has no name.
        what: The same in the user's words, such as the name of a callback; empty for none.
        limit_s: Seconds that it may take without progress; None for the limit of the phase.
        num_waits, waits: Number of waits so far for other processes, and the one that it is in.
        members: The processes among which it waits; empty for all.
        reads_device: Whether its main thread is in JAX, in which it may wait for other processes.
        stuck_s: Seconds since the last change of the above.
    """

    meetings: int = 0
    calls: tuple[str, ...] = ()
    epoch: int = 0
    step: int = 0
    phase: Phase = ""
    what: str = ""
    limit_s: float | None = None
    num_waits: int = 0
    waits: str = ""
    members: tuple[int, ...] = ()
    reads_device: bool = False
    has_left: bool = False
    stuck_s: float = 0.0

    @property
    def order(self) -> tuple[int, int, int]:
        """How far the process has got."""
        return self.meetings, self.epoch, self.step

    @property
    def may_wait(self) -> bool:
        """Whether it waits for other processes, or is where it may do so."""
        return bool(self.waits) or self.phase in ("step", "steps") or self.reads_device

    @property
    def place(self) -> str:
        """Where the process is in its script, in words."""
        if self.has_left:
            return "at the end of its script"
        if not self.calls and not self.phase:
            return f"in {self.waits}" if self.waits else "in no such call"
        *outer, last = self.calls or ("its own loop",)
        inner = f" (called in {outer[0]})" if outer else ""
        epoch = f", epoch {self.epoch}" if self.epoch else ""
        step = f", step {self.step}" if self.step else ""
        return f"in {last}{inner}{epoch}{step}"

    def __str__(self) -> str:
        doing = f"in {self.what}" if self.what else _WORDS.get(self.phase, "")
        return f"{self.place}, {doing}" if doing and not self.has_left else self.place


class Here:
    """The position of this process; see `Note`.

    It is written between steps, so it reads no clock and takes no lock: each attribute is replaced
    whole, and a reader in another thread sees it before or after.

    Attributes:
        doing: The phase, and the same in the user's words.
        waits: What each thread waits for.
        readers: Threads that read data ahead, whose waits concern only a process that needs data.
        left_alone: A sentence on its wait for a process that has left; empty for none.
    """

    def __init__(self) -> None:
        self.meetings = self.epoch = self.step = self.num_waits = 0
        self.calls: tuple[str, ...] = ()
        self.doing: tuple[Phase, str] = ("", "")
        self.limit_s: float | None = None
        self.has_left = False
        self.left_alone = ""
        self.waits: dict[int, str] = {}
        self.readers: set[int] = set()
        self.members: tuple[int, ...] = ()

    @property
    def awaits(self) -> str:
        """The wait of this process, or none: a thread that reads ahead delays nobody."""
        readers = () if self.doing[0] in ("", "data") else self.readers
        waits = list(self.waits.items())
        return next((what for thread, what in waits if thread not in readers), "")

    def note(self) -> Note:
        """A copy that can be sent."""
        phase, what = self.doing
        return Note(
            self.meetings,
            self.calls,
            self.epoch,
            self.step,
            phase,
            what,
            self.limit_s,
            self.num_waits,
            self.awaits,
            self.members,
            has_left=self.has_left,
        )


here = Slot(Here, lasts=True).get
"""Returns where this process is in its job."""


def describe_wait() -> str | None:
    """Returns where the main thread waits for other processes, in words; None if it does not."""
    own, phase = here(), here().doing[0]
    # It says so, runs or compiles a program of all, or takes data for which a thread waits.
    is_in_wait = threading.main_thread().ident in own.waits
    waits = is_in_wait or phase in _OF_ALL or (phase == "data" and bool(own.waits))
    return str(own.note()) if waits else None


class waiting:
    """Records that this thread waits for other processes within, in a call or for something."""

    __slots__ = ("_before", "_here", "_start_ns", "_thread", "_what")

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._here, self._thread = own, thread = here(), threading.get_ident()
        self._before = own.waits.get(thread)
        own.waits[thread] = self._what
        own.num_waits += 1
        self._start_ns = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del self._here.waits[self._thread]
        else:
            self._here.waits[self._thread] = self._before
        timeline.add(self._what, "wait", self._start_ns)


@contextmanager
def in_phase(
    phase: Phase,
    what: str = "",
    *,
    limit_s: float | None = None,
    spent: goodput.Phase | None = None,
) -> Iterator[None]:
    """Records that the main thread is in a phase, and what it does there, within the block.

    It may take `limit_s` seconds, by default the limit of the phase. `spent` is the phase of
    `goodput` under which its time counts; None for that which runs.
    """
    own = here()
    before, limit_before = own.doing, own.limit_s
    own.doing, own.limit_s = (phase, what), limit_s
    try:
        with nullcontext() if spent is None else goodput.phase(spent):
            yield
    finally:
        own.doing, own.limit_s = before, limit_before


@contextmanager
def busy(what: str, *, limit_s: float) -> Iterator[None]:
    """Gives this process time within the block, during which the others may wait for it.

    The job ends if a process makes no progress for `TNT_STALL_TIMEOUT` seconds. What takes longer
    on purpose says so:

    ```python
    class Export(tnt.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            with tnt.busy("the export", limit_s=1800):
                export(self.model)
    ```

    Args:
        what: What it does, for messages.
        limit_s: Seconds without progress after which the job ends.

    Raises:
        ValueError: If `limit_s` is not above 0.
    """
    if not limit_s > 0:
        raise ValueError(f"limit_s must be above 0 seconds, but is {limit_s!r}.")
    # They are posted as JSON, which knows no NumPy numbers.
    with in_phase("callback", str(what), limit_s=float(limit_s)):
        yield


@contextmanager
def among(members: Sequence[int]) -> Iterator[None]:
    """Notes that what this process waits for within is one of some processes; of all if empty."""
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

    It also decorates functions that every process must call.
    """
    own = here()
    outer = own.calls, own.epoch, own.step, own.doing
    own.calls, own.epoch, own.step = (*own.calls, name), 0, 0
    own.doing = ("", "")
    try:
        with timeline.span(name, "call"):
            yield
    finally:
        own.calls, own.epoch, own.step, own.doing = outer
