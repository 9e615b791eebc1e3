"""Groups of ranks with collectives of their own."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from tnt_jax import _jax
from tnt_jax.distributed.joining.runtime import init


@dataclass(frozen=True, init=False)
class ProcessSet:
    """Some of a job's ranks, for collectives among them alone.

    ```python
    half = tnt.ProcessSet(range(tnt.get_size() // 2))
    if half.is_member:
        total = tnt.all_reduce(1, process_set=half)
    ```

    Only members call a collective of a set, all of them, in the same order. Creating a set
    exchanges nothing; sets of the same ranks are equal.

    Args:
        ranks: Ranks of the job.

    Attributes:
        ranks: The ranks, rising.

    Raises:
        ValueError: If there is no rank, one twice, or a negative one.
    """

    ranks: tuple[int, ...]

    def __init__(self, ranks: Iterable[int]) -> None:
        numbers = [int(rank) for rank in ranks]
        if not numbers or len(set(numbers)) < len(numbers) or min(numbers) < 0:
            raise ValueError(
                f"A ProcessSet takes distinct ranks of the job, from 0 on, but got {numbers}."
            )
        object.__setattr__(self, "ranks", tuple(sorted(numbers)))

    def __str__(self) -> str:
        return f"ranks {', '.join(map(str, self.ranks))}"

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def is_member(self) -> bool:
        """Whether a rank of this process belongs to the set."""
        return jax.process_index() in self.processes

    @property
    def processes(self) -> tuple[int, ...]:
        """The processes that the ranks belong to, rising."""
        return tuple(sorted({device.process_index for device in self._devices()}))

    def mesh(self) -> Mesh:
        """Returns a mesh of the axis `data` over the set's ranks, for programs of the set's own.

        Processes outside of the set do not run such programs.
        """
        return _jax.make_data_mesh(self._devices())

    def _devices(self) -> list[Any]:
        devices = list(init().mesh.devices.flat)
        if self.ranks[-1] >= len(devices):
            raise ValueError(
                f"The job has ranks from 0 to {len(devices) - 1}, but the process set has {self}."
            )
        return [devices[rank] for rank in self.ranks]


def members_of(process_set: ProcessSet | None) -> tuple[int, ...]:
    """Returns the processes that exchange host values, this one among them; all for None."""
    runtime = init()
    if process_set is None:
        return tuple(range(jax.process_count()))
    members = process_set.processes
    for process in members:
        ranks = _jax.local_ranks(runtime.mesh, process)
        if not set(ranks) <= set(process_set.ranks):
            raise ValueError(
                f"Host values belong to processes, and process {process} has the ranks {ranks}, of "
                f"which the process set ({process_set}) has a part. Take all of them or none; "
                "inside a step a set may be any ranks."
            )
    if jax.process_index() not in members:
        raise ValueError(
            f"Process {jax.process_index()} is no member of the process set ({process_set}), "
            "whose collectives its members call alone: put the call under "
            "`if process_set.is_member:`."
        )
    return members


def process_of(rank: int, process_set: ProcessSet | None) -> int:
    """Returns the process that a rank of the job, and of the set, belongs to."""
    devices = list(init().mesh.devices.flat)
    ranks = range(len(devices)) if process_set is None else process_set.ranks
    if rank not in ranks:
        raise ValueError(
            f"root_rank must be one of the ranks {', '.join(map(str, ranks))}, but is {rank}."
        )
    return devices[rank].process_index
