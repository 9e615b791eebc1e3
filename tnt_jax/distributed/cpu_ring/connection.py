"""Connects each process of a job to the next one, for the sums of `ring.py`."""

import secrets
import selectors
import socket
import time
from collections.abc import Sequence
from typing import NamedTuple

from tnt_jax.job import sign

_RETRY_S = 0.05
_GREETING_S = 10  # The time in which a connected peer must send the greeting.
_TOKEN_BYTES = 16
_BACKLOG = 1024  # Peers that may wait until this process accepts them.
_MOST_PEERS = 256  # Open at once without a greeting; beyond that the oldest is closed.


class Endpoint(NamedTuple):
    """The address at which a process accepts the connection of its neighbour.

    Attributes:
        host: Address under which the other processes reach it.
        port: Port at which it listens.
        token: Random digits. The neighbour must send their signature, because anyone can connect to
            a port.
    """

    host: str
    port: int
    token: str

    def greeting(self) -> bytes:
        """Returns what the neighbour must send."""
        return sign("The greeting of the ring", self.token.encode())


def open_endpoint(host: str) -> tuple[socket.socket, Endpoint]:
    """Returns a socket that listens at one address of this host, and its endpoint.

    Args:
        host: Address under which the other processes reach this one.

    Raises:
        OSError: If no address of this host is the given one.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OSError(
            f"Cannot listen at {host}, the address of this machine's own name: {error}. Give the "
            "host name its network address in /etc/hosts or in DNS."
        ) from error
    return listener, Endpoint(host, listener.getsockname()[1], secrets.token_hex(_TOKEN_BYTES))


def connect_neighbours(
    process: int, endpoints: Sequence[Endpoint], *, listener: socket.socket, timeout_s: float
) -> tuple[socket.socket, socket.socket]:
    """Returns the connections to the next and from the previous process; all must call it.

    Args:
        process: Number of this process.
        endpoints: Endpoint of each process.
        listener: The socket that listens at this process's endpoint; it is closed.
        timeout_s: Seconds to wait for the neighbours.

    Raises:
        TimeoutError: If a neighbour does not connect in time.
    """
    deadline = time.monotonic() + timeout_s
    with listener:
        to_next = _dial(endpoints[(process + 1) % len(endpoints)], deadline)
        from_previous, num_rejected = _admit(listener, endpoints[process].greeting(), deadline)
    if from_previous is not None:
        return to_next, from_previous
    to_next.close()
    rejected = f" {num_rejected} connection(s) came from elsewhere." if num_rejected else ""
    raise TimeoutError(
        f"Process {process} waited {timeout_s:g} s for process {(process - 1) % len(endpoints)} to "
        f"connect to its port {endpoints[process].port}. Check that it was started and that this "
        f"host's ports can be reached from it.{rejected}"
    )


class _Peer:
    """An accepted connection, and the part of the greeting that it has sent so far.

    Attributes:
        connection: The connection; reading does not wait.
        deadline: When it is closed unless the greeting has come.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.connection = connection
        self.deadline = time.monotonic() + _GREETING_S
        self._received = b""

    def listen(self, greeting: bytes) -> bool | None:
        """Returns whether the peer sent the greeting, or None if it is incomplete."""
        try:
            # Not more than the greeting: the rest belongs to the ring.
            received = self.connection.recv(len(greeting) - len(self._received))
        except BlockingIOError:
            return None
        except OSError:
            return False
        self._received += received
        if received and len(self._received) < len(greeting):
            return None
        return secrets.compare_digest(self._received, greeting)


def _admit(
    listener: socket.socket, greeting: bytes, deadline: float
) -> tuple[socket.socket | None, int]:
    """Returns the connection of the first peer that sends the greeting, and the number of others.

    All peers are read at once, so that silent ones keep nobody out. The connection is None if no
    greeting comes in time.
    """
    peers: list[_Peer] = []
    num_rejected = 0
    listener.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)

        def dismiss(peer: _Peer) -> None:
            selector.unregister(peer.connection)
            peers.remove(peer)
            peer.connection.close()

        try:
            while (now := time.monotonic()) < deadline:
                next_s = min([peer.deadline for peer in peers], default=deadline)
                for key, _ in selector.select(max(min(next_s, deadline) - now, 0)):
                    if key.data is None:
                        peer = _accept(listener)
                        if peer is not None:
                            peers.append(peer)
                            selector.register(peer.connection, selectors.EVENT_READ, peer)
                    elif (is_right := key.data.listen(greeting)) is not None:
                        if is_right:
                            peers.remove(key.data)
                            key.data.connection.setblocking(True)
                            return key.data.connection, num_rejected + len(peers)
                        dismiss(key.data)
                        num_rejected += 1
                late = [peer for peer in peers if peer.deadline <= time.monotonic()]
                for peer in late or peers[: max(len(peers) - _MOST_PEERS, 0)]:
                    dismiss(peer)
                    num_rejected += 1
        finally:
            for peer in peers:
                peer.connection.close()
    return None, num_rejected + len(peers)


def _accept(listener: socket.socket) -> _Peer | None:
    """Returns a peer, or None if it has disconnected."""
    try:
        return _Peer(listener.accept()[0])
    except (BlockingIOError, ConnectionAbortedError):
        return None


def _dial(endpoint: Endpoint, deadline: float) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection(
                endpoint[:2], timeout=max(deadline - time.monotonic(), _RETRY_S)
            )
            connection.settimeout(None)
            connection.sendall(endpoint.greeting())
            return connection
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"No process answers at {endpoint.host}:{endpoint.port}: {error}. Check that "
                    "it was started."
                ) from error
            time.sleep(_RETRY_S)
