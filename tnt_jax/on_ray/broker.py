"""Holds the nodes of a Ray cluster for a job of the launcher, and connects the launcher to them.

It runs as a program of its own, a driver of Ray, because Ray takes signals, threads and memory that
the launcher needs for itself. It prints the nodes as one line of JSON, then serves a socket to
which a `relay` connects for each node, until its standard input closes, as it does when the
launcher is killed. Everything that it has made on the cluster, Ray removes when it ends, by
whatever cause: a placement group with a bundle for each process, and an actor for each node.
"""

import itertools
import json
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from tnt_jax.on_ray import node
from tnt_jax.on_ray.bundles import Reservation, reserve, reserve_every_node
from tnt_jax.on_ray.relay import HEADER
from tnt_jax.on_ray.require import import_ray

_CONNECT_TIMEOUT_S, _INIT_TIMEOUT_S, _LOOK_EVERY_S = 5.0, 60.0, 5.0


@dataclass(frozen=True)
class Wish:
    """Request of the launcher: a command to run on each node of the cluster at an address.

    Attributes:
        num_processes: Bundles; None for each node that is alive, without a reservation.
        fewest: Bundles that are enough if there are no more; None for all of them.
        use_gpus: Whether each bundle has a GPU, if the cluster has them.
    """

    address: str
    command: Sequence[str]
    num_processes: int | None
    fewest: int | None
    use_gpus: bool


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
        held, doors = _hold(ray, wish, lambda text: _answer(answers, waits=text))
    except BaseException as error:  # The launcher tells its user, whatever it is.
        give_up(f"{error}".strip() or type(error).__name__)
    server = socket.socket(socket.AF_UNIX)
    server.bind(path := f"{folder}/relays")
    server.listen(len(doors))
    threading.Thread(target=_serve, args=(ray, server, doors), daemon=True).start()
    _answer(answers, nodes=[asdict(each) for each in held.nodes], socket_path=path)


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
    """Ends this process with the launcher, or when that frees the nodes.

    Ray then removes what belongs to this driver.
    """
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


def _hold(ray: Any, wish: Wish, tell: Callable[[str], None]) -> tuple[Reservation, list["_Door"]]:
    """Reserves nodes, anew if one is lost before it can be used."""
    while True:
        held = _reserve(ray, wish, tell)
        doors = open_doors(ray, held, wish.command)
        if doors is not None:
            return held, doors


def _reserve(ray: Any, wish: Wish, tell: Callable[[str], None]) -> Reservation:
    if wish.num_processes is None:
        return reserve_every_node(ray)
    return reserve(ray, wish.num_processes, fewest=wish.fewest, use_gpus=wish.use_gpus, tell=tell)


@dataclass(frozen=True)
class _Door:
    """A node, as the launcher enters it: its actor, and a command with variables of its own."""

    actor: Any
    command: Sequence[str]
    variables: dict[str, str]


def open_doors(ray: Any, held: Reservation, command: Sequence[str]) -> list[_Door] | None:
    """Makes the actors on each node, and waits until they are there.

    Returns None, with nothing reserved any more, if a node was lost meanwhile: Ray would wait for
    room for what it held, without a word.
    """
    ray.cloudpickle.register_pickle_by_value(node)
    groups = {"input": 1, "output": 1, "errors": 1}
    kind = ray.remote(concurrency_groups=groups, max_restarts=0)(node.Program)
    actors = [[kind.options(**options).remote() for options in each] for each in held.actor_options]
    asked = [[actor.visible_gpus.remote() for actor in each] for each in actors]
    everyone = list(itertools.chain(*asked))
    while ray.wait(everyone, num_returns=len(everyone), timeout=_LOOK_EVERY_S)[1]:
        if held.has_lost_a_node(ray):
            held.release(ray)
            return None
    visible = [ray.get(each) for each in asked]
    # The GPUs of a node are given to as many actors as it has bundles. One of them uses them all;
    # the others must not be collected as garbage.
    held.keep.extend(actors)
    variables = [
        {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if held.has_gpus else {} for gpus in visible
    ]
    return [_Door(each[0], command, own) for each, own in zip(actors, variables, strict=True)]


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
        self._ray = ray
        self._peer = peer
        self._door = door
        self._actor = door.actor
        self._lock = threading.Lock()

    def run(self) -> None:
        """Runs the program, and carries its streams until it has ended or the node is lost."""
        try:
            code = self._run()
        except Exception as error:  # The launcher tells its user, whatever it is.
            self._send(b"e", f"Ray cannot use the node, or has lost it: {_gist(error)}\n".encode())
            code = 1
        self._send(b"x", str(code).encode())

    def _run(self) -> int:
        door = self._door
        start = self._ray.get(self._actor.start.remote(list(door.command), door.variables))
        threading.Thread(target=self._carry_input, args=(start,), daemon=True).start()
        errors = threading.Thread(
            target=self._carry, args=(b"e", "read_errors", "errors"), daemon=True
        )
        errors.start()
        self._carry(b"o", "read_output", "output")
        errors.join()
        return self._ray.get(self._actor.wait.remote())

    def _carry_input(self, start: int) -> None:
        while True:
            try:
                data = self._peer.recv(1 << 16)
            except ConnectionError:
                data = b""
            try:
                write = self._actor.write.options(concurrency_group="input")
                self._ray.get(write.remote(start, data))
            except self._ray.exceptions.RayError:
                return  # The other threads see it, too.
            if not data:
                return

    def _carry(self, kind: bytes, method: str, group: str) -> None:
        while True:
            try:
                read = getattr(self._actor, method).options(concurrency_group=group)
                data = self._ray.get(read.remote())
            except self._ray.exceptions.RayError:
                return
            if not data:
                return
            self._send(kind, data)

    def _send(self, kind: bytes, data: bytes) -> None:
        with self._lock:
            try:
                self._peer.sendall(HEADER.pack(kind, len(data)) + data)
            except OSError:
                return  # The launcher has gone.


def _gist(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


if __name__ == "__main__":
    main()
