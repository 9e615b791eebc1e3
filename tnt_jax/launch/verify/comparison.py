"""Compares two recordings step by step: where they differ by more than rounding, and why.

What rounding does to a training is measured, not assumed: the first run is repeated from weights
that are changed by a few rounding errors each, and what differs then is what rounding explains
(Rosinski and Williamson 1997, SIAM J. Sci. Comput. 18(2), validate ports of climate models so).
Without it Adam, which makes a whole step of a gradient that is zero but for rounding, would look
like a fault.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from tnt_jax.settings import RECORD_MARK


@dataclass(frozen=True)
class Step:
    """What is known after a step, or before the first."""

    step: int
    place: Mapping[str, int]  # `epoch` and `batch`, from 0, and `num_rows`; empty before the first.
    # Checksums of the inputs of each row, and of its targets and weight; None if unknown.
    rows: list[list[int]] | None
    metrics: Mapping[str, list[float]]
    # For each array of the state its `digest`, and of floating numbers `eps`, `norm` and `sums`;
    # see `tnt_jax.train.health.recording`.
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
    """What one run has recorded."""

    # `ranks`, `processes`, `device`, `versions`, `unit` (the relative error of one rounding),
    # `trained_by` and what else the run reports.
    facts: Mapping[str, Any] = field(default_factory=dict)
    start: Step | None = None
    steps: tuple[Step, ...] = ()
    left_out: str = ""  # Why it could not run as it was asked for; empty if it has.
    failure: str = ""  # Why the run failed; empty if it has not.

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


def read_lines(lines: Iterable[str]) -> Recording:
    """Returns the recording that a process has reported in some lines."""
    found = [json.loads(line.removeprefix(RECORD_MARK)) for line in lines]
    if reasons := [each["left_out"] for each in found if "left_out" in each]:
        return Recording(left_out=reasons[0])
    if not found:
        return Recording(left_out="No step was recorded.")
    start, *rest = found
    steps = []
    for each in rest:
        place = {name: each[name] for name in ("epoch", "batch", "num_rows")}
        steps.append(Step(each["step"], place, each["rows"], each["metrics"], each["arrays"]))
    facts = {name: value for name, value in start.items() if name not in ("step", "arrays")}
    return Recording(facts, Step(start["step"], {}, None, {}, start["arrays"]), tuple(steps))


def change(path: str, before: Step, after: Step) -> list[float]:
    """Returns the signed sums of what was added to an array between two steps."""
    pairs = zip(before.arrays[path]["sums"], after.arrays[path]["sums"], strict=True)
    return [b - a for a, b in pairs]


def distance(some: list[float], other: list[float]) -> float:
    """Returns about the norm of the difference of two arrays, from their signed sums."""
    return math.dist(some, other) / math.sqrt(len(some))


def size(some: list[float]) -> float:
    """Returns about the norm of an array, from its signed sums."""
    return distance(some, [0.0] * len(some))


# What a single trial of rounding shows, times this, is explained by rounding.
_MARGIN = 8.0
# An update is the same if half of its digits are: a comparison of two values, such as in relu or a
# maximum, may fall either way where they are equal but for rounding.
_HALF_OF_DIGITS = 4.0
# Rounding errors of stored weights, of which an update is the difference.
_STORED = 4.0
# Rows whose metrics, such as accuracy, may fall either way.
_TURNED_ROWS = 2
_FIRST_NAMES = 3
# Names in Flax and Keras. Of a custom loop nothing else is known of its statistics.
_STATISTICS = re.compile(r"batch_stats|moving_(mean|variance)|model_state/.*\b(mean|var)\b")
# By how much an update may be off a multiple of another, and a multiple off 1.
_ALIKE, _OFF = 0.02, 0.05


class Difference(NamedTuple):
    """The first step at which two runs differ by more than rounding."""

    step: int
    where: str  # The step in words.
    what: str  # `"rows"`, `"start"`, or the path of the first array or metric that differs.
    text: str  # What differs, and by how much.
    causes: list[str]  # What is likely to have made it so, the likeliest first, if any is known.


class Rounding:
    """What rounding explains: how far a run goes apart from weights changed by rounding errors."""

    def __init__(self, plain: Recording, rounded: Recording | None) -> None:
        self.unit: float = plain.facts["unit"]
        self._runs = () if rounded is None else (plain, rounded)
        self._largest = {} if rounded is None else _largest_apart(plain, rounded)

    def of_change(self, path: str, before: Step, after: Step) -> float:
        """Returns what rounding explains of the change of an array between two steps."""
        # What was seen at an earlier step may come again.
        earlier = self._largest.get(path, {}).get(after.step, 0.0)
        seen = max(earlier, self._seen(path, before.step, after.step))
        array = after.arrays[path]
        return max(
            _MARGIN * seen,
            _HALF_OF_DIGITS * math.sqrt(self.unit) * size(change(path, before, after)),
            _STORED * array["eps"] * array["norm"],
        )

    def _seen(self, path: str, start: int, end: int) -> float:
        known = [(run.at(start), run.at(end)) for run in self._runs]
        changes = [change(path, a, b) for a, b in known if a and b]
        return distance(*changes) if len(changes) == 2 else 0.0

    def of_metric(self, name: str, index: int, step: Step) -> float:
        """Returns what rounding explains of a value of a metric."""
        value = step.metrics[name][index]
        pair = [run.at(step.step) for run in self._runs]
        values = [each.metrics[name][index] for each in pair if each is not None]
        seen = abs(values[0] - values[1]) if len(values) == 2 else 0.0
        turned = 0.0 if name == "loss" else _TURNED_ROWS / step.place["num_rows"]
        limit = max(_MARGIN * seen, _HALF_OF_DIGITS * math.sqrt(self.unit) * abs(value))
        return max(limit, turned * max(abs(value), 1.0))


def _largest_apart(plain: Recording, rounded: Recording) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for before, after in pairwise(plain.known):
        others = rounded.at(before.step), rounded.at(after.step)
        if others[0] is None or others[1] is None:
            break
        for path in filter(others[1].arrays.__contains__, _floating(after)):
            largest = found.setdefault(path, {before.step: 0.0})
            apart = _apart(path, (before, after), (others[0], others[1]))
            # NaN explains nothing: max keeps the first.
            largest[after.step] = max(largest[before.step], apart)
    return found


def compare(reference: Recording, other: Recording, rounding: Rounding) -> Difference | None:
    """Returns where a run first differs from the reference by more than rounding, or None."""
    # A run that was resumed begins in the middle of the reference.
    assert reference.start is not None and other.start is not None
    if (found := _compare_start(reference, other, rounding)) is not None:
        return found
    before, before_other = reference.at(other.start.step), other.start
    earlier: list[Step] = []
    for theirs in other.steps:
        ours = reference.at(theirs.step)
        if ours is None or before is None:
            break
        if (found := _compare_rows(reference, other, ours, theirs)) is not None:
            return found
        pair = (before, ours), (before_other, theirs)
        if differing := _differing(*pair, rounding):
            causes = [*_causes(other, *pair, differing, earlier)]
            text = _text(*pair, differing, rounding)
            return Difference(ours.step, ours.name, differing[0], text, causes)
        before, before_other = ours, theirs
        earlier.append(ours)
    if not earlier:
        return Difference(
            other.start.step, other.start.name, "start", "The runs have no step in common.", []
        )
    return None


def largest_difference(reference: Recording, other: Recording) -> float:
    """Returns the largest difference of an update from that of the reference, relative to it."""
    found = 0.0
    for before, after in pairwise(other.known):
        ours = reference.at(before.step), reference.at(after.step)
        if ours[0] is None or ours[1] is None:
            continue
        total = apart = 0.0
        for path in _floating(ours[1]):
            own, theirs = change(path, ours[0], ours[1]), change(path, before, after)
            total, apart = total + size(own) ** 2, apart + distance(own, theirs) ** 2
        found = max(found, math.sqrt(apart / total) if total else 0.0)
    return found


def have_equal_bits(reference: Recording, other: Recording) -> bool:
    """Returns whether all arrays have the same bits after every step that both have."""
    pairs = [(reference.at(step.step), step) for step in other.steps]
    return all(ours is not None and _digests(ours) == _digests(theirs) for ours, theirs in pairs)


def _digests(step: Step) -> dict[str, str]:
    return {path: array["digest"] for path, array in step.arrays.items()}


def _floating(step: Step) -> list[str]:
    return [path for path, array in step.arrays.items() if "sums" in array]


def _compare_start(reference: Recording, other: Recording, rounding: Rounding) -> Difference | None:
    assert reference.start is not None and other.start is not None
    begins, start = other.start, reference.at(other.start.step)
    if start is None:
        return None
    if start.arrays.keys() != begins.arrays.keys():
        names = sorted(start.arrays.keys() ^ begins.arrays.keys())
        return Difference(
            start.step, start.name, "start", f"One run alone has {_listed(names)}.", []
        )
    if start is reference.start:
        names = [p for p, x in start.arrays.items() if x["digest"] != begins.arrays[p]["digest"]]
        causes = [
            "The initial weights are not those of a seed: seed what draws them, on every process "
            "and number of ranks alike."
        ]
        text = f"The runs begin with other values of {_listed(names)}."
    else:
        pair = (reference.start, start), (reference.start, begins)
        names = _differing(*pair, rounding, metrics=False)
        causes = ["What was restored is not what was trained before the fault, which agreed."]
        text = f"The resumed run begins with other values of {_listed(names)}."
    return Difference(start.step, start.name, names[0], text, causes) if names else None


_Pair = tuple[Step, Step]


def _differing(
    ours: _Pair, theirs: _Pair, rounding: Rounding, *, metrics: bool = True
) -> list[str]:
    """Returns arrays and metrics that differ by more than rounding, in the order of the state."""
    after, after_other = ours[1], theirs[1]
    found = []
    for path, array in after.arrays.items():
        if array["digest"] == after_other.arrays[path]["digest"]:
            continue
        # A comparison with NaN is False.
        if "sums" not in array or not _apart(path, ours, theirs) <= rounding.of_change(path, *ours):
            found.append(path)
    if not metrics:
        return found
    for name, values in after.metrics.items():
        others = after_other.metrics.get(name, [])
        if len(values) != len(others):
            found.append(name)
            continue
        limits = [rounding.of_metric(name, i, after) for i in range(len(values))]
        triples = zip(values, others, limits, strict=True)
        if any(not abs(a - b) <= limit and str(a) != str(b) for a, b, limit in triples):
            found.append(name)
    return found


def _apart(path: str, ours: _Pair, theirs: _Pair) -> float:
    return distance(change(path, *ours), change(path, *theirs))


def _compare_rows(
    reference: Recording, other: Recording, ours: Step, theirs: Step
) -> Difference | None:
    if ours.place != theirs.place:
        text = f"It has {theirs.name}."
        causes = ["The script makes its batches from the number of ranks, or its data differ."]
        return Difference(ours.step, ours.name, "rows", text, causes)
    if ours.rows is None or theirs.rows is None or ours.rows == theirs.rows:
        return None
    inputs, targets = [a == b for a, b in zip(ours.rows, theirs.rows, strict=True)]
    pairs = [list(zip(*step.rows, strict=True)) for step in (ours, theirs) if step.rows]
    known, found = Counter(pairs[0]), Counter(pairs[1])
    changed = sum(a != b for a, b in zip(*pairs, strict=True))
    text = f"{changed} of {len(pairs[0])} rows of the batch are others"
    if known == found:
        text, cause = "The rows of the batch come in another order", "a shuffle without a seed"
    elif targets and not inputs:
        text = f"{text}, of which only the inputs differ"
        cause = "random augmentation whose numbers have no seed, or one of the process"
    elif pairs[0][: (own := -(-len(pairs[1]) // other.ranks))] == pairs[1][:own]:
        text = f"{text}, but none of the {own} of rank 0"
        cause = "a loader that differs between processes"
    else:
        cause = "a loader whose rows depend on the process or on the number of ranks"
    causes = [
        f"The data: {cause}. Every process must read the same batches, with seeds that do not "
        "depend on the rank, of which tnt_jax takes each process's rows."
    ]
    if other.ranks == reference.ranks:
        causes = [f"The data differ from run to run: {cause}, on the same number of ranks."]
    return Difference(ours.step, ours.name, "rows", f"{text}.", causes)


def _text(ours: _Pair, theirs: _Pair, differing: Sequence[str], rounding: Rounding) -> str:
    arrays = [path for path in differing if path in ours[1].arrays]
    numbers = [name for name in differing if name not in ours[1].arrays]
    parts = []
    if arrays:
        first = arrays[0]
        words = f"{_listed(arrays)} ({len(arrays)} of {len(ours[1].arrays)} arrays)"
        if "sums" in ours[1].arrays[first]:
            whole = size(change(first, *ours))
            share = _percent(_apart(first, ours, theirs), whole)
            limit = _percent(rounding.of_change(first, *ours), whole)
            words += (
                f"; the update of {first} is off by {share}, of which rounding explains {limit}"
            )
        parts.append(words)
    parts += [
        f"{name} is {_numbers(theirs[1].metrics.get(name, []))} instead of "
        f"{_numbers(ours[1].metrics[name])}"
        for name in numbers[:_FIRST_NAMES]
    ]
    return "; ".join(parts) + "."


def _causes(
    other: Recording, ours: _Pair, theirs: _Pair, differing: Sequence[str], earlier: Sequence[Step]
) -> Iterator[str]:
    """Yields what is likely to have made arrays differ, although the rows are the same."""
    if (factor := _factor(ours, theirs, differing)) is not None:
        yield (
            f"The updates are {factor:.3g} times those of the reference, in the same direction: a "
            "learning rate, a loss or a gradient that is multiplied, or divided, by the number of "
            "ranks."
        )
    shapes = other.facts.get("drawn", [])
    if drawn := [shape for shape in shapes if other.facts["rows_of_rank"] in shape]:
        yield (
            f"Random numbers that are drawn for a rank's own rows without their row in the global "
            f"batch, {drawn[0]}: each rank draws the same numbers for other rows. Draw them with "
            "the key that the step is given."
        )
    is_padded = bool(ours[1].place["num_rows"] % other.ranks)
    if is_padded and not any(step.place["num_rows"] % other.ranks for step in earlier):
        after = " Steps before, which the ranks share evenly, agree." if earlier else ""
        yield (
            f"{ours[1].place['num_rows']} rows are not shared evenly by {other.ranks} ranks: a "
            "loss or a statistic that divides by a rank's own rows, or counts its padding."
            f"{after} Give a value for each row and leave the average to the step."
        )
    own = other.facts.get("own_statistics")
    if statistics := [path for path in differing if path in (own or [])]:
        yield (
            "Statistics of each rank's own rows, such as those of batch normalisation "
            f"({statistics[0]}): give it axis_name='data', or Model(synchronize_batch_norm=True) "
            "for Keras."
        )
    named = [path for path in differing if _STATISTICS.search(path)]
    if own is None and named:
        yield (
            f"{named[0]}, by its name a statistic of batch normalisation, may not be that of the "
            "global batch: a guess from the name alone. Give the layer axis_name='data'."
        )
    if other.facts.get("as") == "passes":
        yield "A loss or a statistic that divides by the rows of a pass."


def _factor(ours: _Pair, theirs: _Pair, differing: Sequence[str]) -> float | None:
    """Returns by what the updates of the reference are multiplied, if they are."""
    pairs = [
        pair
        for path in differing
        if "sums" in ours[1].arrays.get(path, {}) and not _STATISTICS.search(path)
        for pair in zip(change(path, *ours), change(path, *theirs), strict=True)
    ]
    whole = sum(a * a for a, _ in pairs)
    if not whole or not math.isfinite(sum(abs(b) for _, b in pairs)):
        return None
    factor = sum(a * b for a, b in pairs) / whole
    rest = math.sqrt(sum((b - factor * a) ** 2 for a, b in pairs) / whole)
    return factor if rest < _ALIKE * abs(factor) and abs(factor - 1) > _OFF else None


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _FIRST_NAMES} more" if len(names) > _FIRST_NAMES else ""
    return ", ".join(names[:_FIRST_NAMES]) + more


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.2g} %" if whole else f"{part:.2g}"


def _numbers(values: Sequence[Any]) -> str:
    return ", ".join(f"{value:.6g}" for value in values[:_FIRST_NAMES]) or "missing"
