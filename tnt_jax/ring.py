"""Sums arrays over processes by TCP connections of their own, while the processor goes on computing.

XLA's collectives on CPUs stop the program until they are done. A ring sums in threads, so that the gradients of late layers travel
while those of early layers are computed:

    ring = Ring(process, num_processes, *connect_neighbours(...))
    ticket = ring.start([gradient, other])       # returns at once
    ...
    total, other_total = ring.wait(ticket)

Every process must start the same arrays in the same order. Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002: each process
sends 2 (n - 1) / n times the bytes of an array, which is the least possible. Arrays travel in pieces, each a small ring sum, and a
piece says what it belongs to: those of a start with a higher priority overtake others that wait to be sent (Jayarajan et al. 2019,
arXiv:1905.03960).
"""

import contextlib
import heapq
import itertools
import math
import socket
import struct
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import numpy as np

_PIECE_BYTES = 512 * 1024  # Of one message; 4 ms at 1 Gbit/s, the longest that a more urgent array waits.
_UNSENT_BYTES = 128 * 1024  # In the system's buffer, where nothing can overtake.
_HEADER = struct.Struct("!QIII")


class Message(NamedTuple):
    """What tells a process what to do with the bytes that follow: the number of the sum, of its piece, the hop, the bytes."""

    number: int
    piece: int
    hop: int
    nbytes: int


class Sum:
    """Arrays on their way.

    Attributes:
        values: The own values of all arrays, one behind the other, then the sums.
        arrays: Views of `values` in the shapes of the arrays.
        ticket: Fulfilled with `arrays`.
        priority: What is sent first; the highest.
        pieces: The values in pieces, each in as many segments as there are processes.
        missing: Messages that have not come.
    """

    def __init__(self, arrays: Sequence[np.ndarray], priority: float, num_processes: int) -> None:
        self.values = np.concatenate([np.ravel(array) for array in arrays])
        ends = np.cumsum([np.size(array) for array in arrays])[:-1]
        self.arrays = [part.reshape(np.shape(x)) for part, x in zip(np.split(self.values, ends), arrays, strict=True)]
        self.ticket: Future = Future()
        self.priority = priority
        num_pieces = math.ceil(self.values.nbytes / (_PIECE_BYTES * num_processes))
        pieces = np.array_split(self.values, num_pieces) if num_pieces else []
        self.pieces = [np.array_split(piece, num_processes) for piece in pieces]
        self.missing = len(self.pieces) * 2 * (num_processes - 1)

    def fulfil(self) -> None:
        """Hands the sums over; they cannot be written to, as parts of them may still be sent."""
        self.values.flags.writeable = False
        for array in self.arrays:
            array.flags.writeable = False
        self.ticket.set_result(self.arrays)


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

    def start(self, arrays: Sequence[np.ndarray], *, priority: float = 0) -> Future:
        """Begins the sums of arrays over all processes, and returns what `wait` takes. The arrays may be changed afterwards.

        Args:
            arrays: Arrays of one type that can be added, in the same shapes on every process; at least one.
            priority: What has a higher one is sent before other arrays that wait; what has the same, in the order of the starts.
        """
        own = Sum(arrays, priority, self._num_processes)
        with self._changed:
            number = next(self._count)
            if self._error is not None:
                own.ticket.set_exception(self._error)
            elif own.missing == 0:
                own.fulfil()
            else:
                self._open[number] = own
                for index, segments in enumerate(own.pieces):
                    self._put(own, Message(number, index, 0, segments[self._process].nbytes), segments[self._process])
            early = self._early.pop(number, [])
        try:
            for message, values in early:
                self._take(own, message, values)
        except ValueError as error:
            self._fail(error)
        return own.ticket

    def wait(self, ticket: Future) -> list[np.ndarray]:
        """Returns the sums, the same to the last bit on every process; they cannot be written to.

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
        except Exception as error:  # Whatever it is, sums must not wait for ever.
            self._fail(error)

    def _next_message(self) -> tuple[Message, np.ndarray] | None:
        """Returns the most urgent message once there is one; None once there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._outbox or self._closing or self._error is not None)
            if not self._outbox or self._error is not None:
                return None
            return heapq.heappop(self._outbox)[-2:]

    def _put(self, own: Sum, message: Message, values: np.ndarray) -> None:
        heapq.heappush(self._outbox, (-own.priority, message.number, next(self._order), message, values))
        self._changed.notify_all()

    def _receive(self) -> None:
        header, scratch = np.empty(_HEADER.size, np.uint8), np.empty(_PIECE_BYTES, np.uint8)
        try:
            while True:
                _receive_into(self._previous, header)
                message = Message(*_HEADER.unpack(header.data))
                own = self._open.get(message.number)
                if own is None:
                    self._receive_early(message)
                elif message.hop < self._num_processes - 1:
                    _receive_into(self._previous, scratch[: message.nbytes])
                    self._take(own, message, scratch[: message.nbytes])
                else:
                    _receive_into(self._previous, self._segment(own, message))
                    self._take(own, message)
        except Exception as error:  # Whatever it is, sums must not wait for ever.
            self._fail(error)

    def _receive_early(self, message: Message) -> None:
        """Receives a part of an array that this process may not have started yet."""
        values = np.empty(message.nbytes, np.uint8)
        _receive_into(self._previous, values)
        with self._changed:
            own = self._open.get(message.number)
            if own is None:
                self._early.setdefault(message.number, []).append((message, values))
        if own is not None:
            self._take(own, message, values)

    def _segment(self, own: Sum, message: Message) -> np.ndarray:
        """Returns the segment that a message belongs to."""
        segments = own.pieces[message.piece] if message.piece < len(own.pieces) else []
        segment = segments[(self._process - message.hop - 1) % self._num_processes] if segments else None
        if segment is None or segment.nbytes != message.nbytes:
            raise ValueError(
                f"sum {message.number} has {own.values.nbytes} bytes here and another size on another process; every process must "
                "start the same arrays in the same order"
            )
        return segment

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
                del self._open[message.number]
                own.fulfil()
                self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if self._closing or self._error is not None:
                return
            trouble = "lost a neighbour in" if isinstance(error, OSError) else "failed in"
            self._error = ConnectionError(f"Process {self._process} {trouble} the ring of {self._num_processes}: {error}")
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
