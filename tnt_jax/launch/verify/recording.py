"""What one run has recorded of its steps, as it is reported, compared and kept."""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tnt_jax.settings import RECORD_MARK


@dataclass(frozen=True)
class Step:
    """What is known after a step, or before the first.

    Attributes:
        step: Number of steps so far.
        place: Its `epoch` and `batch`, from 0, and `num_rows`; empty before the first step.
        rows: Checksums of the inputs of each row, and of its targets and weight; None if unknown.
        metrics: Values of each metric.
        arrays: For each array of the state its `digest`, and of floating numbers `eps`, `norm` and
            `sums`; see `tnt_jax.train.health.recording`.
    """

    step: int
    place: Mapping[str, int]
    rows: list[list[int]] | None
    metrics: Mapping[str, list[float]]
    arrays: Mapping[str, Mapping[str, Any]]

    @property
    def name(self) -> str:
        """The step in words."""
        if not self.place:
            return f"the start, after {self.step} step(s)"
        return (
            f"step {self.step} (batch {self.place['batch'] + 1} of epoch "
            f"{self.place['epoch'] + 1}, {self.place['num_rows']} rows)"
        )


@dataclass(frozen=True)
class Recording:
    """What one run has recorded.

    Attributes:
        facts: `ranks`, `processes`, `device`, `versions`, `unit` (the relative error of one
            rounding), `trained_by` and what else the run reports.
        start: The state before the first step.
        steps: Its steps, in order.
        left_out: Why it could not run as it was asked for; empty if it has.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    start: Step | None = None
    steps: tuple[Step, ...] = ()
    left_out: str = ""

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.facts["ranks"]

    @property
    def known(self) -> list[Step]:
        """What is known before the first step and after each."""
        return [*([] if self.start is None else [self.start]), *self.steps]

    def at(self, step: int) -> Step | None:
        """Returns what is known after a number of steps, if anything is."""
        return next((each for each in self.known if each.step == step), None)

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as JSON values."""
        return {"facts": dict(self.facts), "steps": [vars(step) for step in self.known]}

    @classmethod
    def from_dict(cls, kept: Mapping[str, Any]) -> "Recording":
        """Returns the recording that `to_dict` made a dict of."""
        start, *steps = (Step(**step) for step in kept["steps"])
        return cls(kept["facts"], start, tuple(steps))


def is_record(line: bytes) -> bool:
    """Returns whether a line of a process belongs to a recording."""
    return line.startswith(RECORD_MARK.encode())


def read_lines(lines: Iterable[str]) -> Recording:
    """Returns the recording that a process has reported in some lines."""
    start: dict[str, Any] | None = None
    steps = []
    for line in lines:
        found = json.loads(line.removeprefix(RECORD_MARK))
        if "left_out" in found:
            return Recording(left_out=found["left_out"])
        if start is None:
            start = found
            continue
        place = {name: found[name] for name in ("epoch", "batch", "num_rows")}
        steps.append(Step(found["step"], place, found["rows"], found["metrics"], found["arrays"]))
    if start is None:
        return Recording(left_out="No step was recorded.")
    facts = {name: value for name, value in start.items() if name not in ("step", "arrays")}
    return Recording(facts, Step(start["step"], {}, None, {}, start["arrays"]), tuple(steps))


def change(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[float]:
    """Returns the signed sums of what was added to an array between two steps."""
    return [b - a for a, b in zip(before["sums"], after["sums"], strict=True)]


def distance(some: list[float], other: list[float]) -> float:
    """Returns about the norm of the difference of two arrays, from their signed sums."""
    return math.dist(some, other) / math.sqrt(len(some))


def size(some: list[float]) -> float:
    """Returns about the norm of an array, from its signed sums."""
    return distance(some, [0.0] * len(some))
