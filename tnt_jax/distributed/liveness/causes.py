"""Finds out from the notes of all processes who waits for whom, and who holds up the job."""

import os
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tnt_jax import _jax
from tnt_jax.distributed.liveness.phases import Note, Phase, here

# Of a stack, the innermost calls; those of tnt_jax are left out where there are others.
_MOST_CALLS = 12
_OWN = (str(Path(__file__).parents[2]) + os.sep, threading.__file__)
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
        f"Python stack of {title} (innermost call last):\n{_describe(frames[thread])}"
        for thread in readers or [main]
        if thread in frames
    ]
    text = "\n".join(stacks)
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "..."


def _describe(frame: FrameType) -> str:
    calls = traceback.extract_stack(frame)
    shown = [
        call
        for index, call in enumerate(calls)
        if index + 1 == len(calls) or not call.filename.startswith(_OWN)
    ]
    return "".join(traceback.format_list(shown[-_MOST_CALLS:])).rstrip()


def _frame_of_main() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)


# Phases that may take many times as long as a step: programs are compiled, checkpoints written, or
# the script does what it likes between two calls.
_LONG_PHASES: tuple[Phase, ...] = ("", "compile", "steps", "save")
_LONGER = 10
_MOST_NAMED = 8
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
    """The last note that another process has of one, and the seconds since it came."""

    note: Note
    silent_s: float = 0.0


@dataclass(frozen=True)
class Cause:
    """A process that holds up the job; what it does and what to do; and whether it does not run."""

    process: int
    text: str
    is_silent: bool = False


def limit_s(note: Note, timeout_s: float) -> float:
    """Returns the seconds that a process may be without progress where it is."""
    if note.limit_s is not None:
        return note.limit_s
    may_be_long = note.phase in _LONG_PHASES and not note.waits
    return timeout_s * (_LONGER if may_be_long else 1)


def _silence_limit_s(note: Note, timeout_s: float) -> float:
    """Returns the same for a process that posts nothing: only what holds Python's lock is silent.

    Compilation and programs of several steps do not; within a call the note may be outdated.
    """
    does_as_it_likes = note.phase == "save" or not (note.phase or note.calls)
    return limit_s(note, timeout_s) if does_as_it_likes else note.limit_s or timeout_s


def find_cause(seen: Sequence[Seen], timeout_s: float) -> Cause | None:
    """Returns the process that holds up the job, or None if none is over its limit."""
    there = [process for process, each in enumerate(seen) if not each.note.has_left]
    for process in there:
        if seen[process].silent_s >= _silence_limit_s(seen[process].note, timeout_s):
            return _silent(process, seen[process])
    notes = [each.note for each in seen]
    over = [
        process for process in there if notes[process].stuck_s >= limit_s(notes[process], timeout_s)
    ]
    busy = [
        process
        for process in over
        if not notes[process].may_wait and _is_awaited(notes, process, timeout_s)
    ]
    if busy:
        return _stuck(min(busy, key=lambda process: notes[process].order), notes, timeout_s)
    waiting = [process for process in over if notes[process].may_wait]
    if len(waiting) == len(there) and any(_is_in_call(notes[process]) for process in waiting):
        if (uncalled := _uncalled(notes, there, timeout_s)) is not None:
            return uncalled
        # All wait: for one that waits for nothing known, or that has not got as far as the others.
        unknown = [process for process in there if not notes[process].waits] or there
        first = min(unknown, key=lambda process: notes[process].order)
        others = _listed(notes, [number for number in range(len(notes)) if number != first])
        more = f". All processes wait, for one another or a device: {others}" if others else ""
        differ = len({notes[process].calls for process in there}) > 1
        return _stuck(first, notes, timeout_s, more, SAME_CALLS if differ else ADVICE)
    return None


def _is_awaited(notes: Sequence[Note], process: int, timeout_s: float) -> bool:
    """Returns whether another process has waited for this one for as long as it may."""
    longest_s = min(timeout_s, limit_s(notes[process], timeout_s))
    return any(
        note.may_wait and note.stuck_s >= longest_s
        for number, note in enumerate(notes)
        if number != process and process in (note.members or [process])
    )


def _uncalled(notes: Sequence[Note], there: Sequence[int], timeout_s: float) -> Cause | None:
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
    named = ", ".join(
        f"process {process} ({notes[process]})" for process in processes[:_MOST_NAMED]
    )
    more = f" and {len(processes) - _MOST_NAMED} more" if len(processes) > _MOST_NAMED else ""
    return named + more


def _is_in_call(note: Note) -> bool:
    return bool(note.calls or note.waits or note.phase)


def _silent(process: int, seen: Seen) -> Cause:
    return Cause(
        process,
        f"Process {process} has not posted for {seen.silent_s:.0f} s: it is stopped, swapped out, "
        f"in a call that does not let its other threads run, or its host is down. It was last "
        f"{seen.note}. {ADVICE}",
        is_silent=True,
    )


def _stuck(
    process: int, notes: Sequence[Note], timeout_s: float, more: str = "", advice: str = ADVICE
) -> Cause:
    own = notes[process]
    limit = limit_s(own, timeout_s)
    which = f"TNT_STALL_TIMEOUT is {timeout_s:g} s" + (
        f", {limit:g} s there" if limit != timeout_s else ""
    )
    place = str(own) if _is_in_call(own) else "in code of its script, outside of calls and loops"
    text = (
        f"Process {process} has made no progress for {own.stuck_s:.0f} s ({which}) {place}{more}."
    )
    return Cause(process, f"{text} {advice}")


def describe_stall(notes: Sequence[Note], process: int) -> str | None:
    """Returns a sentence on what a process waits for, or None if no other process blocks it."""
    own = notes[process]
    members = own.members or range(len(notes))
    others = [number for number in members if number != process]
    behind = [
        number for number in others if notes[number].has_left or notes[number].order < own.order
    ]
    if not behind and own.may_wait:
        # All have got equally far: those that do not wait are busy elsewhere.
        behind = [number for number in others if not notes[number].may_wait]
    if not behind and own.waits:
        # All wait, in different calls or for a lost message.
        behind = [
            number
            for number in others
            if notes[number].order != own.order or notes[number].calls != own.calls
        ] or others
    if not behind or own.has_left:
        return None
    what = f" ({own.waits})" if own.waits and own.calls and own.waits != own.calls[-1] else ""
    named = _listed(notes, behind)
    return f"Process {process} has waited {own.stuck_s:.0f} s {own.place}{what} for {named}."
