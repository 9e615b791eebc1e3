"""The mesh that a user asks for: how many devices along each axis."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jax.sharding import AxisType, Mesh

from tnt_jax import _jax

TENSOR_AXIS = "tensor"
# In place of a mesh: choose one.
AUTO = "auto"
# The devices of one process are neighbours on the last axes, which communicate most.
AXES = (_jax.DATA_AXIS, _jax.STAGE_AXIS, _jax.FSDP_AXIS, TENSOR_AXIS)


@dataclass(frozen=True)
class MeshAxes:
    """Devices along each axis of a mesh; -1 for as many as are left.

    Attributes:
        data: Copies of the model, each of which trains on its rows of the global batch.
        stage: Stages of a pipeline.
        fsdp: Devices over which the arrays of a copy are sharded; rows are split over them as well.
        tensor: Devices over which single operations are divided.
    """

    data: int = 1
    stage: int = 1
    fsdp: int = 1
    tensor: int = 1

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> "MeshAxes":
        """Returns the axes of a mapping such as `{"data": 2, "fsdp": 4}`, which it checks."""
        if not isinstance(sizes, Mapping):
            raise TypeError(
                "mesh must map axes to numbers of devices, such as {'data': 2, 'fsdp': 4}, or be "
                f"'auto', but is {sizes!r}."
            )
        unknown = [name for name in sizes if name not in AXES]
        if unknown:
            raise ValueError(
                f"mesh has the unknown axis {unknown[0]!r}. The axes are {', '.join(AXES)}."
            )
        for name, size in sizes.items():
            is_whole = isinstance(size, (int, np.integer)) and not isinstance(size, bool)
            if not is_whole or (size < 1 and size != -1):
                raise ValueError(
                    f"mesh[{name!r}] must be a number of devices of at least 1, or -1 for those "
                    f"that are left, but is {size!r}."
                )
        if list(sizes.values()).count(-1) > 1:
            raise ValueError(f"mesh may leave one axis open with -1, but is {dict(sizes)}.")
        return cls(**{name: int(size) for name, size in sizes.items()})

    def sizes(self, num_devices: int) -> dict[str, int]:
        """Returns the size of each axis; a ValueError if they do not use just so many devices."""
        sizes = {name: getattr(self, name) for name in AXES}
        given = math.prod(size for size in sizes.values() if size != -1)
        if -1 in sizes.values():
            sizes = {name: num_devices // given if n == -1 else n for name, n in sizes.items()}
        if math.prod(sizes.values()) != num_devices:
            asked = ", ".join(f"{name} {getattr(self, name)}" for name in AXES if sizes[name] != 1)
            raise ValueError(
                f"The mesh ({asked or 'one device'}) does not fill the {num_devices} device(s) of "
                f"the job: its axes multiply to {given}. Change mesh (one axis may be -1, for "
                "the devices that are left), or choose devices with tnt_jax.init(devices=...)."
            )
        return sizes

    def build(self, devices: Mesh) -> Mesh:
        """Returns the mesh over the devices of the job, in their order.

        Axes of one device are left out, but for `data`. A ValueError says that the axes do not use
        exactly these devices, or that a process would hold ranks that are not neighbours.
        """
        sizes = self.sizes(devices.size)
        named = {name: n for name, n in sizes.items() if n > 1 or name == _jax.DATA_AXIS}
        mesh = Mesh(
            devices.devices.reshape(tuple(named.values())),
            tuple(named),
            axis_types=(AxisType.Auto,) * len(named),
        )
        _check_neighbours(mesh)
        return mesh


def _check_neighbours(mesh: Mesh) -> None:
    """Raises a ValueError, alike on all, if rows of a process are no range of the global batch."""
    for process in sorted({device.process_index for device in mesh.devices.flat}):
        ranks = _jax.local_ranks(mesh, process)
        if ranks != list(range(ranks[0], ranks[-1] + 1)):
            raise ValueError(
                f"On the mesh {dict(mesh.shape)} process {process} holds the ranks {ranks}, which "
                "are not neighbours. Let the number of devices of a process divide stage * fsdp * "
                "tensor, or be a multiple of it."
            )
