"""Judges what became of a job after each fault: which rows and bits, whom it blamed, how fast."""

import os
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fault_contenders import CODE_PREEMPTED
from fault_jobs.injected import STEPS_PER_EPOCH
from fault_kinds import LAUNCHER, Kind

_SAVED = re.compile(r"the state after step (\d+) of epoch (\d+) is saved")


@dataclass(frozen=True)
class Trial:
    """One fault that is to happen.

    Attributes:
        contender: Who trains.
        kind: What happens.
        repetition: Number of the trial among those of its contender and kind.
        seed: Seed of the whole series.
    """

    contender: str
    kind: Kind
    repetition: int
    seed: int

    @property
    def draw(self) -> random.Random:
        """A generator of its own, which yields the same numbers at every call."""
        return random.Random(f"{self.seed} {self.kind.name} {self.repetition}")

    @property
    def process(self) -> int:
        """The process that it happens to, or that says when the launcher's phase is reached."""
        return 0 if self.kind.target in (LAUNCHER, "") else self.draw.randrange(2)

    def record(self, **found: Any) -> dict[str, Any]:
        """Returns what is recorded of it."""
        return {
            "contender": self.contender,
            "kind": self.kind.name,
            "repetition": self.repetition,
            "process": self.process if self.kind.target not in (LAUNCHER, "") else None,
            **found,
        }


@dataclass(frozen=True)
class Step:
    """A step that process 0 has made, when, and in which process of the system."""

    number: int
    time: float
    pid: int


@dataclass
class History:
    """What is known of a job so far.

    Attributes:
        steps: Its steps.
        epochs: The records of its epochs (`injected.record_epoch`).
        ends: Time and exit codes of each start that has ended; no codes if it hung.
        lines: Its output with times.
        left_at: When processes were left over.
    """

    steps: list[Step] = field(default_factory=list)
    epochs: list[dict[str, Any]] = field(default_factory=list)
    ends: list[tuple[float, list[int]]] = field(default_factory=list)
    lines: list[tuple[float, str]] = field(default_factory=list)
    left_at: list[float] = field(default_factory=list)


def judge(
    trial: Trial, moment: float, until: float, history: History, named: str
) -> dict[str, Any]:
    """Returns what is recorded of a fault at `moment`, before the next one at `until`."""
    lines = [(at, line) for at, line in history.lines if moment <= at < until]
    ends = [(at, codes) for at, codes in history.ends if moment <= at < until]
    saved = saved_step(lines)
    done, back = _return(history.steps, moment, until, saved)
    after = [record for record in history.epochs if record["time"] > moment]
    within = [record for record in after if record["time"] < until] or after[:1]
    blamed = blamed_process(named, lines)
    first_signs = [at for at, _ in [*lines[:1], *ends[:1]]]
    return trial.record(
        epoch=within[-1]["epoch"] if within else None,
        digest=within[-1]["digest"] if within else None,
        lost=within[-1]["lost"] if within else None,
        doubled=within[-1]["doubled"] if within else None,
        codes=[codes for _, codes in ends],
        hung=any(not codes for _, codes in ends),
        left=any(moment <= at < until for at in history.left_at),
        named=blamed == trial.process if trial.kind.is_named else None,
        told=next((line.strip()[:200] for _, line in lines), None),
        is_saved=saved is not None,
        redone=None if back is None else done - back.number + 1,
        noticed_s=round(min(first_signs) - moment, 3) if first_signs else None,
        back_s=None if back is None else round(back.time - moment, 3),
        load=os.getloadavg()[0],
    )


def saved_step(lines: Sequence[tuple[float, str]]) -> tuple[float, int] | None:
    """Returns when a job said that it has saved its state, and after which step; None if never."""
    for at, line in lines:
        if found := _SAVED.search(line):
            step, epoch = map(int, found.groups())
            return at, (epoch - 1) * STEPS_PER_EPOCH + step
    return None


def _return(
    steps: Sequence[Step], moment: float, until: float, saved: tuple[float, int] | None
) -> tuple[int, Step | None]:
    """Returns the last step before a fault, or before its state was saved, and the first after."""
    if saved is not None:
        at, done = saved
        return done, next((step for step in steps if at < step.time <= until), None)
    old = [step for step in steps if step.time <= moment]
    pid = old[-1].pid if old else None
    done = max((step.number for step in steps if step.pid == pid), default=0)
    return done, next((s for s in steps if moment < s.time <= until and s.pid != pid), None)


def blamed_process(pattern: str, lines: Sequence[tuple[float, str]]) -> int | None:
    """Returns the number of the first process that the output blames; None if it blames none."""
    for _, line in lines:
        for match in re.finditer(pattern, line):
            return next(int(number) for number in match.groups() if number)
    return None


def verdict(record: Mapping[str, Any], kind: Kind, reference: Sequence[str]) -> str:
    """Returns what is wrong with a trial of a sequence, in words; empty for nothing."""
    if record["hung"]:
        return "hung"
    if record["left"]:
        return "left processes"
    if record["digest"] is None:
        return "did not go on"
    if record["lost"] or record["doubled"]:
        return "rows lost or doubled"
    if record["digest"] != reference[record["epoch"] - 1]:
        return "other weights"
    return _preemption_verdict(record, kind) if kind.promise == "is preempted" else ""


def _preemption_verdict(record: Mapping[str, Any], kind: Kind) -> str:
    if record["redone"] or not record["is_saved"]:
        return "not saved"
    is_launcher = kind.target == LAUNCHER
    is_code = record["codes"][:1] == [[CODE_PREEMPTED]]
    return "ended with another code" if is_launcher and not is_code else ""
