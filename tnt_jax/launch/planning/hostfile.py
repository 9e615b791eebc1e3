"""The hosts of a job, from a file or a SLURM allocation."""

import logging
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tnt_jax.cluster.clusters import expand_nodes

LOCALHOST = "localhost"
_logger = logging.getLogger("tnt_jax.launch")
_NAME = re.compile(r"[A-Za-z0-9_\[][\w.:@\]\[-]*")


@dataclass(frozen=True)
class HostEntry:
    """A line of a hostfile.

    Attributes:
        name: The name passed to ssh: a host, an address, an alias of its configuration, user@host.
        slots: Devices to use there; None if the command line decides.
        through: What starts processes there: "ssh", "srun" or "ray".
        command: With "ray", the words of the command that connects to the supervisor there.
    """

    name: str
    slots: int | None = None
    through: str = "ssh"
    command: tuple[str, ...] = ()

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
