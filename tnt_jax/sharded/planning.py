"""Needs of a training step on each device, before one runs, and the meshes to choose among.

`tnt-jax plan -- train.py` shows them. Where memory chooses the mesh, all candidates split the rows
of a batch over all devices, so that the data is the same whatever is chosen.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tnt_jax import _jax
from tnt_jax.distributed.sums.hlo import (
    Traffic,
    in_units,
    largest_arrays,
    read_traffic,
    split_programs,
)
from tnt_jax.log import logger
from tnt_jax.sharded.options import MeshAxes
from tnt_jax.train.contracts import Batch, TrainingStep
from tnt_jax.train.execution import DeviceBatches
from tnt_jax.train.health.number_watch import NumberWatch
from tnt_jax.train.memory_choice import TIMES, Attempt, Choice, local_bytes
from tnt_jax.train.state import TrainState, descriptions, state_arrays
from tnt_jax.train.steps.epoch_sums import zero_sums
from tnt_jax.train.trainer import Trainer

# The option that asks for a choice of meshes.
MESH = 'mesh="auto"'
# Bytes per second of a device's link, each direction.
_LINKS = {"450 GB/s (NVLink of an H100)": 450e9, "50 GB/s (400 Gbit/s)": 50e9}


class PlannedArray(NamedTuple):
    """An array: the mesh axes that cut each dimension, and its bytes in all and on a device."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    axes: tuple[str, ...]
    nbytes: int
    local_bytes: int


class StepMemory(NamedTuple):
    """Bytes of a step on each device, by the compiler's own analysis, and the largest arrays."""

    params: int
    opt_state: int
    others: int  # The batch, the model state and the sums for the logs.
    activations: int  # All that is computed in between, gradients too.
    largest: Sequence[str]

    @classmethod
    def of(cls, program: _jax.ProgramMemory, state: TrainState) -> "StepMemory":
        """Returns it for a program that trains a state, which may be descriptions."""
        params, opt_state = local_bytes(state.params), local_bytes(state.opt_state)
        others = program.operand_bytes - params - opt_state
        largest = largest_arrays(program.compiled.as_text())
        return cls(params, opt_state, others, program.computed_bytes, list(map(str, largest)))

    def __str__(self) -> str:
        shares = {
            "parameters": self.params,
            "optimizer state": self.opt_state,
            "batch and other state": self.others,
            "activations and gradients": self.activations,
        }
        return "\n".join(
            [
                f"Memory of a step: {in_units(sum(shares.values()))} a device, by the compiler",
                *(f"  {in_units(nbytes)} for {name}" for name, nbytes in shares.items()),
                f"  Most take: {'; '.join(self.largest)}",
            ]
        )


@dataclass(frozen=True)
class StepPlan:
    """Needs of a training step: arrays, of which `state` are no parameters, memory and traffic."""

    mesh: Mapping[str, int]
    params: Sequence[PlannedArray]
    state: Sequence[PlannedArray]
    memory: StepMemory
    traffic: Sequence[Traffic]
    notes: Sequence[str] = ()

    def text(self) -> str:
        """Returns the plan as text, an array a line."""
        mesh = ", ".join(f"{name} {size}" for name, size in self.mesh.items())
        width = max((len(array.path) for array in self.params), default=0)
        lines = [
            f"Mesh: {mesh}",
            *self.notes,
            "Parameters, with the axis that cuts each dimension:",
        ]
        lines += [
            f"  {x.path:{width}}  {x.dtype}{_shape(x)}  {in_units(x.local_bytes)} a device"
            for x in self.params
        ]
        for name, arrays in (("parameters", self.params), ("other state", self.state)):
            of_arrays = ((x.nbytes, x.local_bytes) for x in arrays)
            whole, local = (sum(sizes) for sizes in zip(*of_arrays, strict=True))
            lines.append(f"All {name}: {in_units(whole)}, {in_units(local)} a device")
        return "\n".join([*lines, str(self.memory), *self._traffic_lines()])

    def _traffic_lines(self) -> list[str]:
        if not self.traffic:
            return ["Communication of a step: none"]
        kinds: dict[str, tuple[int, int, float]] = {}
        for x in self.traffic:
            count, nbytes, sent = kinds.get(x.kind, (0, 0, 0.0))
            kinds[x.kind] = (
                count + x.times,
                nbytes + x.times * x.nbytes,
                sent + x.times * x.sent_bytes,
            )
        total = sum(sent for _, _, sent in kinds.values())
        return [
            "Communication of a step, as compiled:",
            *(
                f"  {count} x {kind}, {in_units(nbytes)}; a device sends {in_units(sent)}"
                for kind, (count, nbytes, sent) in kinds.items()
            ),
            f"  Time on the links, if all of it were waited for: {_link_times(total)}",
        ]


def _link_times(sent_bytes: float) -> str:
    """Returns how long usual links take for what a device sends."""
    return ", ".join(
        f"{sent_bytes / rate * 1000:.3g} ms at {link}" for link, rate in _LINKS.items()
    )


def alternatives(choice: Choice) -> list[str]:
    """Returns lines on all steps that were looked at, with estimates of their relative times."""

    def described(attempt: Attempt, state: str) -> str:
        time = choice.relative_time(attempt)
        details = [
            "" if time is None else f"time {time:.2f}",
            f"passes add up {in_units(attempt.added_bytes)} of gradients"
            if attempt.added_bytes
            else "",
            f"{_link_times(attempt.sent_bytes)} to send" if attempt.sent_bytes else "",
        ]
        return f"  {'; '.join(filter(None, [str(attempt), *details, state]))}"

    attempts = [x for way in choice.attempts for x in way if x is not choice.chosen]
    return [
        f"Steps that were looked at. {TIMES}; what several passes or links take comes on top:",
        *(described(x, "too much" if choice.exceeds(x) else "slower") for x in attempts),
        described(choice.chosen, "chosen"),
        *(described(x, "not needed") for x in choice.others),
    ]


def plan_step(
    lowered: Any, state: TrainState, mesh: Mesh, *, notes: Sequence[str] = ()
) -> StepPlan:
    """Returns what a lowered step needs, with further lines (`notes`); compiles it."""
    compiled = lowered.compile()
    arrays = {path: _planned(path, x) for path, x in state_arrays(state).items()}
    params = {path: x for path, x in arrays.items() if path.startswith("params/")}
    return StepPlan(
        dict(mesh.shape),
        [x._replace(path=path.removeprefix("params/")) for path, x in params.items()],
        [x for path, x in arrays.items() if path not in params],
        StepMemory.of(_jax.ProgramMemory.of(compiled), state),
        [x for text in split_programs(compiled.as_text()) for x in read_traffic(text)],
        notes,
    )


def memory_note(trainer: Trainer, group: DeviceBatches) -> str:
    """Returns what the step for a group of batches needs, for an error of missing memory."""
    try:
        return str(StepMemory.of(trainer.memory_of(group), trainer.described()))
    except Exception as error:  # The error that is explained counts, not this one.
        logger.debug("The memory of the step is not known.", exc_info=True)
        return f"The memory of the step is not known: {error!r}"


def _planned(path: str, x: Any) -> PlannedArray:
    if _jax.is_key(x):
        x = jax.eval_shape(jax.random.key_data, x)
    spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else ()
    axes = ["*".join(axis) if isinstance(axis, tuple) else axis or "" for axis in spec]
    axes += [""] * (x.ndim - len(axes))
    itemsize = np.dtype(x.dtype).itemsize
    local = x.sharding.shard_shape(x.shape) if x.sharding is not None else x.shape
    sizes = (int(np.prod(shape)) * itemsize for shape in (x.shape, local))
    return PlannedArray(path, x.shape, np.dtype(x.dtype).name, tuple(axes), *sizes)


def _shape(x: PlannedArray) -> str:
    dims = [f"{size} {axis}".strip() for size, axis in zip(x.shape, x.axes, strict=True)]
    return f"[{', '.join(dims)}]"


def trace_step(
    training: TrainingStep, steps: Any, mesh: Mesh, state: TrainState, batch: Batch
) -> Any:
    """Returns the traced program of a step of `ShardedSteps`, for descriptions or arrays."""
    placed = steps.place(state)
    by_row = NamedSharding(mesh, PartitionSpec(_jax.rank_axes(mesh)))
    rows = descriptions(batch, sharding=by_row)
    sums = zero_sums(training.parts, placed, rows, mesh)
    if training.on_nan is not None:
        sums = NumberWatch(training.on_nan, training.parts, mesh).with_counts(sums)
    return steps.train(training).trace(placed, sums, rows)


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
