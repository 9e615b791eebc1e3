"""Connects standard input and output to a program that runs on a node of a Ray cluster.

It runs as a program of its own, with the path of the broker's socket and the number of the node, in
place of `ssh NODE PROGRAM`. What comes in at standard input goes to the socket as it is; what comes
back are frames: a letter (`o` for standard output, `e` for standard error, `x` for the exit code),
four bytes of length, and the data.
"""

import contextlib
import os
import signal
import socket
import struct
import sys
import threading

HEADER = struct.Struct(">cI")
_DESCRIPTORS = {b"o": 1, b"e": 2}
_LOST = b"The connection to the Ray cluster has ended.\n"


def main() -> None:
    """Runs until the program on the node has ended, and ends with its exit code."""
    # `ray job stop` sends it to all processes of a job; the launcher, which gets it too, ends this.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    path, number = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as broker:
        broker.connect(path)
        broker.sendall(f"{number}\n".encode())
        threading.Thread(target=_send, args=(broker,), daemon=True).start()
        code = _receive(broker)
    # The thread may still wait for input.
    os._exit(code)


def _send(broker: socket.socket) -> None:
    with contextlib.suppress(OSError):  # The broker has gone, which the other thread sees.
        while data := os.read(0, 1 << 16):
            broker.sendall(data)
        broker.shutdown(socket.SHUT_WR)


def _receive(broker: socket.socket) -> int:
    while True:
        header = read_exactly(broker, HEADER.size)
        if len(header) < HEADER.size:
            os.write(2, _LOST)
            return 1
        kind, length = HEADER.unpack(header)
        data = read_exactly(broker, length)
        if kind == b"x":
            return int(data)
        while data:
            data = data[os.write(_DESCRIPTORS[kind], data) :]


def read_exactly(source: socket.socket, count: int) -> bytes:
    """Returns so many bytes, or fewer at the end of a connection."""
    data = b""
    while len(data) < count:
        try:
            more = source.recv(count - len(data))
        except ConnectionError:
            return b""
        if not more:
            return data
        data += more
    return data


if __name__ == "__main__":
    main()
