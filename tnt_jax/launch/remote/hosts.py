"""The hosts of a job: from a file, a SLURM allocation, or reserved on a Ray cluster by a broker."""

import json
import logging
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tnt_jax.cluster.clusters import expand_nodes
from tnt_jax.launch.planning.options import Options
from tnt_jax.launch.remote.connection import program, supervisor_command
from tnt_jax.launch.remote.screen import say
from tnt_jax.launch.remote.session import HostError
from tnt_jax.on_ray.broker import Wish

LOCALHOST = "localhost"
_logger = logging.getLogger("tnt_jax.launch")
_NAME = re.compile(r"[A-Za-z0-9_\[][\w.:@\]\[-]*")
# Ray takes seconds to end a driver with its actors.
_END_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class HostEntry:
    """A line of a hostfile."""

    name: str  # As passed to ssh: a host, an address, an alias of its configuration, user@host.
    slots: int | None = None  # Devices to use there; None if the command line decides.
    through: str = "ssh"  # What starts processes there: "ssh", "srun" or "ray".
    command: tuple[str, ...] = ()  # With "ray": what connects to the supervisor there.

    @property
    def is_local(self) -> bool:
        """Whether this is the launcher's own host, which needs no network."""
        if self.through == "ray":
            return False
        own = socket.gethostname()
        # SLURM and many hostfiles leave out the domain.
        return self.name in (LOCALHOST, own, own.partition(".")[0], socket.getfqdn())


def read_hostfile(path: str) -> list[HostEntry]:
    """Returns the hosts that a file lists; see `parse_hostfile`."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"The hostfile {path} cannot be read: {error}") from error
    return parse_hostfile(text, source=path)


def allocated_hosts(environ: Mapping[str, str]) -> list[HostEntry]:
    """Returns the nodes of the SLURM allocation of a batch script or of `salloc`; else none."""
    nodes = environ.get("SLURM_JOB_NODELIST")
    return [HostEntry(name, through="srun") for name in expand_nodes(nodes)] if nodes else []


def parse_hostfile(text: str, *, source: str = "hostfile") -> list[HostEntry]:
    r"""Returns the hosts in a hostfile's text, one per line: `NAME` or `NAME slots=N`.

    `#` starts a comment. Blank lines are ignored. A repeated host is left out, unless the lines
    disagree about its slots. `source` is the name of the file in messages.

    Example:
        >>> hosts = parse_hostfile("node1 slots=4  # the fast one\n\nnode2\nnode2")
        >>> [(host.name, host.slots) for host in hosts]
        [('node1', 4), ('node2', None)]
    """
    hosts: dict[str, HostEntry] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        entry = _parse_line(words, f"{source}, line {number}")
        if entry.name in hosts:
            if hosts[entry.name] != entry:
                raise ValueError(
                    f"{source}, line {number}: {entry.name} is already listed with another number "
                    "of slots."
                )
            _logger.debug("%s, line %d: %s is already listed.", source, number, entry.name)
        hosts[entry.name] = entry
    if not hosts:
        raise ValueError(
            f"{source} lists no host. Write one host name on each line, for instance: node1 slots=4"
        )
    return list(hosts.values())


def _parse_line(words: list[str], where: str) -> HostEntry:
    name, *rest = words
    # For safety: ssh would take a name that starts with a dash for an option.
    if not _NAME.fullmatch(name):
        raise ValueError(f"{where}: {name!r} is not a host name.")
    if not rest:
        return HostEntry(name)
    found = re.fullmatch(r"slots=(\d+)", "".join(rest))
    if found is None or int(found[1]) < 1:
        raise ValueError(
            f"{where}: after the host name only slots=N with N of at least 1 is allowed, but got "
            f"{' '.join(rest)!r}."
        )
    return HostEntry(name, int(found[1]))


class RayNodes:
    """Nodes of a Ray cluster, held for one attempt of a job at a time; `wait_s` limits the wait.

    Whatever ends this process, Ray frees what it holds and ends what runs there. Without
    `options.ray_devices` all nodes that are alive are used, without reserving them.
    """

    def __init__(self, options: Options, *, wait_s: float | None = None) -> None:
        self._options, self._wait_s = options, wait_s
        self._broker: subprocess.Popen[bytes] | None = None

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


def job_hosts(options: Options, environ: Mapping[str, str]) -> list[HostEntry]:
    """Returns the hosts of the hostfile, of the current SLURM allocation, or this host."""
    if options.hostfile:
        return read_hostfile(options.hostfile)
    return (not options.this_host_only and allocated_hosts(environ)) or [HostEntry(LOCALHOST)]


@contextmanager
def taking_hosts(
    options: Options, environ: Mapping[str, str], *, wait_s: float | None = None
) -> Iterator[Callable[[], list[HostEntry]]]:
    """Yields what returns the hosts for an attempt: those of `job_hosts`, or `RayNodes`."""
    if options.ray_address is None:
        yield lambda: job_hosts(options, environ)
    else:
        nodes = RayNodes(options, wait_s=wait_s)
        try:
            yield nodes.take
        finally:
            nodes.free()
