"""The nodes of a Ray cluster as hosts of a job: reserved by a broker, reached through it."""

import json
import signal
import subprocess
import threading
from dataclasses import asdict
from typing import Any

from tnt_jax.launch.planning.hostfile import HostEntry
from tnt_jax.launch.planning.options import Options
from tnt_jax.launch.remote.connection import program, supervisor_command
from tnt_jax.launch.remote.screen import say
from tnt_jax.launch.remote.session import HostError
from tnt_jax.on_ray.broker import Wish

# Ray takes seconds to end a driver with its actors.
_END_TIMEOUT_S = 20.0


class RayNodes:
    """Nodes of a Ray cluster, held for one attempt of a job at a time.

    Whatever ends this process, Ray frees what it holds and ends what runs there. Without
    `options.ray_devices` all nodes that are alive are used, without reserving them; `wait_s` limits
    the wait for room.
    """

    def __init__(self, options: Options, *, wait_s: float | None = None) -> None:
        self._options = options
        self._wait_s = wait_s
        self._broker: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "RayNodes":
        return self

    def __exit__(self, *_: object) -> None:
        self.free()

    def take(self) -> list[HostEntry]:
        """Frees the nodes of the attempt before, waits for room, and returns those for another."""
        self.free()
        options = self._options
        assert options.ray_address is not None
        wish = Wish(
            address=options.ray_address,
            command=supervisor_command(),
            num_processes=options.ray_devices,
            fewest=options.min_devices,
            use_gpus=options.use_gpus,
        )
        self._broker = subprocess.Popen(
            program("tnt_jax.on_ray.broker", json.dumps(asdict(wish))),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        limit = threading.Timer(self._wait_s or 0, self._broker.kill)
        if self._wait_s is not None:
            limit.start()
        try:
            answer = self._await_nodes(self._broker)
        finally:
            limit.cancel()
        return [
            HostEntry(
                node["name"],
                None if options.ray_devices is None else node["slots"],
                through="ray",
                command=tuple(program("tnt_jax.on_ray.relay", answer["socket_path"], str(number))),
            )
            for number, node in enumerate(answer["nodes"])
        ]

    def free(self) -> None:
        """Frees the nodes, and ends what still runs there."""
        if self._broker is None:
            return
        broker, self._broker = self._broker, None
        for stream in (broker.stdin, broker.stdout):
            assert stream is not None
            stream.close()
        try:
            broker.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            broker.kill()
            broker.wait()

    def _await_nodes(self, broker: subprocess.Popen[bytes]) -> dict[str, Any]:
        assert broker.stdout is not None
        waits = None
        for line in broker.stdout:
            answer = json.loads(line)
            if "nodes" in answer:
                return answer
            if "error" in answer:
                raise HostError({"Ray": answer["error"]})
            waits = answer["waits"]
            say(f"Waiting for {waits}.")
        code = broker.wait()
        if self._wait_s is not None and waits and code == -signal.SIGKILL:
            raise HostError({"Ray": f"the wait of {self._wait_s:g} s was in vain, for {waits}."})
        raise HostError({"Ray": f"its driver ended with code {code}."})
