"""Shows the other processes where this one is, and ends the job if one makes no progress.

Each process posts a note to the job's coordination service every few seconds. If one has not moved
for `TNT_STALL_WARNING_S` seconds, it reads the notes of all processes and warns. If one has not
moved for `TNT_STALL_TIMEOUT` seconds, or no longer posts, the job ends. `find_cause` finds out from
the notes who waits for whom, and who holds up the job.

It also names a process that is slower than the others, by the time that each spends outside of
waiting (`SlowRanks`). All processes make the same steps, so that in the same time one that is
faster waits more. What each phase has taken comes with the notes, without a collective. Where the
compiler's collectives sum gradients, not memory that processes share, a process cannot tell
computing from waiting for the others: both are time in the step, and only data and callbacks can be
compared. A thread estimates how long this process is in each phase without waiting: it looks at its
position many times a minute, so that the steps themselves read no clock.
"""

import asyncio
import atexit
import contextlib
import json
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import jax

from tnt_jax import _jax
from tnt_jax.distributed.elastic import Interrupted
from tnt_jax.distributed.liveness import table, threads
from tnt_jax.distributed.liveness.phases import Here, Note, Phase, here
from tnt_jax.distributed.liveness.rendezvous import listed
from tnt_jax.distributed.liveness.table import ExitNotice
from tnt_jax.job import Slot
from tnt_jax.log import logger
from tnt_jax.settings import STALLED_EXIT_CODE

# Of a stack, the innermost calls; those of tnt_jax and its decorators are left out where there are
# others.
_MOST_CALLS = 12
_OWN = (str(Path(__file__).parents[2]) + os.sep, threading.__file__, contextlib.__file__)
_MOST_CHARACTERS = 3000


def compiles() -> bool:
    """Returns whether the main thread traces or compiles a program."""
    return _jax.compiles(frame for frame, _ in traceback.walk_stack(_frame_of_main()))


def reads_device() -> bool:
    """Returns whether the main thread is in JAX, which may wait for devices and other processes."""
    frame = _frame_of_main()
    return frame is not None and _jax.is_of_jax(frame)


def describe_stacks() -> str:
    """Returns the Python stack of the main thread, or of the threads that it waits for data of."""
    own, main = here(), threading.main_thread().ident or 0
    reads = own.doing[0] in ("", "data") and main not in own.waits
    readers = [*own.readers] if reads else []
    title = "the thread that reads its data" if readers else "its main thread"
    frames = sys._current_frames()
    stacks = [
        f"Python stack of {title} (innermost call last):\n{_describe_calls(frames[thread])}"
        for thread in readers or [main]
        if thread in frames
    ]
    text = "\n".join(stacks)
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "..."


def _describe_calls(frame: FrameType) -> str:
    *outer, innermost = traceback.extract_stack(frame)
    shown = [*(call for call in outer if not call.filename.startswith(_OWN)), innermost]
    return "".join(traceback.format_list(shown[-_MOST_CALLS:])).rstrip()


def _frame_of_main() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


# Phases that may take many times as long as a step: programs are compiled, checkpoints written, or
# the script does what it likes between two calls.
_LONG_PHASES: tuple[Phase, ...] = ("", "compile", "steps", "save")
_LONGER = 10
ADVICE = (
    "If it would have gone on, raise the limit: TNT_STALL_TIMEOUT=600 for the job, or "
    "tnt_jax.busy around what takes long."
)
SAME_CALLS = (
    "Every process must make the same calls in the same order "
    "(docs/launching.md#calls-that-all-processes-must-make)."
)


@dataclass(frozen=True)
class Seen:
    """The last post of a process that another one has, and the seconds since it came."""

    note: Note
    silent_s: float = 0.0
    own_s: Mapping[str, float] = field(default_factory=dict)
    stack: str = ""


def _stalled(process: int, how: str, *, is_lost: bool = False) -> ExitNotice:
    """Returns the notice of a process that holds up the job; it is lost if it does not run."""
    return ExitNotice(process, STALLED_EXIT_CODE, how, is_lost=is_lost, is_stalled=True)


def limit_s(note: Note, timeout_s: float) -> float:
    """Returns the seconds that a process may be without progress where it is."""
    if note.limit_s is not None:
        return note.limit_s
    may_be_long = note.phase in _LONG_PHASES and not note.waits
    return timeout_s * (_LONGER if may_be_long else 1)


def _silence_limit_s(note: Note, timeout_s: float) -> float:
    """Returns it for a process that posts nothing: only what holds Python's lock is silent."""
    # Compilation and programs of several steps do not; within a call the note may be outdated.
    does_as_it_likes = note.phase == "save" or not (note.phase or note.calls)
    return limit_s(note, timeout_s) if does_as_it_likes else note.limit_s or timeout_s


def find_cause(seen: Sequence[Seen], timeout_s: float) -> ExitNotice | None:
    """Returns the process that holds up the job, or None if none is over its limit."""
    there = [process for process, each in enumerate(seen) if not each.note.has_left]
    notes = [each.note for each in seen]
    for process in there:
        silent_s = seen[process].silent_s
        if silent_s >= _silence_limit_s(notes[process], timeout_s):
            how = (
                f"Process {process} has not posted for {silent_s:.0f} s: it is stopped, swapped "
                "out, in a call that does not let its other threads run, or its host is down. It "
                f"was last {notes[process]}. {ADVICE}"
            )
            return _stalled(process, how, is_lost=True)
    over = [x for x in there if notes[x].stuck_s >= limit_s(notes[x], timeout_s)]
    waiting = [x for x in over if notes[x].may_wait]
    busy = [x for x in over if x not in waiting and _is_awaited(notes, x, timeout_s)]
    if busy:
        return _stuck(min(busy, key=lambda x: notes[x].order), notes, timeout_s)
    if waiting != there or not any(_is_in_call(notes[process]) for process in waiting):
        return None
    if (uncalled := _uncalled(notes, there, timeout_s)) is not None:
        return uncalled
    # All wait: for one that waits for nothing known, or that has not got as far as the others.
    unknown = [process for process in there if not notes[process].waits] or there
    first = min(unknown, key=lambda process: notes[process].order)
    others = _listed(notes, [number for number in range(len(notes)) if number != first])
    more = f". All processes wait, for one another or a device: {others}" if others else ""
    differ = len({notes[process].calls for process in there}) > 1
    return _stuck(first, notes, timeout_s, more, SAME_CALLS if differ else ADVICE)


def _is_awaited(notes: Sequence[Note], process: int, timeout_s: float) -> bool:
    """Returns whether another process has waited for this one for as long as it may."""
    longest_s = min(timeout_s, limit_s(notes[process], timeout_s))
    return any(
        note.may_wait and note.stuck_s >= longest_s
        for number, note in enumerate(notes)
        if number != process and process in (note.members or [process])
    )


def _uncalled(notes: Sequence[Note], there: Sequence[int], timeout_s: float) -> ExitNotice | None:
    """Returns the cause if some wait in a call that others have not made: one of the minority."""
    calls = max((notes[process].calls for process in there), key=len)
    made = [process for process in there if notes[process].calls == calls]
    members = notes[made[0]].members or there
    others = [process for process in there if process not in made and process in members]
    is_within = all(calls[: len(outer)] == outer for outer in (notes[p].calls for p in others))
    if not others or not is_within or not all(notes[process].waits for process in made):
        return None
    if len(made) <= len(others):
        have = "has" if len(others) == 1 else "have"
        more = f", a call that {_listed(notes, others)} {have} not made"
        return _stuck(made[0], notes, timeout_s, more, SAME_CALLS)
    more = f", and has not made the call in which {_listed(notes, made)} wait"
    return _stuck(others[0], notes, timeout_s, more, SAME_CALLS)


def _listed(notes: Sequence[Note], processes: Sequence[int]) -> str:
    return listed([f"process {process} ({notes[process]})" for process in processes])


def _is_in_call(note: Note) -> bool:
    return bool(note.calls or note.waits or note.phase)


def _stuck(
    process: int, notes: Sequence[Note], timeout_s: float, more: str = "", advice: str = ADVICE
) -> ExitNotice:
    own = notes[process]
    limit = limit_s(own, timeout_s)
    there = f", {limit:g} s there" if limit != timeout_s else ""
    place = str(own) if _is_in_call(own) else "in code of its script, outside of calls and loops"
    return _stalled(
        process,
        f"Process {process} has made no progress for {own.stuck_s:.0f} s (TNT_STALL_TIMEOUT is "
        f"{timeout_s:g} s{there}) {place}{more}. {advice}",
    )


def describe_stall(notes: Sequence[Note], process: int) -> str | None:
    """Returns a sentence on what a process waits for, or None if no other process blocks it."""
    own = notes[process]
    members = own.members or range(len(notes))
    others = [number for number in members if number != process]
    behind = [x for x in others if notes[x].has_left or notes[x].order < own.order]
    if not behind and own.may_wait:
        # All have got equally far: those that do not wait are busy elsewhere.
        behind = [number for number in others if not notes[number].may_wait]
    if not behind and own.waits:
        # All wait, in different calls or for a lost message.
        place = own.order, own.calls
        behind = [x for x in others if (notes[x].order, notes[x].calls) != place] or others
    if not behind or own.has_left:
        return None
    what = f" ({own.waits})" if own.waits and own.calls and own.waits != own.calls[-1] else ""
    named = _listed(notes, behind)
    return f"Process {process} has waited {own.stuck_s:.0f} s {own.place}{what} for {named}."


_LONGEST_PERIOD_S = 0.25
# Samples of the window that is judged.
_SAMPLES = 200


class OwnTimes:
    """The `seconds` of this process in each phase, without those in which it waits for others.

    They will be compared over `window_s` seconds; `is_waiting` tells whether its devices wait.
    """

    def __init__(self, here: Here, window_s: float, is_waiting: Callable[[], bool]) -> None:
        self.seconds: dict[Phase, float] = {}
        self._here = here
        self._is_waiting = is_waiting
        self._period_s = min(window_s / _SAMPLES, _LONGEST_PERIOD_S)

    def run(self, stopped: threading.Event, then: Callable[[float], None]) -> None:
        """Samples until an event is set, and gives `then` the seconds since the last one."""
        before_s = time.monotonic()
        # Periods of random length, as steps may have a fixed one. The global generator belongs to
        # the user.
        lengths = random.Random()
        while not stopped.wait(self._period_s * lengths.uniform(0.5, 1.5)):
            now_s = time.monotonic()
            self.sample(now_s - before_s)
            then(now_s - before_s)
            before_s = now_s

    def sample(self, passed_s: float) -> None:
        """Counts seconds under the phase of this moment, or under none while the process waits."""
        phase = self._here.doing[0]
        own_s = 0.0 if self._here.awaits or self._is_waiting() else passed_s
        # Replaced whole, as another thread reads it.
        self.seconds = {**self.seconds, phase: self.seconds.get(phase, 0.0) + own_s}


# A slow process spends so many times what the others do, at the median.
_FACTOR = 1.5
# And so much more of the time that has passed: less costs the job little, whatever the factor.
_LEAST_SHARE = 0.2
# How old the times may be, of the window: less than makes a process slow.
_OLDEST_SHARE = _LEAST_SHARE / 2
_OF_HOST: tuple[Phase, ...] = ("data", "callback", "save")
# In these a process may wait for others without knowing it.
_OF_DEVICE: tuple[Phase, ...] = ("step", "steps", "loop")
_WORDS: dict[Phase, str] = {
    "data": "reading data",
    "callback": "in callbacks",
    "save": "saving",
    "step": "computing on its devices",
    "steps": "computing on its devices",
    "loop": "in the body of its loop",
}

Times = Mapping[Any, float]


class SlowRanks:
    """Compares the processes every `window_s` seconds, and names each that is slow once."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._began_s = 0.0
        self._before: Sequence[Times] | None = None
        self._named: set[tuple[int, Phase]] = set()

    def look(
        self,
        now_s: float,
        times: Sequence[Times],
        *,
        calls: Collection[str] = (),
        silent_s: float = 0.0,
    ) -> str | None:
        """Returns a sentence on a process that has been slow, or None.

        `times` are the seconds of each process so far in each phase, outside of waiting, the oldest
        `silent_s` old. Nothing is compared in the first stretch of time, in which programs are
        compiled, nor where a process has left its call by an error, or is stopped: those that wait
        for it would look slow.
        """
        if len(set(calls)) > 1:
            self._before = None
            return None
        if now_s - self._began_s < self._window_s or silent_s > _OLDEST_SHARE * self._window_s:
            return None
        passed_s, self._began_s = now_s - self._began_s, now_s
        before, self._before = self._before, times
        if before is None or not all(before):
            return None
        spent = [
            {phase: seconds - old.get(phase, 0.0) for phase, seconds in own.items()}
            for own, old in zip(times, before, strict=True)
        ]
        found = find_slow(spent, passed_s)
        if found is None or found in self._named:
            return None
        self._named.add(found)
        return _describe(*found, spent, passed_s)


def find_slow(spent: Sequence[Times], passed_s: float) -> tuple[int, Phase] | None:
    """Returns the slowest process and what it spends its time with, if that is far more."""
    for phases in (_OF_HOST, (*_OF_HOST, *_OF_DEVICE)):
        sums = [sum(own.get(phase, 0.0) for phase in phases) for own in spent]
        process = max(range(len(sums)), key=sums.__getitem__)
        others = median(sums[:process] + sums[process + 1 :])
        if sums[process] > max(_FACTOR * others, others + _LEAST_SHARE * passed_s):
            own = spent[process]
            excess = {x: own.get(x, 0.0) - _of_others(spent, process, x) for x in phases}
            return process, max(phases, key=excess.__getitem__)
    return None


def _of_others(spent: Sequence[Times], process: int, phase: Phase) -> float:
    return median(own.get(phase, 0.0) for number, own in enumerate(spent) if number != process)


def _describe(process: int, phase: Phase, spent: Sequence[Times], passed_s: float) -> str:
    return (
        f"Process {process} is slower than the others, which wait for it: of the last "
        f"{passed_s:.0f} s it spent {spent[process].get(phase, 0.0):.1f} s {_WORDS[phase]}, the "
        f"others {_of_others(spent, process, phase):.1f} s at the median."
    )


_LONGEST_TICK_S = 5.0
_TICKS = 12
# A process that waits for one whose script has ended would wait forever, so it learns of this
# sooner.
_LEFT_S = 5.0
# How much later than process 0 another one says who holds up the job, in ticks.
_TURN_TICKS = 3
_NO_POSTS = (
    "Process {} failed to say where it is, or to look where the others are. If that goes on, the "
    "others take it for one that is stopped, and it finds none that is:"
)
_NO_SAMPLES = (
    "Process {} does not notice any more if it or another one is stuck or cut off, and is never "
    "named as slow:"
)


# Ends all processes because of one, and is told whether the coordination service answers.
EndJob = Callable[[ExitNotice, bool], None]


@dataclass(frozen=True)
class Patience:
    """Seconds without progress before the first warning, and before the job ends (0 for never)."""

    warning_s: float
    timeout_s: float

    @property
    def tick_s(self) -> float:
        """Seconds between two looks."""
        shortest = min(self.warning_s, self.timeout_s or self.warning_s)
        return min(shortest / _TICKS, _LONGEST_TICK_S)


class _Watch:
    """Posts this process's note, and looks at those of the others."""

    def __init__(self, patience: Patience, end_job: EndJob, is_waiting: Callable[[], bool]) -> None:
        self._pid = os.getpid()
        self._here = here()
        self._patience, self._end_job = patience, end_job
        self._early_s = min(_LEFT_S, patience.warning_s)
        # Seconds in which this process ran: a stopped one cannot judge the others.
        self._now_s = 0.0
        self._client, self._process = _jax.coordination_client(), jax.process_index()
        self._changed_s, self._last = 0.0, Note()
        self._num_posts = 0
        # The last post of each process, and when it was first seen.
        self._seen: dict[int, tuple[str, float]] = {}
        # When the service has answered last.
        self._answered_s = 0.0
        # When the next warning is due, in seconds without progress, by process.
        self._due: dict[int, float] = {}
        self._slow_ranks = SlowRanks(patience.warning_s)
        self._own_times = OwnTimes(self._here, patience.warning_s, is_waiting)
        self._stopped = threading.Event()
        self._has_failed = False
        self._watcher = threads.watcher.get()
        self._watching = self._watcher.begin(self._run(), lost=_NO_POSTS.format(self._process))
        # A thread that asks the service nothing, and so sees that it does not answer.
        sample, lost = self._own_times.run, _NO_SAMPLES.format(self._process)
        arguments = self._stopped, self._count
        self._samples = threads.start_thread(sample, *arguments, name="samples", lost=lost)

    def stop(self) -> None:
        """Ends the looks: none must be in a call to the service at the interpreter's exit."""
        atexit.unregister(self.leave)
        self._stopped.set()
        self._watcher.end(self._watching)
        self._samples.join(threads.LONGEST_CALL_S)

    def leave(self) -> None:
        """Tells the other processes that this process's script has ended."""
        # A process made by os.fork shares the connection to the service and must not use it.
        if os.getpid() != self._pid:
            return
        try:
            self._here.has_left = True
            self._post(self._here.note())
            self.stop()
        except (jax.errors.JaxRuntimeError, Interrupted) as error:
            logger.debug("The coordination service has gone: %s", error)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._patience.tick_s)
            try:
                self._look()
            except (jax.errors.JaxRuntimeError, Interrupted):
                raise  # The service has gone, and with it whom to look at.
            except Exception:
                # The next look may succeed. A process that no longer posts counts as silent.
                if not self._has_failed:
                    threads.say_lost(_NO_POSTS.format(self._process))
                self._has_failed = True
            self._answered_s = self._now_s

    def _count(self, passed_s: float) -> None:
        """Counts time; ends this process if the service, which runs in process 0, is silent."""
        self._now_s += min(passed_s, 2 * self._patience.tick_s + threads.LONGEST_CALL_S)
        silent_s, timeout_s = self._now_s - self._answered_s, self._patience.timeout_s
        if timeout_s and silent_s > timeout_s and not self._watching.done():
            text = (
                f"Process 0, which coordinates the job, has not answered process {self._process} "
                f"for {silent_s:.0f} s: it is stopped or swapped out, or its host or the "
                "network is down."
            )
            self._end_job(_stalled(0, f"{text} {ADVICE}", is_lost=True), False)

    def _look(self) -> None:
        note = replace(self._here.note(), reads_device=reads_device())
        if compiles():
            note = replace(note, phase="compile", what="")
        if note != self._last:
            self._last, self._changed_s = note, self._now_s
        stuck_s = self._now_s - self._changed_s
        if self._stopped.is_set():
            return
        self._post(replace(note, stuck_s=stuck_s))
        is_stuck = stuck_s >= self._early_s and _is_in_call(note)
        # The master looks for all, because its output may be the only one that is shown.
        if is_stuck or self._process == 0:
            self._judge(self._read(), stuck_s)

    def _post(self, note: Note) -> None:
        self._num_posts += 1
        own_s = {phase: round(seconds, 2) for phase, seconds in self._own_times.seconds.items()}
        timeout_s, stack = self._patience.timeout_s, ""
        if timeout_s and note.stuck_s >= limit_s(note, timeout_s) / 2:
            # It is likely to be asked for.
            stack = describe_stacks()
        post = {"posts": self._num_posts, "note": asdict(note), "own_s": own_s, "stack": stack}
        table.post_place(self._client, self._process, json.dumps(post))

    def _read(self) -> list[Seen]:
        texts = table.places(self._client)
        now_s = self._now_s
        for process, text in texts.items():
            if self._seen.get(process, ("", 0.0))[0] != text:
                self._seen[process] = text, now_s
        found = [self._seen.get(process, ("", now_s)) for process in range(jax.process_count())]
        return [
            _seen(text, 0.0 if process == self._process else now_s - since_s)
            for process, (text, since_s) in enumerate(found)
        ]

    def _judge(self, seen: list[Seen], stuck_s: float) -> None:
        timeout_s = self._patience.timeout_s
        own_turn_s = timeout_s + _TURN_TICKS * self._patience.tick_s
        is_own_turn = timeout_s and (self._process == 0 or stuck_s >= own_turn_s)
        if is_own_turn and (cause := find_cause(seen, timeout_s)) is not None:
            # With the stack of its process, if that runs.
            stack = "" if cause.is_lost else seen[cause.process].stack
            how = "\n".join(filter(None, [cause.how, stack]))
            self._end_job(replace(cause, how=how), True)
        self._warn([each.note for each in seen])
        if self._process != 0:
            return
        slow = self._slow_ranks.look(
            self._now_s,
            [each.own_s for each in seen],
            calls=["".join(each.note.calls[:1]) for each in seen],
            silent_s=max(each.silent_s for each in seen),
        )
        if slow is not None:
            logger.warning("%s", slow)

    def _warn(self, notes: list[Note]) -> None:
        speaks_for = range(len(notes)) if self._process == 0 else [self._process]
        told = []
        for process in speaks_for:
            note = notes[process]
            if note.stuck_s < self._early_s or not _is_in_call(note):
                self._due.pop(process, None)
                continue
            members = note.members or range(len(notes))
            is_hopeless = any(notes[number].has_left for number in members)
            warning_s = self._patience.warning_s
            due = self._due.get(process, self._early_s if is_hopeless else warning_s)
            if note.stuck_s >= due and (text := describe_stall(notes, process)) is not None:
                if process == self._process and is_hopeless:
                    self._here.left_alone = text
                told.append(text)
                # The longer the stall, the rarer the warnings.
                self._due[process] = 3 * max(note.stuck_s, warning_s)
        if told:
            logger.warning("%s %s", " ".join(told), SAME_CALLS, extra={"on_every_process": True})


def _seen(text: str, silent_s: float) -> Seen:
    if not text:
        return Seen(Note(), silent_s)
    post = json.loads(text)
    values: dict[str, Any] = post["note"]
    values["calls"], values["members"] = tuple(values["calls"]), tuple(values["members"])
    return Seen(Note(**values), silent_s, post["own_s"], post["stack"])


_watch = Slot[_Watch | None](lambda: None, close=_Watch.stop)


def start_watching(patience: Patience, end_job: EndJob, is_waiting: Callable[[], bool]) -> None:
    """Begins to look for stalls, once the process has joined its job.

    `is_waiting` tells whether the devices of this process wait for others.
    """
    if _watch.get() is None:
        watch = _Watch(patience, end_job, is_waiting)
        _watch.set(watch)
        atexit.register(watch.leave)
