"""The smallest sharding whose training step fits the memory of a device: `mesh="auto"`.

Steps are compiled in turn, from data parallelism to parts over all devices, until the memory that
the compiler states for one is within the limit. All of these meshes split the rows of a batch over
all devices, so that the data is the same whatever is chosen.
"""

import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tnt_jax import _jax
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.joining import runtime
from tnt_jax.distributed.joining.runtime import Runtime
from tnt_jax.sharded.mesh_axes import MeshAxes
from tnt_jax.sharded.planning import in_units, peak_bytes
from tnt_jax.train.contracts import Batch, Parts, Steps
from tnt_jax.train.finite import OnNaN
from tnt_jax.train.health.number_watch import NumberWatch
from tnt_jax.train.state import TrainState
from tnt_jax.train.steps.epoch_sums import zero_sums


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


class Attempt(NamedTuple):
    """A mesh that was looked at, and the bytes of its step, or of the state if that is too much."""

    axes: MeshAxes
    nbytes: int
    is_step: bool

    def __str__(self) -> str:
        sizes = {"data": self.axes.data, "fsdp": self.axes.fsdp}
        mesh = ", ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
        what = in_units(self.nbytes) if self.is_step else f"{in_units(self.nbytes)} for state alone"
        return f"{mesh or 'one device'} needs {what}"


class Choice(NamedTuple):
    """The mesh that was chosen, the last of the attempts, which fits the bytes of a device."""

    attempts: tuple[Attempt, ...]
    limit: int

    @property
    def axes(self) -> MeshAxes:
        """The mesh that was chosen."""
        return self.attempts[-1].axes

    def __str__(self) -> str:
        chosen = f'mesh="auto" chose {self.attempts[-1]} of {in_units(self.limit)} a device'
        others = "; ".join(map(str, self.attempts[:-1]))
        return f"{chosen}; too much: {others}" if others else chosen


def candidates(num_devices: int) -> list[MeshAxes]:
    """Returns the meshes to look at, with ever smaller parts of the model on a device.

    >>> [(axes.data, axes.fsdp) for axes in candidates(4)]
    [(4, 1), (2, 2), (1, 4)]
    """
    parts = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    return [MeshAxes(data=num_devices // n, fsdp=n) for n in parts]


def choose(
    step: TrainingStep,
    state: TrainState,
    batch: Batch,
    steps_on: Callable[[MeshAxes], tuple[Runtime, StepsInPlaces]],
) -> Choice:
    """Returns the first mesh whose step fits; all processes must call it, and choose alike.

    `steps_on` returns a mesh, and how steps are compiled there. A ValueError, on every process,
    says that no step fits.
    """
    job = runtime.init()
    limit = memory_limit(job.mesh.local_devices, job.settings.device_memory)
    attempts: list[Attempt] = []
    for axes in candidates(job.mesh.size):
        here, steps = steps_on(axes)
        needed = sum(_local_bytes(x) for x in jax.tree.leaves(steps.place(state)))
        is_step = needed <= limit
        if is_step:
            needed = step.peak_bytes(steps, here.mesh, state, batch)
        # Processes might have other compilers; what they choose must not differ.
        needed = int(collectives.all_reduce(needed, "max"))
        attempts.append(Attempt(axes, needed, is_step))
        if needed <= limit:
            return Choice(tuple(attempts), limit)
    raise ValueError(
        'mesh="auto" found no mesh of data and fsdp whose training step fits the '
        f"{in_units(limit)} of a device: {'; '.join(map(str, attempts))}. Use more devices, a "
        "smaller global batch, remat='full', precision='mixed_bfloat16', or a mesh with an axis "
        "'tensor' or 'stage' (docs/larger_models.md). TNT_DEVICE_MEMORY sets the limit."
    )


def memory_limit(devices: Sequence[Any], setting: int | None) -> int:
    """Returns the bytes that a step may use on a device, the same on every process.

    They are those of the setting (`TNT_DEVICE_MEMORY`), those that the device states, or an equal
    share of the host's memory for each device of this process; of several processes and devices the
    least.
    """
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(devices)
    stated = [(device.memory_stats() or {}).get("bytes_limit", host) for device in devices]
    return int(collectives.all_reduce(min(stated) if setting is None else setting, "min"))


def _local_bytes(x: Any) -> int:
    return int(np.prod(x.sharding.shard_shape(x.shape))) * np.dtype(x.dtype).itemsize
