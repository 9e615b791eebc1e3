"""The way to compute a step that fits a device: `mesh="auto"`, `tnt_micro_batch_size="auto"`.

Ways are compiled in turn, the fastest first, until the memory that the compiler states for one is
within the limit: data parallelism to parts over all devices, and in each of them all rows of a rank
at once, or as many as fit. All meshes split the rows of a batch over all devices, so that the data
is the same whatever is chosen.
"""

import math
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tnt_jax import _jax
from tnt_jax.distributed.host import collectives
from tnt_jax.sharded.mesh_axes import MeshAxes
from tnt_jax.sharded.planning import in_units, peak_bytes
from tnt_jax.train.contracts import Batch, Parts, Steps
from tnt_jax.train.finite import OnNaN
from tnt_jax.train.health.number_watch import NumberWatch
from tnt_jax.train.state import TrainState
from tnt_jax.train.steps.epoch_sums import zero_sums

# Options that ask for a choice.
MESH, MICRO_BATCH = 'mesh="auto"', 'tnt_micro_batch_size="auto"'
# Below this share of the limit it is worth a compilation to look for a larger pass.
_MUCH_SPACE = 0.85


class StepsInPlaces(Steps, Protocol):
    """Steps that say where the arrays of a state lie."""

    def place(self, state: TrainState) -> TrainState:
        """Returns descriptions of a state's arrays, with their shardings."""
        ...


class TrainingStep(NamedTuple):
    """The training step of a model; see `Steps.train`."""

    parts: Parts
    optimizer: optax.GradientTransformation
    accumulation_steps: int
    on_nan: OnNaN | None

    def peak_bytes(self, steps: StepsInPlaces, mesh: Mesh, state: TrainState, batch: Batch) -> int:
        """Returns the memory of a step on each device, by the compiler's own analysis.

        State and batch may be descriptions; where the state lies does not matter.
        """
        placed = steps.place(state)
        by_row = NamedSharding(mesh, PartitionSpec(_jax.rank_axes(mesh)))
        rows = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=by_row), batch
        )
        sums = zero_sums(self.parts, placed, rows, mesh)
        if self.on_nan is not None:
            sums = NumberWatch(self.on_nan, self.parts, mesh).with_counts(sums)
        step: Any = steps.train(**self._asdict())
        return peak_bytes(step.lower(placed, sums, rows).compile())


class Way(NamedTuple):
    """A way to compute a training step.

    Attributes:
        name: What it is called; empty for the step as it is.
        floor: Bytes of the training state on each device.
        grads: Bytes of the gradients on each device, which several passes add up.
        peak_bytes: From the most rows of a pass, or None for all, to the bytes of a step on each
            device.
        num_rows: Rows of a rank, if they may be computed in several passes; else None.
    """

    name: str
    floor: int
    grads: int
    peak_bytes: Callable[[int | None], int]
    num_rows: int | None = None


class Attempt(NamedTuple):
    """A step that was looked at.

    Attributes:
        name: That of its way, and its passes.
        nbytes: Bytes of a step on each device; of the training state if that is too much already.
        is_step: Whether they are those of a step.
        rows_at_once: Most rows of a pass; None for all.
        problem: Why the model cannot be computed so; `nbytes` is infinite then.
    """

    name: str
    nbytes: float
    is_step: bool = True
    rows_at_once: int | None = None
    problem: str = ""

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name} is impossible: {self.problem}"
        what = in_units(self.nbytes) if self.is_step else f"{in_units(self.nbytes)} for state alone"
        return f"{self.name} needs {what}"


class Choice(NamedTuple):
    """What was chosen, and why.

    Attributes:
        asked: The option that asked for it.
        attempts: Steps that were looked at, way by way; the last one fits.
        limit: Bytes of a device.
    """

    asked: str
    attempts: tuple[tuple[Attempt, ...], ...]
    limit: int

    @property
    def way(self) -> int:
        """Index of the way that was chosen."""
        return len(self.attempts) - 1

    @property
    def rows_at_once(self) -> int | None:
        """Most rows of a rank that are computed in one pass; None for all."""
        return self.attempts[-1][-1].rows_at_once

    def __str__(self) -> str:
        *others, last = self.attempts
        needed, limit = in_units(last[-1].nbytes), in_units(self.limit)
        chosen = f"{self.asked} chose {last[-1].name}, which needs {needed} of {limit} a device"
        tried = _ends([*others, last[:-1]])
        return f"{chosen}; too much: {tried}" if tried else chosen


def _ends(ways: Sequence[tuple[Attempt, ...]]) -> str:
    """Returns the first and the last attempt at each way, as text."""
    return "; ".join(str(attempt) for way in ways for attempt in dict.fromkeys(way[:1] + way[-1:]))


def candidates(num_devices: int) -> list[MeshAxes]:
    """Returns the meshes to look at, with ever smaller parts of the model on a device.

    >>> [(axes.data, axes.fsdp) for axes in candidates(4)]
    [(4, 1), (2, 2), (1, 4)]
    """
    parts = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    return [MeshAxes(data=num_devices // n, fsdp=n) for n in parts]


def name_of(axes: MeshAxes) -> str:
    """Returns a mesh as choices name it.

    >>> name_of(MeshAxes(data=2, fsdp=4))
    'data 2, fsdp 4'
    """
    sizes = {"data": axes.data, "fsdp": axes.fsdp}
    return ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one device"


def choose(asked: str, ways: Sequence[Way], limit: int, *, note: str = "") -> Choice:
    """Returns the first way whose step fits; all processes must call it, and choose alike.

    Args:
        asked: The option that asks for it.
        ways: Ways to compute a step, the fastest first.
        limit: Bytes of a device.
        note: What an error should say about the ways.

    Raises:
        ValueError: On every process, if no step fits.
    """
    attempts: list[tuple[Attempt, ...]] = []
    for way in ways:
        try:
            attempts.append(tuple(_attempts(way, limit)))
        except ValueError as error:
            if asked == MESH or not attempts:
                raise
            problem = str(error).partition(". ")[0]
            attempts.append((Attempt(way.name, math.inf, problem=problem),))
        if attempts[-1][-1].nbytes <= limit:
            return Choice(asked, tuple(attempts), limit)
    is_mesh = asked == MESH
    sought = (
        "mesh of data and fsdp whose training step" if is_mesh else "way to compute a step that"
    )
    raise ValueError(
        f"{asked} found no {sought} fits the {in_units(limit)} of a device: "
        f"{_ends(attempts)}. {note}Use more devices, a smaller global batch, "
        "remat='full', precision='mixed_bfloat16', or a mesh with an axis 'tensor' or 'stage' "
        "(docs/larger_models.md). TNT_DEVICE_MEMORY sets the limit."
    )


def _attempts(way: Way, limit: int) -> list[Attempt]:
    """Returns the steps of a way that were looked at; the last one fits if any does.

    The memory of a pass grows with its rows. The next number of rows is where the line through the
    last attempts, or one and what does not depend on rows, meets the limit.
    """
    floor = _agreed(way.floor)
    if floor > limit:
        return [Attempt(way.name or "one pass", floor, is_step=False)]

    def look(rows_at_once: int | None) -> Attempt:
        nbytes = _agreed(way.peak_bytes(rows_at_once))
        return Attempt(_name(way, rows_at_once), nbytes, rows_at_once=rows_at_once)

    tried, num_rows = [look(None)], way.num_rows or 1
    points: list[tuple[int, float]] = [(num_rows, tried[0].nbytes)]
    at_zero = floor + _agreed(way.grads)
    while tried[-1].nbytes > limit and points[-1][0] > 1 and at_zero < limit:
        line = (points[-1], points[-2]) if len(points) > 2 else ((0, at_zero), points[-1])
        most = equal_rows(num_rows, min(max(_rows_at(limit, *line), 1), points[-1][0] - 1))
        tried.append(look(most))
        points.append((most, tried[-1].nbytes))
        if len(points) > 2 and _rows_at(limit, points[-1], points[-2]) < 1:
            break
    if len(tried) < 2 or tried[-1].nbytes > _MUCH_SPACE * limit:
        return tried
    # More rows may fit: fewer than those of the last attempt that did not.
    rows = _rows_at(limit, points[-1], points[-2])
    more = equal_rows(num_rows, min(max(rows, 1), points[-2][0] - 1))
    if more <= points[-1][0]:
        return tried
    larger = look(more)
    return [*tried, larger] if larger.nbytes <= limit else [*tried[:-1], larger, tried[-1]]


def _rows_at(limit: int, point: tuple[int, float], other: tuple[int, float]) -> int:
    """Returns the rows at which the line through two points `(rows, bytes)` meets a limit."""
    (rows, nbytes), (other_rows, other_nbytes) = point, other
    per_row = (other_nbytes - nbytes) / (other_rows - rows)
    return math.floor(rows + (limit - nbytes) / per_row) if per_row > 0 else 0


def equal_rows(num_rows: int, most: int) -> int:
    """Returns the rows of equal passes of at most `most` rows.

    >>> equal_rows(10, 4)
    4
    >>> equal_rows(9, 8)
    5
    """
    return math.ceil(num_rows / math.ceil(num_rows / most))


def _name(way: Way, rows_at_once: int | None) -> str:
    if way.num_rows is None:
        return way.name or "the step"
    count = 1 if rows_at_once is None else math.ceil(way.num_rows / rows_at_once)
    passes = "one pass" if count == 1 else f"{count} passes of {rows_at_once} rows"
    return f"{way.name}, {passes}" if way.name else passes


def _agreed(nbytes: int) -> int:
    # Processes might have other compilers; what they choose must not differ.
    return int(collectives.all_reduce(nbytes, "max"))


def memory_limit(devices: Sequence[Any], setting: int | None) -> int:
    """Returns the bytes that a step may use on a device, the same on every process.

    They are those of the setting (`TNT_DEVICE_MEMORY`), those that the device states, or an equal
    share of the host's memory for each device of this process; of several processes and devices the
    least.
    """
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
    stated = [(device.memory_stats() or {}).get("bytes_limit", host) for device in devices]
    return int(collectives.all_reduce(min(stated) if setting is None else setting, "min"))


def local_bytes(tree: Any) -> int:
    """Returns the bytes on each device of arrays, or their descriptions, with shardings."""
    shapes = [(x.sharding.shard_shape(x.shape), x.dtype) for x in jax.tree.leaves(tree)]
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes)
