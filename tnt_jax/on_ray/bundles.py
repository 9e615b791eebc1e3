"""Reserves nodes of a Ray cluster: a placement group with a bundle for each process."""

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

# Ray places a group within milliseconds if there is room; a cluster that grows takes minutes.
_TELL_AFTER_S, _TELL_EVERY_S = 5.0, 60.0
_LOOK_EVERY_S = 1.0
# Whoever starts on fewer nodes waits so long for more: what another job, or the attempt before, has
# just left is free a little later.
_SETTLE_S = 10.0


@dataclass(frozen=True)
class Node:
    """A node of the cluster, with the number of processes to start there."""

    name: str
    slots: int


@dataclass(frozen=True)
class Reservation:
    """Resources that are reserved; without a placement group, none.

    Attributes:
        actor_options: For each node the options of the actors there, one of which runs a program.
        has_gpus: Whether each process has a GPU.
        keep: What must not be collected as garbage.
    """

    nodes: list[Node]
    actor_options: list[list[dict[str, Any]]]
    has_gpus: bool
    group: Any = None
    keep: list[Any] = field(default_factory=list)

    def has_lost_a_node(self, ray: Any) -> bool:
        """Returns whether a reserved node is lost, and Ray looks for another."""
        if self.group is None:
            return False
        return ray.util.placement_group_table(self.group)["state"] != "CREATED"

    def release(self, ray: Any) -> None:
        """Frees what is reserved."""
        self.keep.clear()
        if self.group is not None:
            ray.util.remove_placement_group(self.group)


def reserve(
    ray: Any, count: int, *, fewest: int | None, use_gpus: bool, tell: Callable[[str], None]
) -> Reservation:
    """Reserves a bundle for each process, on as few nodes as possible; waits until there is room.

    `fewest` processes are enough if there is no room for more; None for all. Each has a GPU, if
    that is wanted and the cluster has as many. `tell` is given a text if it takes long.
    """
    has_gpus = use_gpus and _total(ray, "GPU") >= (fewest or count)
    bundle = {"CPU": 1, "GPU": 1} if has_gpus else {"CPU": 1}
    while True:
        group = _await_group(ray, bundle, count, fewest or count, tell)
        places = ray.util.placement_group_table(group)["bundles_to_node_id"]
        names = _names(ray)
        if set(places.values()) <= set(names):
            break
        # A node has just been lost.
        ray.util.remove_placement_group(group)
    by_node: dict[str, list[int]] = {}
    for index in sorted(places, key=int):
        by_node.setdefault(places[index], []).append(int(index))
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy
    options = [
        [
            {
                "num_cpus": 1,
                "num_gpus": int(has_gpus),
                "scheduling_strategy": strategy(group, placement_group_bundle_index=index),
            }
            for index in (indices if has_gpus else indices[:1])
        ]
        for indices in by_node.values()
    ]
    nodes = [Node(names[key], len(indices)) for key, indices in by_node.items()]
    return Reservation(nodes, options, has_gpus, group)


def reserve_every_node(ray: Any) -> Reservation:
    """Returns all nodes that are alive, with an actor on each that takes no resources."""
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    names = _names(ray)
    options = [[{"num_cpus": 0, "scheduling_strategy": strategy(key, soft=False)}] for key in names]
    return Reservation([Node(name, 1) for name in names.values()], options, has_gpus=False)


def _await_group(
    ray: Any, bundle: dict[str, int], count: int, fewest: int, tell: Callable[[str], None]
) -> Any:
    """Returns a placement group of `count` bundles, or of fewer if these are enough."""
    began = told = time.monotonic()
    group, size, has_room_since = None, 0, began
    while True:
        if group is None:
            size = count if fewest == count else min(count, _room(ray, bundle))
            now = time.monotonic()
            has_room_since = now if size < fewest else has_room_since
            if size == count or (size >= fewest and now - has_room_since > _SETTLE_S):
                group = ray.util.placement_group([bundle] * size, strategy="PACK")
        if group is None:
            threading.Event().wait(_LOOK_EVERY_S)
        elif group.wait(_TELL_AFTER_S):
            return group
        elif fewest < count:
            # A node that Ray counted has gone, or others were faster.
            ray.util.remove_placement_group(group)
            group, has_room_since = None, time.monotonic()
        if time.monotonic() - told > (_TELL_AFTER_S if told == began else _TELL_EVERY_S):
            told = time.monotonic()
            tell(describe_lack(bundle, _room(ray, bundle), count, fewest))


def describe_lack(bundle: dict[str, int], room: int, count: int, fewest: int) -> str:
    """Returns what a job of `count` processes, or of `fewest` at least, waits for."""
    each = " and ".join(f"{amount} {name}" for name, amount in bundle.items())
    if room < fewest:
        return f"room for {_processes(fewest)} with {each}; there is room for {room}"
    if room < count:
        return (
            f"room for {_processes(count)} with {each}; there is room for {room}, which is used "
            f"after {_SETTLE_S:g} seconds if no more comes"
        )
    return (
        f"Ray to place {_processes(count)} with {each}; there is room for {room}, but a node that "
        "is lost counts until Ray notices"
    )


def _processes(count: int) -> str:
    return "one process" if count == 1 else f"{count} processes, each"


def _room(ray: Any, bundle: dict[str, int]) -> int:
    """Returns how many such bundles the nodes have room for."""
    free = ray._private.state.available_resources_per_node()
    return sum(
        int(min(resources.get(name, 0) // amount for name, amount in bundle.items()))
        for resources in free.values()
    )


def _total(ray: Any, resource: str) -> float:
    return ray.cluster_resources().get(resource, 0)


def _names(ray: Any) -> dict[str, str]:
    """Returns the name of each node that is alive, by its id."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    names: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for found in alive:
        name = found["NodeManagerHostname"]
        seen[name] += 1
        # Several nodes can share a machine.
        names[found["NodeID"]] = name if seen[name] == 1 else f"{name}#{seen[name]}"
    return names
