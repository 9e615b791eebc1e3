"""Sums arrays over processes by TCP connections of their own, while the processor goes on computing.

XLA's collectives on CPUs stop the program until they are done. A ring sums in threads, so that the gradients of late layers travel
while those of early layers are computed:

    ring = Ring.connect(process, addresses)
    ticket = ring.start(gradient)       # returns at once
    ...
    total = ring.wait(ticket)

Every process must start the same arrays in the same order. Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002: each process
sends 2 (n - 1) / n times the bytes of an array, which is the least possible. Arrays travel in pieces, each a small ring sum, and a
piece says what it belongs to: those of an array with a higher priority overtake others that wait to be sent (Jayarajan et al. 2019,
arXiv:1905.03960).
"""

import contextlib
import heapq
import itertools
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

_RETRY_S = 0.05
_PIECE_BYTES = 512 * 1024  # Of one message; 4 ms at 1 Gbit/s, the longest that a more urgent array waits.
_UNSENT_BYTES = 128 * 1024  # In the system's buffer, where nothing can overtake.
_HEADER = struct.Struct("!IIII")


class Message(NamedTuple):
    """What tells a process what to do with the bytes that follow: the number of the array, of its piece, the hop, the bytes."""

    array: int
    piece: int
    hop: int
    nbytes: int


class Sum:
    """One array on its way.

    Attributes:
        array: The own values, then the sum.
        ticket: Fulfilled with the array.
        priority: What is sent first; the highest.
        pieces: The array in pieces, each in as many segments as there are processes.
        missing: Messages that have not come.
    """

    def __init__(self, array: np.ndarray, priority: float, num_processes: int) -> None:
        self.array, self.priority = array, priority
        self.ticket: Future = Future()
        values = array.reshape(-1)
        num_pieces = -(-values.nbytes // (_PIECE_BYTES * num_processes))
        pieces = np.array_split(values, num_pieces) if num_pieces else []
        self.pieces = [np.array_split(piece, num_processes) for piece in pieces]
        self.missing = len(self.pieces) * 2 * (num_processes - 1)


class Ring:
    """Connections of one process to its two neighbours, and the threads that sum.

    Args:
        process: Number of this process, from 0 on.
        num_processes: Processes of the ring.
        to_next: Connection to process `process + 1`.
        from_previous: Connection to process `process - 1`.
    """

    def __init__(self, process: int, num_processes: int, to_next: socket.socket, from_previous: socket.socket) -> None:
        self._process, self._num_processes = process, num_processes
        self._next, self._previous = to_next, from_previous
        to_next.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            to_next.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        self._changed = threading.Condition()
        self._open: dict[int, Sum] = {}
        self._early: dict[int, list[tuple[Message, np.ndarray]]] = {}
        self._outbox: list[tuple[float, int, int, Message, np.ndarray]] = []
        self._count, self._order = itertools.count(), itertools.count()
        self._error: ConnectionError | None = None
        self._closing = False
        threads = [("send", self._send), ("receive", self._receive)]
        self._threads = [threading.Thread(target=run, name=f"ring-{name}", daemon=True) for name, run in threads]
        for thread in self._threads:
            thread.start()

    @classmethod
    def connect(
        cls, process: int, addresses: Sequence[tuple[str, int]], *, listener: socket.socket, timeout_s: float = 300
    ) -> "Ring":
        """Returns a ring once both neighbours are connected; every process must call it.

        Args:
            process: Number of this process.
            addresses: Host and port at which each process listens.
            listener: This process's listening socket.
            timeout_s: Seconds to wait for the neighbours.

        Raises:
            TimeoutError: If a neighbour is not there in time.
        """
        return cls(process, len(addresses), *connect_neighbours(process, addresses, listener=listener, timeout_s=timeout_s))

    def start(self, array: np.ndarray, *, priority: float = 0) -> Future:
        """Begins the sum of an array over all processes, and returns what `wait` takes. The array may be changed afterwards.

        Args:
            array: Any shape, the same on every process, of a type that can be added.
            priority: Arrays with a higher one are sent before others that wait; those of one priority in the order of their starts.
        """
        own = Sum(np.array(array, order="C"), priority, self._num_processes)
        with self._changed:
            number = next(self._count)
            if self._error is not None:
                own.ticket.set_exception(self._error)
            elif own.missing == 0:
                own.ticket.set_result(own.array)
            else:
                self._open[number] = own
                for index, segments in enumerate(own.pieces):
                    self._put(own, Message(number, index, 0, segments[self._process].nbytes), segments[self._process])
            early = self._early.pop(number, [])
        if not own.ticket.done():
            for message, values in early:
                self._take(own, message, values)
        return own.ticket

    def wait(self, ticket: Future) -> np.ndarray:
        """Returns the sum, the same to the last bit on every process. It cannot be written to, as parts of it may still be sent.

        Raises:
            ConnectionError: If a neighbour has gone.
        """
        return ticket.result()

    def close(self) -> None:
        """Ends the threads after the sums that were started, and the connections."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._open)
            self._closing = True
            self._changed.notify_all()
        self._threads[0].join()
        self._hang_up()
        self._threads[1].join()
        self._next.close()
        self._previous.close()

    def _send(self) -> None:
        try:
            while (item := self._next_message()) is not None:
                message, values = item
                self._next.sendall(_HEADER.pack(*message), getattr(socket, "MSG_MORE", 0))
                self._next.sendall(_bytes_of(values))
        except OSError as error:
            self._fail(error)

    def _next_message(self) -> tuple[Message, np.ndarray] | None:
        """Returns the most urgent message once there is one; None once there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._outbox or self._closing or self._error is not None)
            if not self._outbox or self._error is not None:
                return None
            return heapq.heappop(self._outbox)[-2:]

    def _put(self, own: Sum, message: Message, values: np.ndarray) -> None:
        heapq.heappush(self._outbox, (-own.priority, message.array, next(self._order), message, values))
        self._changed.notify_all()

    def _receive(self) -> None:
        header, scratch = np.empty(_HEADER.size, np.uint8), np.empty(_PIECE_BYTES, np.uint8)
        try:
            while True:
                _receive_into(self._previous, header)
                message = Message(*_HEADER.unpack(header.data))
                own = self._open.get(message.array)
                if own is None:
                    self._receive_early(message)
                elif message.hop < self._num_processes - 1:
                    _receive_into(self._previous, scratch[: message.nbytes])
                    self._take(own, message, scratch[: message.nbytes])
                else:
                    _receive_into(self._previous, self._segment(own, message))
                    self._take(own, message)
        except OSError as error:
            self._fail(error)

    def _receive_early(self, message: Message) -> None:
        """Receives a part of an array that this process may not have started yet."""
        values = np.empty(message.nbytes, np.uint8)
        _receive_into(self._previous, values)
        with self._changed:
            own = self._open.get(message.array)
            if own is None:
                self._early.setdefault(message.array, []).append((message, values))
        if own is not None:
            self._take(own, message, values)

    def _segment(self, own: Sum, message: Message) -> np.ndarray:
        return own.pieces[message.piece][(self._process - message.hop - 1) % self._num_processes]

    def _take(self, own: Sum, message: Message, received: np.ndarray | None = None) -> None:
        """Adds values of the process before to the own, or takes note of a finished segment, and passes the segment on."""
        segment = self._segment(own, message)
        if received is not None:
            segment += received.view(segment.dtype)
        with self._changed:
            if self._error is not None:
                return
            if message.hop + 1 < 2 * (self._num_processes - 1):
                self._put(own, message._replace(hop=message.hop + 1), segment)
            own.missing -= 1
            if own.missing == 0:
                del self._open[message.array]
                own.array.flags.writeable = False
                own.ticket.set_result(own.array)
                self._changed.notify_all()

    def _fail(self, error: OSError) -> None:
        with self._changed:
            if self._closing or self._error is not None:
                return
            self._error = ConnectionError(
                f"Process {self._process} lost a neighbour in the ring of {self._num_processes}: {error}"
            )
            self._error.__cause__ = error
            for own in self._open.values():
                own.ticket.set_exception(self._error)
            self._open.clear()
            self._changed.notify_all()
        self._hang_up()

    def _hang_up(self) -> None:
        for connection in (self._next, self._previous):
            with contextlib.suppress(OSError):  # The neighbour may have gone already.
                connection.shutdown(socket.SHUT_RDWR)


def connect_neighbours(
    process: int, addresses: Sequence[tuple[str, int]], *, listener: socket.socket, timeout_s: float
) -> tuple[socket.socket, socket.socket]:
    """Returns connections to the process after this one and from the one before."""
    following = addresses[(process + 1) % len(addresses)]
    deadline = time.monotonic() + timeout_s
    to_next = _dial(following, deadline)
    listener.settimeout(max(deadline - time.monotonic(), _RETRY_S))
    try:
        from_previous = listener.accept()[0]
    except TimeoutError as error:
        raise TimeoutError(
            f"Process {process} waited {timeout_s:g} s for process {(process - 1) % len(addresses)} to connect. "
            "Check that it was started and that this host's ports can be reached from it."
        ) from error
    from_previous.settimeout(None)
    return to_next, from_previous


def _dial(address: tuple[str, int], deadline: float) -> socket.socket:
    while True:
        try:
            return socket.create_connection(address, timeout=None)
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"No process answers at {address[0]}:{address[1]}: {error}. Check that it was started."
                ) from error
            time.sleep(_RETRY_S)


def _receive_into(connection: socket.socket, buffer: np.ndarray) -> None:
    view = _bytes_of(buffer)
    while view:
        count = connection.recv_into(view, len(view), socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionResetError("the connection was closed")
        view = view[count:]


def _bytes_of(array: np.ndarray) -> memoryview:
    # An empty array has no memory that could be viewed.
    return memoryview(array.view(np.uint8).data) if len(array) else memoryview(b"")
