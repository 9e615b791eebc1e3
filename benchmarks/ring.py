"""Sums arrays over processes by TCP connections of their own, while the processor goes on computing.

XLA's collectives on CPUs stop the program until they are done. A ring sums in a thread, so that the gradients of late layers travel
while those of early layers are computed:

    ring = Ring.connect(process, addresses)
    ticket = ring.start(gradient)       # returns at once
    ...
    total = ring.wait(ticket)

Every process must start the same arrays in the same order. Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002: each process
sends 2 (n - 1) / n times the bytes of an array, which is the least possible.
"""

import queue
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

_RETRY_S = 0.05


class Ring:
    """Connections of one process to its two neighbours, and the thread that sums.

    Args:
        process: Number of this process, from 0 on.
        num_processes: Processes of the ring.
        to_next: Connection to process `process + 1`.
        from_previous: Connection to process `process - 1`.
    """

    def __init__(self, process: int, num_processes: int, to_next: socket.socket, from_previous: socket.socket) -> None:
        self._process, self._num_processes = process, num_processes
        self._next, self._previous = to_next, from_previous
        for connection in (to_next, from_previous):
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="tnt-ring-send")
        self._waiting: queue.SimpleQueue[tuple[np.ndarray, Future] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="tnt-ring", daemon=True)
        self._thread.start()

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
        return cls(process, len(addresses), to_next, from_previous)

    def start(self, array: np.ndarray) -> Future:
        """Begins the sum of an array over all processes, and returns what `wait` takes. The array may be changed afterwards.

        Args:
            array: Any shape, the same on every process, of a type that can be added.
        """
        ticket: Future = Future()
        self._waiting.put((np.array(array), ticket))
        return ticket

    def wait(self, ticket: Future) -> np.ndarray:
        """Returns the sum, the same to the last bit on every process.

        Raises:
            ConnectionError: If a neighbour has gone.
        """
        return ticket.result()

    def close(self) -> None:
        """Ends the thread after the sums that were started, and the connections."""
        self._waiting.put(None)
        self._thread.join()
        self._sender.shutdown()
        self._next.close()
        self._previous.close()

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            array, ticket = item
            try:
                self._sum(array.reshape(-1))
            except OSError as error:
                gone = ConnectionError(f"Process {self._process} lost a neighbour in the ring of {self._num_processes}: {error}")
                gone.__cause__ = error
                ticket.set_exception(gone)
            else:
                ticket.set_result(array)

    def _sum(self, values: np.ndarray) -> None:
        """Replaces values by their sum over processes: each process adds up one part, then the parts go round."""
        size = self._num_processes
        parts = np.array_split(values, size)
        received = np.empty(max(len(part) for part in parts), values.dtype)
        for hop in range(2 * (size - 1)):
            out, into = parts[(self._process - hop) % size], parts[(self._process - hop - 1) % size]
            sending = self._sender.submit(self._next.sendall, _bytes_of(out))
            is_adding = hop < size - 1
            buffer = received[: len(into)] if is_adding else into
            _receive(self._previous, buffer)
            sending.result()
            if is_adding:
                into += buffer


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


def _receive(connection: socket.socket, buffer: np.ndarray) -> None:
    view = _bytes_of(buffer)
    while view:
        count = connection.recv_into(view)
        if count == 0:
            raise ConnectionResetError("the connection was closed")
        view = view[count:]


def _bytes_of(array: np.ndarray) -> memoryview:
    # An empty array has no memory that could be viewed.
    return memoryview(array.view(np.uint8).data) if len(array) else memoryview(b"")
