"""Who trains with whom between two outer updates, and how often and how the groups exchange them.

The algorithm is DiLoCo (Douillard et al. 2023, arXiv:2311.08105), with fragments, overlap and
compression as in Streaming DiLoCo (Douillard et al. 2025, arXiv:2501.18512).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple, get_args

import jax
import optax
from jax.sharding import Mesh

from tnt_jax import _jax
from tnt_jax.cluster.devices import machine_id
from tnt_jax.distributed.host import collectives
from tnt_jax.log import logger

Compression = Literal["none", "int8", "float4"]
_CALL = "LocalSteps"


@dataclass(frozen=True)
class LocalSteps:
    """Steps of groups by themselves, and outer updates between the groups (DiLoCo).

    It is another algorithm than data parallelism: after `every` steps, each group has moved away
    from the weights that all share; the mean of these moves, weighted by the rows of the groups, is
    the gradient of an outer optimizer, which changes the shared weights. See docs/local_steps.md.

    Args:
        every: Steps of a group between two outer updates of an array.
        outer: Outer optimizer: an Optax transformation or a `tnt_jax.optimizers` object; by
            default, as in the paper, SGD with rate 0.7 and Nesterov momentum 0.9. With moving
            statistics, such as BatchNorm's, it is the mean of the groups' weights (SGD with rate
            1): momentum leads to weights for which the statistics are wrong, as long as the groups
            move far.
        fragments: Parts of the parameters that are sent one after the other, at equal distances
            within `every` steps.
        delay: Steps that run while a fragment travels; then the group's weights become the mean of
            theirs and the outer ones. With 0, steps wait for the update, and take its weights.
        compress: `"int8"` sends a byte for each element, `"float4"` half a byte (a sign and three
            bits of exponent), and both what rounding leaves out the next time; `"none"` sends
            float32.
        groups: `"host"` for the processes of each host, `"process"` for each process, or lists of
            process numbers.

    Raises:
        TypeError: If `outer` is no optimizer.
        ValueError: If an argument is out of its range.
    """

    every: int = 50
    outer: Any = None
    fragments: int = 1
    delay: int = 0
    compress: Compression = "none"
    groups: Literal["host", "process"] | Sequence[Sequence[int]] = "host"

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("fragments", 1), ("delay", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"{name} must be an integer of at least {least}, but is {value!r}."
                )
        if self.fragments > self.every:
            raise ValueError(
                f"fragments ({self.fragments}) must be at most every ({self.every}): one fragment "
                "is sent after a step."
            )
        if self.delay >= self.every:
            raise ValueError(
                f"delay ({self.delay}) must be below every ({self.every}): a fragment arrives "
                "before it is sent again."
            )
        if self.compress not in get_args(Compression):
            names = ", ".join(map(repr, get_args(Compression)))
            raise ValueError(f"compress must be one of {names}, but is {self.compress!r}.")
        self.transformation()

    def transformation(self, *, has_statistics: bool = False) -> optax.GradientTransformation:
        """Returns the outer optimizer as an Optax transformation.

        Args:
            has_statistics: Whether the model has arrays that groups compute themselves.
        """
        if self.outer is None and has_statistics:
            return optax.sgd(1.0)
        if self.outer is None:
            # Douillard et al. 2023, arXiv:2311.08105, section 3.1.
            return optax.sgd(0.7, momentum=0.9, nesterov=True)
        if isinstance(self.outer, optax.GradientTransformation):
            return self.outer
        if not hasattr(self.outer, "transformation"):
            raise TypeError(
                "outer must be an Optax transformation or a tnt_jax.optimizers object, but is "
                f"{self.outer!r}."
            )
        return self.outer.transformation()


class Group(NamedTuple):
    """The group of this process among all."""

    index: int
    processes: tuple[tuple[int, ...], ...]  # Of each group.
    mesh: Mesh  # Of the axis `data` over the group's ranks.

    @property
    def num_groups(self) -> int:
        """Number of groups."""
        return len(self.processes)

    @property
    def leads(self) -> tuple[int, ...]:
        """The first process of each group, which exchanges its updates."""
        return tuple(processes[0] for processes in self.processes)

    @property
    def is_lead(self) -> bool:
        """Whether this process exchanges the updates of its group."""
        return jax.process_index() == self.leads[self.index]

    @property
    def is_one_process(self) -> bool:
        """Whether the group is this process alone."""
        return len(self.processes[self.index]) == 1


def join_group(groups: Any, mesh: Mesh) -> Group:
    """Returns the group of this process among all on a mesh; all processes must call it.

    Groups are of neighbouring processes and equally many ranks; else all raise a ValueError.
    """
    hosts = collectives.agree(_CALL, {"groups": groups}, note=machine_id("net"))
    # What follows is equal on all processes, which raise errors together.
    processes = _processes(groups, hosts)
    _check_ranks(processes, [device.process_index for device in mesh.devices.flat])
    if groups == "host" and len(processes) == 1 < len(hosts):
        logger.warning(
            "All processes run on one host, so that LocalSteps has one group, and no outer "
            "updates. Pass groups='process' for a group of each process."
        )
    own = jax.process_index()
    index = next(number for number, members in enumerate(processes) if own in members)
    devices = [device for device in mesh.devices.flat if device.process_index in processes[index]]
    return Group(index, processes, _jax.make_data_mesh(devices))


def _processes(groups: Any, hosts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Returns the processes of each group, given the host of each process."""
    everybody = range(len(hosts))
    if groups == "process":
        return tuple((process,) for process in everybody)
    if groups == "host":
        found = [tuple(run) for _, run in groupby(everybody, key=lambda process: hosts[process])]
        if len(found) > len(set(hosts)):
            raise ValueError(
                "groups='host' needs the processes of a host to have neighbouring numbers, but "
                "they alternate. Number them host by host, or pass groups='process'."
            )
        return tuple(found)
    try:
        found = [tuple(sorted(int(process) for process in members)) for members in groups]
    except (TypeError, ValueError):
        found = []
    if sorted(process for members in found for process in members) != [*everybody]:
        raise ValueError(
            "groups must be 'host', 'process' or lists of process numbers that name each of the "
            f"{len(hosts)} processes once, but is {groups!r}."
        )
    found.sort()
    if [process for members in found for process in members] != [*everybody]:
        raise ValueError(
            f"The processes of a group must have neighbouring numbers, but groups is {groups!r}: "
            "a group trains on neighbouring rows of a batch."
        )
    return tuple(found)


def _check_ranks(processes: Sequence[Sequence[int]], owners: Sequence[int]) -> None:
    counts = [sum(owner in members for owner in owners) for members in processes]
    if len(set(counts)) > 1:
        raise ValueError(
            f"Groups of LocalSteps need equally many ranks, as each has an equal part of a batch, "
            f"but have {counts}. Use as many devices on each host, or pass groups=."
        )
