"""Connects each process of a job to the next one, for the sums of `ring.py`."""

import secrets
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

_RETRY_S = 0.05
_GREETING_S = 10  # In which whoever has connected must have said the secret.
_SECRET_BYTES = 16


class Door(NamedTuple):
    """Where a process lets its neighbour in.

    Attributes:
        host: Address under which the other processes reach it.
        port: Port at which it listens.
        secret: Hexadecimal; what the neighbour must say, as anybody may connect to a port.
    """

    host: str
    port: int
    secret: str


def open_door(host: str) -> tuple[socket.socket, Door]:
    """Returns a listening socket, and what the neighbour must know of it.

    Args:
        host: Address under which the other processes reach this one.
    """
    listener = socket.create_server(("", 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    return listener, Door(host, listener.getsockname()[1], secrets.token_hex(_SECRET_BYTES))


def connect_neighbours(
    process: int, doors: Sequence[Door], *, listener: socket.socket, timeout_s: float
) -> tuple[socket.socket, socket.socket]:
    """Returns connections to the process after this one and from the one before; every process must call it.

    Args:
        process: Number of this process.
        doors: Door of each process.
        listener: The socket behind this process's door; it is closed.
        timeout_s: Seconds to wait for the neighbours.

    Raises:
        TimeoutError: If a neighbour is not there in time.
    """
    deadline = time.monotonic() + timeout_s
    to_next = _dial(doors[(process + 1) % len(doors)], deadline)
    with listener:
        while time.monotonic() < deadline:
            from_previous = _admit(listener, doors[process].secret, deadline)
            if from_previous is not None:
                return to_next, from_previous
    raise TimeoutError(
        f"Process {process} waited {timeout_s:g} s for process {(process - 1) % len(doors)} to connect to its port "
        f"{doors[process].port}. Check that it was started and that this host's ports can be reached from it."
    )


def _admit(listener: socket.socket, secret: str, deadline: float) -> socket.socket | None:
    """Returns the connection of who comes next, None if nobody does or it is a stranger."""
    listener.settimeout(max(deadline - time.monotonic(), _RETRY_S))
    try:
        visitor = listener.accept()[0]
    except TimeoutError:
        return None
    visitor.settimeout(_GREETING_S)
    expected = bytes.fromhex(secret)
    try:
        said = visitor.recv(len(expected), socket.MSG_WAITALL)
    except OSError:
        said = b""
    if not secrets.compare_digest(said, expected):
        visitor.close()
        return None
    visitor.settimeout(None)
    return visitor


def _dial(door: Door, deadline: float) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection(door[:2], timeout=max(deadline - time.monotonic(), _RETRY_S))
            connection.settimeout(None)
            connection.sendall(bytes.fromhex(door.secret))
            return connection
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"No process answers at {door.host}:{door.port}: {error}. Check that it was started."
                ) from error
            time.sleep(_RETRY_S)
