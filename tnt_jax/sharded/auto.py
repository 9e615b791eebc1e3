"""The meshes among which memory chooses, and the step of a mesh on which no state lies yet.

All of them split the rows of a batch over all devices, so that the data is the same whatever is
chosen.
"""

from typing import Any, NamedTuple

import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tnt_jax import _jax
from tnt_jax.sharded.mesh_axes import MeshAxes
from tnt_jax.train.contracts import Batch, Parts
from tnt_jax.train.finite import OnNaN
from tnt_jax.train.health.number_watch import NumberWatch
from tnt_jax.train.state import TrainState, descriptions
from tnt_jax.train.steps.epoch_sums import zero_sums

# The option that asks for a choice of meshes.
MESH = 'mesh="auto"'


class TrainingStep(NamedTuple):
    """The training step of a model; see `Steps.train`."""

    parts: Parts
    optimizer: optax.GradientTransformation
    accumulation_steps: int
    on_nan: OnNaN | None

    def trace(self, steps: Any, mesh: Mesh, state: TrainState, batch: Batch) -> Any:
        """Returns the traced program of a step of `ShardedSteps`, for descriptions or arrays."""
        placed = steps.place(state)
        by_row = NamedSharding(mesh, PartitionSpec(_jax.rank_axes(mesh)))
        rows = descriptions(batch, sharding=by_row)
        sums = zero_sums(self.parts, placed, rows, mesh)
        if self.on_nan is not None:
            sums = NumberWatch(self.on_nan, self.parts, mesh).with_counts(sums)
        step: Any = steps.train(**self._asdict())
        return step.trace(placed, sums, rows)


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
