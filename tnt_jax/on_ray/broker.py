"""Holds the nodes of a Ray cluster for a job of the launcher, and connects the launcher to them.

It runs as a program of its own, a driver of Ray, because Ray takes signals, threads and memory that
the launcher needs for itself. It prints the nodes as one line of JSON, then serves a socket to
which a `relay` connects for each node, until its standard input closes, as it does when the
launcher is killed. Everything that it has made on the cluster, Ray removes when it ends, by
whatever cause: a placement group with a bundle for each process, and an actor for each node.
"""

import contextlib
import itertools
import json
import logging
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from tnt_jax.on_ray import node
from tnt_jax.on_ray.relay import HEADER
from tnt_jax.on_ray.worker import import_ray

_CONNECT_TIMEOUT_S, _INIT_TIMEOUT_S, _LOOK_EVERY_S = 5.0, 60.0, 5.0
# Ray places a group within milliseconds if there is room; a cluster that grows takes minutes.
_TELL_AFTER_S, _TELL_EVERY_S = 5.0, 60.0
_ROOM_EVERY_S = 1.0
# Whoever starts on fewer nodes waits so long for more: what another job, or the attempt before, has
# just left is free a little later.
_SETTLE_S = 10.0


@dataclass(frozen=True)
class Node:
    """A node of the cluster."""

    name: str
    actor_options: list[dict[str, Any]]  # Of each actor there, the first of which runs a program.
    bundles: list[int]  # Those of the placement group there, one for each process to start.


class Reservation(NamedTuple):
    """Resources that are reserved; without a placement group, none."""

    nodes: list[Node]
    group: Any = None


def reserve(
    ray: Any, count: int, *, fewest: int | None, use_gpus: bool, tell: Callable[[str], None]
) -> Reservation:
    """Reserves a bundle for each process, on as few nodes as possible; waits until there is room.

    `fewest` processes are enough if there is no room for more; None for all. Each has a GPU, if
    that is wanted and the cluster has as many. `tell` is given a text if it takes long.
    """
    has_gpus = use_gpus and ray.cluster_resources().get("GPU", 0) >= (fewest or count)
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
    nodes = []
    for key, indices in by_node.items():
        placed = [
            strategy(group, placement_group_bundle_index=index)
            for index in (indices if has_gpus else indices[:1])
        ]
        resources = {"num_cpus": 1, "num_gpus": int(has_gpus)}
        options = [{**resources, "scheduling_strategy": each} for each in placed]
        nodes.append(Node(names[key], options, indices))
    return Reservation(nodes, group)


def reserve_every_node(ray: Any) -> Reservation:
    """Returns all nodes that are alive, with an actor on each that takes no resources."""
    strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    return Reservation(
        [
            Node(name, [{"num_cpus": 0, "scheduling_strategy": strategy(key, soft=False)}], [])
            for key, name in _names(ray).items()
        ]
    )


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
            threading.Event().wait(_ROOM_EVERY_S)
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
    free = ray._private.state.available_resources_per_node()
    return sum(
        int(min(resources.get(name, 0) // amount for name, amount in bundle.items()))
        for resources in free.values()
    )


def _names(ray: Any) -> dict[str, str]:
    names: dict[str, str] = {}
    seen: Counter[str] = Counter()
    for found in (each for each in ray.nodes() if each["Alive"]):
        name = found["NodeManagerHostname"]
        seen[name] += 1
        # Several nodes can share a machine.
        names[found["NodeID"]] = name if seen[name] == 1 else f"{name}#{seen[name]}"
    return names


@dataclass(frozen=True)
class Wish:
    """Request of the launcher: a command to run on each node of the cluster at an address."""

    address: str
    command: Sequence[str]
    num_processes: int | None  # Bundles; None for each node that is alive, without a reservation.
    fewest: int | None  # Bundles that are enough if there are no more; None for all of them.
    use_gpus: bool  # Whether each bundle has a GPU, if the cluster has them.


def main() -> None:
    """Serves the launcher, whose wish is the argument, in JSON."""
    wish = Wish(**json.loads(sys.argv[1]))
    # The path of a socket must be shorter than 108 characters.
    folder = tempfile.mkdtemp(prefix="tnt-ray-", dir="/tmp")
    # The last thread of this process, once the nodes are told.
    threading.Thread(target=_end_with_launcher, args=(folder,)).start()
    # What libraries print must not mix with the answer.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def give_up(text: str) -> NoReturn:
        _answer(answers, error=text)
        _end(folder, 1)

    try:
        ray = import_ray("tnt-jax --ray")
        connect(ray, wish.address, give_up)
        # `ray job stop` sends it to all processes of a job; the launcher, which gets it too, gives
        # the ranks time to save their state, and then ends this process.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        doors = _hold(ray, wish, lambda text: _answer(answers, waits=text))
    except BaseException as error:  # The launcher tells its user, whatever it is.
        give_up(f"{error}".strip() or type(error).__name__)
    server = socket.socket(socket.AF_UNIX)
    server.bind(path := f"{folder}/relays")
    server.listen(len(doors))
    threading.Thread(target=_serve, args=(ray, server, doors), daemon=True).start()
    nodes = [{"name": door.node.name, "slots": max(1, len(door.node.bundles))} for door in doors]
    _answer(answers, nodes=nodes, socket_path=path)


def connect(ray: Any, address: str, give_up: Callable[[str], NoReturn]) -> None:
    """Connects to the cluster; raises, or gives up with a text, if there is none."""
    host, _, port = address.rpartition(":")
    missing = (
        f"No Ray cluster answers at {address}. Start one with ray start --head, or name another "
        "with --ray-address."
    )
    # Ray itself tries for minutes.
    if host and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_TIMEOUT_S).close()
        except OSError as error:
            raise ConnectionError(f"{missing} ({error})") from error
    timer = threading.Timer(_INIT_TIMEOUT_S, give_up, [missing])
    timer.start()
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except ConnectionError as error:
        # Ray says why in the cause: a traceback whose last line is the advice, as about tokens.
        why = f"{error.__cause__ or error}".strip().splitlines()[-1]
        raise ConnectionError(f"Cannot connect to the Ray cluster at {address}: {why}") from error
    finally:
        timer.cancel()


def _end_with_launcher(folder: str) -> None:
    """Ends this process with the launcher, or when that frees the nodes."""
    while os.read(0, 1 << 12):
        continue
    _end(folder, 0)


def _end(folder: str, code: int) -> NoReturn:
    """Ends this process, whatever its other threads do, and leaves no socket behind."""
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(code)


def _answer(answers: Any, **fields: Any) -> None:
    answers.write(json.dumps(fields) + "\n")
    answers.flush()


def _hold(ray: Any, wish: Wish, tell: Callable[[str], None]) -> list["_Door"]:
    """Reserves nodes, anew if one is lost before it can be used."""
    count, fewest, use_gpus = wish.num_processes, wish.fewest, wish.use_gpus
    while True:
        if count is None:
            held = reserve_every_node(ray)
        else:
            held = reserve(ray, count, fewest=fewest, use_gpus=use_gpus, tell=tell)
        doors = open_doors(ray, held, wish.command)
        if doors is not None:
            return doors


class _Door:
    """A node, as the launcher enters it: its actors, and the command that they run there.

    The GPUs of a node are given to as many actors as it has bundles. The first uses them all; the
    others must not be collected as garbage.
    """

    def __init__(
        self, ray: Any, kind: Any, command: Sequence[str], place: Node, group: Any
    ) -> None:
        self._ray, self._kind, self._command = ray, kind, list(command)
        self.node, self._group = place, group
        self._actors = self._made()
        self._turn = threading.Lock()

    def ask_gpus(self) -> list[Any]:
        """Asks each actor, once it is there, for its GPUs."""
        return [actor.visible_gpus.remote() for actor in self._actors]

    def start(self, is_wanted: Callable[[], bool]) -> tuple[Any, int] | None:
        """Starts the command; returns the actor that runs it, and the number of the start.

        If the node has been lost, that waits until Ray has put its bundles on another one. Returns
        None if it `is_wanted` no longer.
        """
        with self._turn:
            try:
                gpus = self._ray.get(self.ask_gpus())
            except self._ray.exceptions.RayActorError:
                self._actors = self._made()
                gpus = self._ray.get(self.ask_gpus())
            self._check_together()
            if not is_wanted():
                return None
            first = self._actors[0]
            visible = ",".join(filter(None, gpus))
            variables = {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
            return first, self._ray.get(first.start.remote(self._command, variables))

    def _made(self) -> list[Any]:
        return [self._kind.options(**each).remote() for each in self.node.actor_options]

    def _check_together(self) -> None:
        """Raises a RuntimeError if Ray has spread the bundles of the node that was lost."""
        if len(self.node.bundles) > 1:
            places = self._ray.util.placement_group_table(self._group)["bundles_to_node_id"]
            where = {node for bundle, node in places.items() if int(bundle) in self.node.bundles}
            if len(where) > 1:
                raise RuntimeError("Ray has put its processes on several nodes")


def open_doors(ray: Any, held: Reservation, command: Sequence[str]) -> list[_Door] | None:
    """Makes the actors on each node, and waits until they are there.

    Returns None, with nothing reserved any more, if a node was lost meanwhile: Ray would wait for
    room for what it held, without a word.
    """
    ray.cloudpickle.register_pickle_by_value(node)
    groups = {"input": 1, "output": 1, "errors": 1}
    kind = ray.remote(concurrency_groups=groups, max_restarts=0)(node.Program)
    doors = [_Door(ray, kind, command, each, held.group) for each in held.nodes]
    everyone = list(itertools.chain(*(door.ask_gpus() for door in doors)))
    while ray.wait(everyone, num_returns=len(everyone), timeout=_LOOK_EVERY_S)[1]:
        group = held.group
        if group is not None and ray.util.placement_group_table(group)["state"] != "CREATED":
            ray.util.remove_placement_group(group)
            return None
    return doors


def _serve(ray: Any, server: socket.socket, doors: Sequence[_Door]) -> None:
    while True:
        peer, _ = server.accept()
        number = b""
        while not number.endswith(b"\n"):
            number += peer.recv(1)
        channel = _Channel(ray, peer, doors[int(number)])
        threading.Thread(target=channel.run, daemon=True).start()


class _Channel:
    """Carries the three streams of the program on one node."""

    def __init__(self, ray: Any, peer: socket.socket, door: _Door) -> None:
        self._ray, self._peer, self._door = ray, peer, door
        self._actor: Any = None
        self._lock = threading.Lock()

    def run(self) -> None:
        try:
            code = self._run()
        except Exception as error:  # The launcher tells its user, whatever it is.
            gist = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self._send(b"e", f"Ray cannot use the node, or has lost it: {gist}\n".encode())
            code = 1
        self._send(b"x", str(code).encode())

    def _run(self) -> int:
        started = self._door.start(self._is_open)
        if started is None:
            return 1
        self._actor, start = started
        threading.Thread(target=self._carry_input, args=(start,), daemon=True).start()
        errors = threading.Thread(target=self._carry, args=(b"e", start, "errors"), daemon=True)
        errors.start()
        self._carry(b"o", start, "output")
        errors.join()
        return self._ray.get(self._actor.wait.remote(start))

    def _is_open(self) -> bool:
        """Returns whether the launcher still waits for the node."""
        ends = select.poll()
        ends.register(self._peer, select.POLLRDHUP)
        return not ends.poll(0)

    def _carry_input(self, start: int) -> None:
        write = self._actor.write.options(concurrency_group="input")
        with contextlib.suppress(self._ray.exceptions.RayError):  # The other threads see it, too.
            while True:
                try:
                    data = self._peer.recv(1 << 16)
                except ConnectionError:
                    data = b""
                self._ray.get(write.remote(start, data))
                if not data:
                    return

    def _carry(self, kind: bytes, start: int, stream: str) -> None:
        read = self._actor.read.options(concurrency_group=stream)
        with contextlib.suppress(self._ray.exceptions.RayError):
            while data := self._ray.get(read.remote(start, stream)):
                self._send(kind, data)

    def _send(self, kind: bytes, data: bytes) -> None:
        with self._lock, contextlib.suppress(OSError):  # The launcher has gone.
            self._peer.sendall(HEADER.pack(kind, len(data)) + data)


if __name__ == "__main__":
    main()
