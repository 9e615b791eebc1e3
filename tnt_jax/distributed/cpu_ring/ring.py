"""Sums arrays over processes through TCP connections while the processor keeps computing.

XLA's collectives on CPUs stop the program until they are done. A ring sums in threads, so that the
gradients of late layers are sent while those of early layers are computed:

    ring = Ring(process, num_processes, *connect_neighbours(...))
    ticket = ring.start([gradient, other])       # returns at once
    ...
    total, other_total = ring.wait(ticket)

All processes must start the same arrays in the same order, at the same point of training. Each
message carries this point; if the points differ, all processes raise the same error, which names
them. Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002: each process sends 2 (n - 1) / n
times the bytes of an array, which is the least possible. Arrays are sent in pieces, each a small
ring sum. Pieces with a higher priority overtake others that wait to be sent (Jayarajan et al. 2019,
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

_PIECE_BYTES = (
    512 * 1024
)  # Of one message; 4 ms at 1 Gbit/s, the longest wait of a more urgent array.
_UNSENT_BYTES = 128 * 1024  # In the system's buffer, where a message cannot be overtaken.
_HEADER = struct.Struct("!QIIIIII")
# The number of the last message of a failed ring, which carries the reason.
_FAILURE = 2**64 - 1
_DRAIN_S = 10  # The time in which the previous process must learn of a failure or an end.


class Tag(NamedTuple):
    """The position of a process in its training when it starts a sum.

    Attributes:
        epoch: Number of the epoch, from 1 on; 0 in a loop that counts steps alone.
        step: Number of the step in the epoch, or in the loop, from 1 on.
        is_end: Whether the epoch has ended after that step.
    """

    epoch: int = 0
    step: int = 0
    is_end: int = 0

    def __str__(self) -> str:
        """Returns the position in words."""
        if self.is_end:
            return f"has ended epoch {self.epoch} after {self.step} step(s)"
        if not self.epoch:
            return f"is at batch {self.step} of its own loop or of train_on_batch"
        return f"is in epoch {self.epoch}, step {self.step}"


class Message(NamedTuple):
    """A message header, which says what to do with the bytes that follow.

    It holds the number of the sum, of the piece and of the hop, the number of bytes, and a tag.
    """

    number: int
    piece: int
    hop: int
    nbytes: int
    epoch: int = 0
    step: int = 0
    is_end: int = 0

    @property
    def tag(self) -> Tag:
        """The position of the sender when it started the sum."""
        return Tag(self.epoch, self.step, self.is_end)


_NOWHERE = Tag()


class _RingError(Exception):
    """The failure of the ring as another process reported it."""


class PendingSum:
    """Arrays that are being summed.

    Attributes:
        values: The concatenated values of this process, then the sums.
        arrays: Views of `values` in the shapes of the arrays.
        ticket: Fulfilled with `arrays`.
        priority: The highest is sent first.
        tag: The position of this process in its training.
        pieces: The values in pieces, each in as many segments as there are processes.
        missing: Number of messages that have not arrived.
    """

    def __init__(
        self, arrays: Sequence[np.ndarray], priority: float, tag: Tag, num_processes: int
    ) -> None:
        self.values = np.concatenate([np.ravel(array) for array in arrays])
        ends = np.cumsum([np.size(array) for array in arrays])[:-1]
        self.arrays = [
            part.reshape(np.shape(x))
            for part, x in zip(np.split(self.values, ends), arrays, strict=True)
        ]
        self.ticket: Future = Future()
        self.priority = priority
        self.tag = tag
        num_pieces = math.ceil(self.values.nbytes / (_PIECE_BYTES * num_processes))
        pieces = np.array_split(self.values, num_pieces) if num_pieces else []
        self.pieces = [np.array_split(piece, num_processes) for piece in pieces]
        self.missing = len(self.pieces) * 2 * (num_processes - 1)

    def fulfil(self) -> None:
        """Hands over the sums, read-only, because parts of them may still be sent."""
        self.values.flags.writeable = False
        for array in self.arrays:
            array.flags.writeable = False
        self.ticket.set_result(self.arrays)


class Ring:
    """The connections of one process to its two neighbours, and the threads that sum.

    Args:
        process: Number of this process, from 0 on.
        num_processes: Processes of the ring.
        to_next: Connection to process `process + 1`.
        from_previous: Connection to process `process - 1`.
    """

    def __init__(
        self, process: int, num_processes: int, to_next: socket.socket, from_previous: socket.socket
    ) -> None:
        self._process = process
        self._num_processes = num_processes
        self._next = to_next
        self._previous = from_previous
        to_next.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            to_next.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        self._changed = threading.Condition()
        self._open: dict[int, PendingSum] = {}
        self._early: dict[int, list[tuple[Message, np.ndarray]]] = {}
        self._outbox: list[tuple[float, int, int, Message, np.ndarray]] = []
        self._count, self._order = itertools.count(), itertools.count()
        self._error: ConnectionError | None = None
        self._last_words: bytes | None = None
        self._closing = False
        self._closed: ConnectionError | None = None
        threads = [("send", self._send), ("receive", self._receive)]
        self._threads = [
            threading.Thread(target=run, name=f"ring-{name}", daemon=True) for name, run in threads
        ]
        for thread in self._threads:
            thread.start()

    def start(
        self, arrays: Sequence[np.ndarray], *, priority: float = 0, tag: Tag = _NOWHERE
    ) -> Future:
        """Starts the sums of arrays over all processes, and returns a ticket for `wait`.

        The arrays may be changed afterwards.

        Args:
            arrays: Arrays of one type that can be added, in the same shapes on every process; at
                least one.
            priority: Arrays with a higher priority are sent before others that wait; arrays with
                the same priority, in the order of their starts.
            tag: The position of this process in its training, which must be the same on all
                processes.
        """
        pending = PendingSum(arrays, priority, tag, self._num_processes)
        with self._changed:
            number = next(self._count)
            if (error := self._error or self._closed) is not None:
                pending.ticket.set_exception(error)
            elif pending.missing == 0:
                pending.fulfil()
            else:
                self._open[number] = pending
                for index, segments in enumerate(pending.pieces):
                    own_segment = segments[self._process]
                    self._put(
                        pending, Message(number, index, 0, own_segment.nbytes, *tag), own_segment
                    )
            early = self._early.pop(number, [])
        try:
            for message, values in early:
                self._take(pending, message, values)
        except ValueError as error:
            self._fail(error)
        return pending.ticket

    def wait(self, ticket: Future) -> list[np.ndarray]:
        """Returns the sums, read-only and with the same bits on all processes.

        Raises:
            ConnectionError: If a neighbour has gone, or another process is elsewhere in its
                training.
        """
        return ticket.result()

    def check(self) -> None:
        """Raises the `ConnectionError` of the ring if it has failed."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Ends the threads and connections after the sums that were started.

        Sums that are not finished after 10 s, because other processes do not start theirs, fail, as
        do all that are started later.
        """
        with self._changed:
            is_over = self._changed.wait_for(
                lambda: self._error is not None or not self._open, _DRAIN_S
            )
        if not is_over:
            self._fail(TimeoutError("it was closed while sums were on their way"))
        with self._changed:
            self._closing = True
            if self._error is None:
                self._closed = ConnectionError("The ring is closed: the process has left its job.")
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
            if self._last_words is not None:
                self._next.sendall(
                    _HEADER.pack(*Message(_FAILURE, 0, 0, len(self._last_words))) + self._last_words
                )
                self._next.shutdown(socket.SHUT_WR)
        except Exception as error:  # Whatever it is, sums must not hang.
            self._fail(error)
            self._hang_up()

    def _next_message(self) -> tuple[Message, np.ndarray] | None:
        """Returns the most urgent message, waiting for one; None once there will be none."""
        with self._changed:
            self._changed.wait_for(lambda: self._outbox or self._closing or self._error is not None)
            if not self._outbox or self._error is not None:
                return None
            return heapq.heappop(self._outbox)[-2:]

    def _put(self, pending: PendingSum, message: Message, values: np.ndarray) -> None:
        heapq.heappush(
            self._outbox, (-pending.priority, message.number, next(self._order), message, values)
        )
        self._changed.notify_all()

    def _receive(self) -> None:
        header = np.empty(_HEADER.size, np.uint8)
        scratch = np.empty(_PIECE_BYTES, np.uint8)
        try:
            while self._error is None:
                _receive_into(self._previous, header)
                message = Message(*_HEADER.unpack(header.data))
                pending = self._open.get(message.number)
                if message.number == _FAILURE:
                    reason = np.empty(message.nbytes, np.uint8)
                    _receive_into(self._previous, reason)
                    raise _RingError(bytes(reason).decode())
                if pending is None:
                    self._receive_early(message)
                elif message.hop < self._num_processes - 1:
                    _receive_into(self._previous, scratch[: message.nbytes])
                    self._take(pending, message, scratch[: message.nbytes])
                else:
                    _receive_into(self._previous, self._segment(pending, message))
                    self._take(pending, message)
        except Exception as error:  # Whatever it is, sums must not hang.
            self._fail(error)
        self._drain(scratch)

    def _drain(self, scratch: np.ndarray) -> None:
        """Reads on until the previous process has learned of the failure.

        Otherwise that process would take it for a failure of its own.
        """
        with contextlib.suppress(OSError):
            self._previous.settimeout(_DRAIN_S)
            while self._previous.recv_into(_bytes_of(scratch)):
                pass
            self._previous.shutdown(socket.SHUT_RDWR)

    def _receive_early(self, message: Message) -> None:
        """Receives part of an array that this process may not have started yet."""
        values = np.empty(message.nbytes, np.uint8)
        _receive_into(self._previous, values)
        with self._changed:
            pending = self._open.get(message.number)
            if pending is None:
                self._early.setdefault(message.number, []).append((message, values))
        if pending is not None:
            self._take(pending, message, values)

    def _segment(self, pending: PendingSum, message: Message) -> np.ndarray:
        """Returns the segment that a message belongs to."""
        if message.tag != pending.tag:
            before = (self._process - 1) % self._num_processes
            points = sorted([(before, message.tag), (self._process, pending.tag)])
            raise ValueError(
                f"{', '.join(f'process {process} {tag}' for process, tag in points)}; every "
                "process must make the same calls, with equally many batches in each epoch, and "
                "stop at the same step"
            )
        segments = pending.pieces[message.piece] if message.piece < len(pending.pieces) else []
        segment = (
            segments[(self._process - message.hop - 1) % self._num_processes] if segments else None
        )
        if segment is None or segment.nbytes != message.nbytes:
            raise ValueError(
                f"sum {message.number} has {pending.values.nbytes} bytes here and another size on "
                "another process; every process must start the same arrays in the same order"
            )
        return segment

    def _take(
        self, pending: PendingSum, message: Message, received: np.ndarray | None = None
    ) -> None:
        """Adds the previous process's values or stores a finished segment, and passes it on."""
        segment = self._segment(pending, message)
        if received is not None:
            with np.errstate(all="ignore"):  # Training looks for infinity and NaN by itself.
                segment += received.view(segment.dtype)
        with self._changed:
            if self._error is not None:
                return
            if message.hop + 1 < 2 * (self._num_processes - 1):
                self._put(pending, message._replace(hop=message.hop + 1), segment)
            pending.missing -= 1
            if pending.missing == 0:
                del self._open[message.number]
                pending.fulfil()
                self._changed.notify_all()

    def _fail(self, error: Exception) -> None:
        with self._changed:
            if self._closing or self._error is not None:
                return
            trouble = "lost a neighbour in" if isinstance(error, OSError) else "failed in"
            reason = f"Process {self._process} {trouble} the ring of {self._num_processes}: {error}"
            self._error = ConnectionError(str(error) if isinstance(error, _RingError) else reason)
            self._error.__cause__ = error
            self._last_words = str(self._error).encode()
            for pending in self._open.values():
                pending.ticket.set_exception(self._error)
            self._open.clear()
            self._changed.notify_all()

    def _hang_up(self) -> None:
        for connection in (self._next, self._previous):
            with contextlib.suppress(OSError):  # The neighbour may already have gone.
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
