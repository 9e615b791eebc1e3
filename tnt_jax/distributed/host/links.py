"""Bytes that some processes of a job send one another beside their steps: over TCP, by threads.

A collective of XLA waits in the queue of a device, and steps that are started later wait for it.
No step waits for what these threads send and receive. Each message that a member posts goes to all
others, and all take messages in the same order.
"""

import contextlib
import queue
import secrets
import socket
import struct
from collections import Counter
from collections.abc import Callable, Sequence

import jax

from tnt_jax import _jax
from tnt_jax.distributed import elastic
from tnt_jax.distributed.joining.join import own_address
from tnt_jax.distributed.liveness import phases
from tnt_jax.distributed.liveness.rendezvous import read_key
from tnt_jax.distributed.liveness.threads import start_thread
from tnt_jax.job import Slot, check_signature, sign
from tnt_jax.log import logger

# How many links there were, by the processes that made them.
_numbers = Slot[Counter[tuple[int, ...]]](Counter)
_KEY = "tnt_jax/links"
_SIZE = struct.Struct("<Q")
_SENDER = struct.Struct("<I")
_SIGNATURE_BYTES = 32
# A member connects within that time once it knows the address; others may knock, too.
_GREETING_S, _CONNECT_S, _TICK_S = 5.0, 60.0, 1.0
Message = bytes | bytearray


class Links:
    """The connections of this process to other `members` of the job, which make theirs together.

    All say alike, for messages, `what` they exchange; `sent_bytes` counts what was sent to anyone.
    """

    def __init__(self, members: Sequence[int], what: str) -> None:
        self.sent_bytes = 0
        self._what, self._own = what, jax.process_index()
        self._came: dict[int, queue.SimpleQueue[Message | Exception]] = {
            member: queue.SimpleQueue() for member in members
        }
        self._to_send: queue.SimpleQueue[Callable[[], bytes] | None] = queue.SimpleQueue()
        self._sockets = _connected(members, what)
        lost = f"This process exchanges no {what} any more:"
        start_thread(self._send, name="links", lost=lost)
        for member in self._sockets:
            start_thread(self._receive, member, name=f"link-{member}", lost=lost)
        if (own := elastic.link()) is not None:
            own.when_ended(self._end_generation)

    def post(self, make: Callable[[], bytes]) -> None:
        """Sends what a function returns, which a thread calls, to the others; returns at once."""
        self._to_send.put(make)

    def take(self) -> list[Message]:
        """Waits for the oldest message of each member, this one included, that was not taken.

        Raises a ConnectionError if a member cannot send it any more, and Interrupted if the
        generation of an elastic job ends.
        """
        return [self._next(member) for member in self._came]

    def close(self) -> None:
        """Sends what was posted, and ends the connections once they have been read."""
        self._to_send.put(None)

    def _end_generation(self) -> None:
        """Ends what waits for members of an elastic job: some of them go on without the others."""
        for link in self._sockets.values():
            with contextlib.suppress(OSError):  # It has ended already.
                link.shutdown(socket.SHUT_RDWR)
        for came in self._came.values():
            came.put(elastic.Interrupted(f"The exchange of {self._what} has ended."))

    def _next(self, member: int) -> Message:
        with phases.waiting(f"{self._what} of process {member}"):
            while True:
                with contextlib.suppress(queue.Empty):
                    message = self._came[member].get(timeout=_TICK_S)
                    break
                if left_alone := phases.here().left_alone:
                    raise RuntimeError(f"{left_alone} It owes {self._what}.")
        if isinstance(message, Exception):
            elastic.raise_if_ended()
            raise ConnectionError(
                f"The {self._what} of process {member} cannot be exchanged ({message}): the "
                "connection has ended. Look at the output of that process."
            ) from message
        return message

    def _send(self) -> None:
        try:
            while (make := self._to_send.get()) is not None:
                message = make()
                for member, link in self._sockets.items():
                    try:
                        link.sendall(_SIZE.pack(len(message)))
                        link.sendall(message)
                        self.sent_bytes += _SIZE.size + len(message)
                    except OSError as error:
                        # `take` raises it, if anybody waits for that member.
                        self._came[member].put(error)
                self._came[self._own].put(message)
        except Exception as error:
            self._came[self._own].put(error)
            raise
        for link in self._sockets.values():
            with contextlib.suppress(OSError):  # The other end has gone.
                link.shutdown(socket.SHUT_WR)

    def _receive(self, member: int) -> None:
        link = self._sockets[member]
        try:
            while True:
                (size,) = _SIZE.unpack(_exactly(link, _SIZE.size))
                self._came[member].put(_exactly(link, size))
        except OSError as error:
            # Likewise.
            self._came[member].put(error)
            link.close()


def _exactly(link: socket.socket, size: int) -> bytearray:
    """Returns so many bytes; raises a ConnectionError if the connection ends before."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        received = link.recv_into(view)
        if not received:
            raise ConnectionError("it was closed")
        view = view[received:]
    return data


def _connected(members: Sequence[int], what: str) -> dict[int, socket.socket]:
    """Returns a connection to each of the other members; those with lower numbers listen."""
    process, together, numbers = jax.process_index(), tuple(members), _numbers.get()
    numbers[together] += 1
    folder = f"{_KEY}/{'-'.join(map(str, together))}/{numbers[together]}"
    address = own_address() or "127.0.0.1"
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    links = {}
    with (
        socket.create_server((address, 0), family=family) as server,
        contextlib.ExitStack() as unfinished,
    ):
        # Without it, who has seen one connection being made could make another.
        nonce = secrets.token_hex(16)
        entry = f"{address} {server.getsockname()[1]} {nonce}"
        _jax.coordination_client().key_value_set(f"{folder}/{process}", entry)
        for member in (member for member in members if member < process):
            entry = read_key(f"{folder}/{member}", what) or ""
            try:
                links[member] = _connect(entry, process, unfinished)
            except OSError as error:
                host, port, _ = entry.split(" ")
                raise ConnectionError(
                    f"Process {process} cannot connect to process {member} at {host} port {port} "
                    f"for {what} ({error}). Processes connect at any port: let the firewalls "
                    "between their hosts pass connections among them."
                ) from error
        later = {member for member in members if member > process}
        server.settimeout(_TICK_S)
        with phases.waiting(f"connections for {what}"):
            while later:
                elastic.raise_if_ended()
                if left_alone := phases.here().left_alone:
                    raise RuntimeError(f"{left_alone} It was to connect for {what}.")
                try:
                    member, link = _accepted(server, nonce, later)
                except TimeoutError:
                    continue
                except (OSError, RuntimeError) as error:
                    logger.warning(
                        "A connection for %s was refused: %s",
                        what,
                        error,
                        extra={"on_every_process": True},
                    )
                    continue
                links[member] = unfinished.enter_context(link)
                later.discard(member)
        unfinished.pop_all()
    for link in links.values():
        link.settimeout(None)
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return links


def _connect(entry: str, process: int, unfinished: contextlib.ExitStack) -> socket.socket:
    host, port, nonce = entry.split(" ")
    address = (host, int(port))
    link = unfinished.enter_context(socket.create_connection(address, timeout=_CONNECT_S))
    sender = _SENDER.pack(process)
    link.sendall(sender + sign(f"link {nonce}", sender))
    return link


def _accepted(server: socket.socket, nonce: str, expected: set[int]) -> tuple[int, socket.socket]:
    """Returns the next connection and whose it is; a RuntimeError says that nobody expects it."""
    link, _ = server.accept()
    try:
        link.settimeout(_GREETING_S)
        sender = _exactly(link, _SENDER.size)
        check_signature(f"link {nonce}", bytes(sender), bytes(_exactly(link, _SIGNATURE_BYTES)))
        (member,) = _SENDER.unpack(sender)
        if member not in expected:
            raise RuntimeError(f"process {member} is connected already")
    except BaseException:
        link.close()
        raise
    return member, link
