"""The connections of XLA's sums between CPU processes, which are cut to end sums that wait.

XLA waits half an hour for a process that is alive but has left its sums. It offers no way to end
them, so the sockets between the processes are shut down: those that were accepted at a port where
this process has begun to listen as it opened its devices, and those to such a port of another one.
"""

import contextlib
import os
import socket
from collections.abc import Collection, Iterator
from typing import NamedTuple

_LISTENS = "0A"


class _Connection(NamedTuple):
    inode: str
    local_port: int
    remote_port: int
    listens: bool


def _connections() -> Iterator[_Connection]:
    """Yields the TCP sockets of this machine's network; see proc_net_tcp in the kernel's texts."""
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/self/net/{name}") as table:
            for line in table.readlines()[1:]:
                fields = line.split()
                local, remote = (int(text.rpartition(":")[2], 16) for text in fields[1:3])
                yield _Connection(fields[9], local, remote, fields[3] == _LISTENS)


def _descriptors() -> dict[str, int]:
    """Returns the descriptors of this process's sockets, by inode."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith("socket:["):
                found[target[8:-1]] = int(name)
    return found


def listening_ports() -> set[int]:
    """Returns the ports on which this process listens."""
    own = _descriptors()
    return {item.local_port for item in _connections() if item.listens and item.inode in own}


def cut(own_ports: Collection[int], ports_of_others: Collection[int]) -> None:
    """Shuts down the connections that came to own ports, and those to ports of others."""
    descriptors = _descriptors()
    for item in _connections():
        is_between = item.local_port in own_ports or item.remote_port in ports_of_others
        if item.listens or not is_between or item.inode not in descriptors:
            continue
        # It may have been closed meanwhile, and its number may belong to another file.
        with contextlib.suppress(OSError):
            copy = os.dup(descriptors[item.inode])
            try:
                if os.readlink(f"/proc/self/fd/{copy}") == f"socket:[{item.inode}]":
                    with socket.socket(fileno=os.dup(copy)) as connection:
                        connection.shutdown(socket.SHUT_RDWR)
            finally:
                os.close(copy)
