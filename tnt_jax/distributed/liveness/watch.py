"""Shows the other processes where this one is, and ends the job if one makes no progress.

A thread posts a note to the job's coordination service every few seconds. If a process has not
moved for `TNT_STALL_WARNING_S` seconds, the thread reads the notes of all processes and warns. If
one has not moved for `TNT_STALL_TIMEOUT` seconds, or no longer posts, the job ends.
"""

import atexit
import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax

from tnt_jax import _jax
from tnt_jax.distributed.elastic.link import Interrupted
from tnt_jax.distributed.liveness import causes, table
from tnt_jax.distributed.liveness.causes import (
    ADVICE,
    SAME_CALLS,
    Cause,
    Seen,
    describe_stall,
    find_cause,
    limit_s,
)
from tnt_jax.distributed.liveness.phases import Note, here
from tnt_jax.distributed.liveness.slow_ranks import OwnTimes, SlowRanks
from tnt_jax.distributed.liveness.threads import say_lost, start_thread
from tnt_jax.job import Slot
from tnt_jax.log import logger

_LONGEST_TICK_S = 5.0
_TICKS = 12
# A process that waits for one whose script has ended would wait forever, so it learns of this
# sooner.
_LEFT_S = 5.0
# The time limit for calls to the service that do not wait.
_LONGEST_CALL_S = 2.0
# How much later than process 0 another one says who holds up the job, in ticks.
_TURN_TICKS = 3
_NO_POSTS = (
    "Process {} failed to say where it is, or to look where the others are. If that goes on, the "
    "others take it for one that is stopped, and it finds none that is:"
)
_NO_SAMPLES = (
    "Process {} does not notice any more if process 0 is stopped or cut off, and is never named as "
    "slow:"
)


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


class _Clock:
    """Counts seconds in which this process ran: a stopped one cannot judge the others."""

    def __init__(self, tick_s: float) -> None:
        self.longest_s = 2 * tick_s + _LONGEST_CALL_S
        self._read_at, self._now_s = time.monotonic(), 0.0

    def now_s(self) -> float:
        moment = time.monotonic()
        self._now_s += min(moment - self._read_at, self.longest_s)
        self._read_at = moment
        return self._now_s


class _Watch:
    """The threads that post this process's note and look at those of the others."""

    def __init__(
        self,
        patience: Patience,
        end_job: Callable[[Cause, bool], None],
        is_waiting: Callable[[], bool],
    ) -> None:
        self._pid = os.getpid()
        self._here = here()
        self._patience, self._end_job = patience, end_job
        self._clock = _Clock(patience.tick_s)
        self._client, self._process = _jax.coordination_client(), jax.process_index()
        self._changed_s, self._last = 0.0, Note()
        self._num_posts = 0
        # The last post of each process, and when it was first seen.
        self._seen: dict[int, tuple[str, float]] = {}
        # Since the service has answered.
        self._silent_s = 0.0
        # When the next warning is due, in seconds without progress, by process.
        self._due: dict[int, float] = {}
        self._slow_ranks = SlowRanks(patience.warning_s)
        self._own_times = OwnTimes(self._here, patience.warning_s, is_waiting)
        self._stopped = threading.Event()
        self._has_failed = False
        process = self._process
        self._threads = [start_thread(self._run, name="stall", lost=_NO_POSTS.format(process))]
        # This one asks the service nothing, and so sees that it does not answer.
        sample = self._own_times.run, self._stopped, self._count_silence
        lost = _NO_SAMPLES.format(process)
        self._threads.append(start_thread(*sample, name="samples", lost=lost))

    def stop(self) -> None:
        """Ends the threads: none must be in a call to the service at the interpreter's exit."""
        atexit.unregister(self.leave)
        self._stopped.set()
        for thread in self._threads:
            if threading.current_thread() is not thread:
                thread.join(_LONGEST_CALL_S)

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

    def _run(self) -> None:
        while not self._stopped.wait(self._patience.tick_s):
            try:
                self._look()
            except (jax.errors.JaxRuntimeError, Interrupted) as error:
                # The service has gone, and the job, or a generation of an elastic one, with it.
                logger.debug("No notes of other processes: %s", error)
                return
            except Exception:
                # The next look may succeed. A process that no longer posts counts as silent.
                if not self._has_failed:
                    say_lost(_NO_POSTS.format(self._process))
                self._has_failed = True
            self._silent_s = 0.0

    def _count_silence(self, passed_s: float) -> None:
        """Ends this process if the service, which runs in process 0, does not answer."""
        self._silent_s += min(passed_s, self._clock.longest_s)
        timeout_s = self._patience.timeout_s
        if timeout_s and self._silent_s > timeout_s and self._threads[0].is_alive():
            text = (
                f"Process 0, which coordinates the job, has not answered process {self._process} "
                f"for {self._silent_s:.0f} s: it is stopped or swapped out, or its host or the "
                "network is down."
            )
            self._end_job(Cause(0, f"{text} {ADVICE}", is_silent=True), False)

    def _look(self) -> None:
        now_s = self._clock.now_s()
        note = replace(self._here.note(), reads_device=causes.reads_device())
        if causes.compiles():
            note = replace(note, phase="compile", what="")
        if note != self._last:
            self._last, self._changed_s = note, now_s
        stuck_s = now_s - self._changed_s
        if self._stopped.is_set():
            return
        self._post(replace(note, stuck_s=stuck_s))
        is_stuck = stuck_s >= self._early_s and bool(note.calls or note.waits or note.phase)
        # The master looks for all, because its output may be the only one that is shown.
        if is_stuck or self._process == 0:
            self._judge(self._read(), stuck_s)

    @property
    def _early_s(self) -> float:
        return min(_LEFT_S, self._patience.warning_s)

    def _post(self, note: Note) -> None:
        self._num_posts += 1
        own_s = {phase: round(seconds, 2) for phase, seconds in self._own_times.seconds.items()}
        timeout_s, stack = self._patience.timeout_s, ""
        if timeout_s and note.stuck_s >= limit_s(note, timeout_s) / 2:
            # It is likely to be asked for.
            stack = causes.describe_stacks()
        post = {"posts": self._num_posts, "note": asdict(note), "own_s": own_s, "stack": stack}
        table.post_place(self._client, self._process, json.dumps(post))

    def _read(self) -> list[Seen]:
        texts = table.places(self._client)
        now_s = self._clock.now_s()
        for process, text in texts.items():
            if self._seen.get(process, ("", 0.0))[0] != text:
                self._seen[process] = text, now_s
        found = []
        for process in range(jax.process_count()):
            text, since_s = self._seen.get(process, ("", now_s))
            found.append(Seen(_note(text), 0.0 if process == self._process else now_s - since_s))
        return found

    def _judge(self, seen: list[Seen], stuck_s: float) -> None:
        timeout_s = self._patience.timeout_s
        own_turn_s = timeout_s + _TURN_TICKS * self._patience.tick_s
        if timeout_s and (self._process == 0 or stuck_s >= own_turn_s):
            cause = find_cause(seen, timeout_s)
            if cause is not None:
                # With the stack of its process, if that runs.
                post, _ = self._seen.get(cause.process, ("", 0.0))
                stack = json.loads(post)["stack"] if post and not cause.is_silent else ""
                text = "\n".join(filter(None, [cause.text, stack]))
                self._end_job(replace(cause, text=text), True)
        self._warn([each.note for each in seen])
        if self._process == 0:
            self._name_slow(seen)

    def _name_slow(self, seen: list[Seen]) -> None:
        texts = [self._seen.get(process, ("", 0.0))[0] for process in range(len(seen))]
        times = [json.loads(text)["own_s"] if text else {} for text in texts]
        slow = self._slow_ranks.look(
            self._clock.now_s(),
            times,
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
            if note.stuck_s < self._early_s or not (note.calls or note.waits or note.phase):
                self._due.pop(process, None)
                continue
            members = note.members or range(len(notes))
            is_hopeless = any(notes[number].has_left for number in members)
            warning_s = self._patience.warning_s
            due = self._due.get(process, self._early_s if is_hopeless else warning_s)
            text = describe_stall(notes, process) if note.stuck_s >= due else None
            if text is not None and process == self._process and is_hopeless:
                self._here.left_alone = text
            if text is not None:
                told.append(text)
                # The longer the stall, the rarer the warnings.
                self._due[process] = 3 * max(note.stuck_s, warning_s)
        if told:
            logger.warning("%s %s", " ".join(told), SAME_CALLS, extra={"on_every_process": True})


def _note(text: str) -> Note:
    if not text:
        return Note()
    values: dict[str, Any] = json.loads(text)["note"]
    values["calls"], values["members"] = tuple(values["calls"]), tuple(values["members"])
    return Note(**values)


_watch = Slot[_Watch | None](lambda: None, close=_Watch.stop)


def start_watching(
    patience: Patience, end_job: Callable[[Cause, bool], None], is_waiting: Callable[[], bool]
) -> None:
    """Starts the threads that look for stalls, once the process has joined its job.

    `end_job` ends all processes because of one that makes no progress, and is told whether the
    coordination service answers; `is_waiting` tells whether the devices of this process wait.
    """
    if _watch.get() is None:
        watch = _Watch(patience, end_job, is_waiting)
        _watch.set(watch)
        atexit.register(watch.leave)
