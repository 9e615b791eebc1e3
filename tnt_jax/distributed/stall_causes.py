"""Finds out from the notes of all processes who waits for whom, and who holds up the job."""

from collections.abc import Sequence
from dataclasses import dataclass

from tnt_jax.distributed.stall import Note, Phase

# Phases that may take many times as long as a step: programs are compiled, checkpoints written, or
# the script does what it likes between two calls.
_LONG_PHASES: tuple[Phase, ...] = ("", "compile", "steps", "save")
_LONGER = 10
_MOST_NAMED = 8


@dataclass(frozen=True)
class Seen:
    """What another process knows of a process.

    Attributes:
        note: Its last note.
        silent_s: Seconds since that note came, of those that come regularly.
    """

    note: Note
    silent_s: float = 0.0


@dataclass(frozen=True)
class Cause:
    """A process that holds up the job.

    Attributes:
        process: Its number.
        text: What it does, in a sentence.
        is_silent: Whether it does not run.
    """

    process: int
    text: str
    is_silent: bool = False


def limit_s(note: Note, timeout_s: float) -> float:
    """Returns the seconds that a process may be without progress where it is."""
    if note.limit_s is not None:
        return note.limit_s
    return timeout_s * (_LONGER if note.phase in _LONG_PHASES else 1)


def _silence_limit_s(note: Note, timeout_s: float) -> float:
    """Returns the same for a process that posts nothing: only what holds Python's lock is silent.

    Compilation and programs of several steps do not.
    """
    does_as_it_likes = note.phase in ("", "save")
    return limit_s(note, timeout_s) if does_as_it_likes else note.limit_s or timeout_s


def find_cause(seen: Sequence[Seen], timeout_s: float) -> Cause | None:
    """Returns the process because of which the job cannot go on, or None if none is over its limit.

    Args:
        seen: What is known of each process.
        timeout_s: Seconds without progress; more in some phases, see `limit_s`.
    """
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
        if not notes[process].may_wait and _concerns_others(notes, process, timeout_s)
    ]
    if busy:
        return _stuck(min(busy, key=lambda process: notes[process].order), notes, timeout_s)
    waiting = [process for process in over if notes[process].may_wait]
    if len(waiting) == len(there) and any(_is_in_call(notes[process]) for process in waiting):
        # All wait: for one that waits for nothing known, or that has not got as far as the others.
        unknown = [process for process in there if not notes[process].waits] or there
        first = min(unknown, key=lambda process: notes[process].order)
        return _stuck(first, notes, timeout_s, all_wait=True)
    return None


def _concerns_others(notes: Sequence[Note], process: int, timeout_s: float) -> bool:
    """Returns whether a process that stands still holds up others.

    In a call or a loop, all need it. What the script does between them concerns those who wait.
    """
    return _is_in_call(notes[process]) or any(
        note.may_wait and note.stuck_s >= timeout_s
        for number, note in enumerate(notes)
        if number != process and process in (note.members or [process])
    )


def _is_in_call(note: Note) -> bool:
    return bool(note.calls or note.waits or note.phase)


def _silent(process: int, seen: Seen) -> Cause:
    return Cause(
        process,
        f"Process {process} has not posted for {seen.silent_s:.0f} s: it is stopped, swapped out, "
        f"in a call that does not let its other threads run, or its host is down. It was last "
        f"{seen.note}.",
        is_silent=True,
    )


def _stuck(process: int, notes: Sequence[Note], timeout_s: float, all_wait: bool = False) -> Cause:
    own = notes[process]
    limit = limit_s(own, timeout_s)
    which = f"TNT_STALL_TIMEOUT is {timeout_s:g} s" + (
        f", {limit:g} s there" if limit != timeout_s else ""
    )
    place = str(own) if _is_in_call(own) else "in code of its script, outside of calls and loops"
    text = f"Process {process} has made no progress for {own.stuck_s:.0f} s ({which}) {place}."
    if all_wait and len(notes) > 1:
        others = ", ".join(
            f"process {number} ({note})" for number, note in enumerate(notes) if number != process
        )
        return Cause(process, f"{text} All processes wait, for one another or a device: {others}.")
    return Cause(process, text)


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
    named = ", ".join(f"process {number} ({notes[number]})" for number in behind[:_MOST_NAMED])
    more = f" and {len(behind) - _MOST_NAMED} more" if len(behind) > _MOST_NAMED else ""
    what = f" ({own.waits})" if own.waits and own.calls and own.waits != own.calls[-1] else ""
    return f"Process {process} has waited {own.stuck_s:.0f} s {own.place}{what} for {named}{more}."
