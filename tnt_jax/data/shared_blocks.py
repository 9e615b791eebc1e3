"""Memory that a process shares with its workers, for arrays on their way from them.

A block is a file without a name: it belongs to the process that made it, and is gone with it,
whatever ends it. Workers open it below `/proc`; where that is impossible (on other systems than
Linux, or where processes may not see one another's files), arrays travel through pipes.
"""

import mmap
import os
import pickle
from typing import Any, NamedTuple

_ALIGNMENT = 64


class Written(NamedTuple):
    """A value whose arrays lie in a block.

    Attributes:
        head: The pickled value without the bytes of its arrays.
        spans: First byte and length of each array in the block.
    """

    head: bytes
    spans: list[tuple[int, int]]


class Block:
    """Memory into which a worker writes one value at a time.

    Attributes:
        path: Name by which a worker opens it, or "" if there is no such memory on this system.
    """

    def __init__(self) -> None:
        self.path = ""
        self._file: Any = None
        self._memory: mmap.mmap | None = None
        if hasattr(os, "memfd_create"):
            self._file = os.fdopen(os.memfd_create("tnt_jax-fetch"), "r+b", buffering=0)
            self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"

    def read(self, found: Any, *, copy: bool) -> Any:
        """Returns what `write` has returned in a worker, or the value that it stands for.

        Args:
            found: What came from the worker.
            copy: Whether the arrays are the value's own. Without it they are those of the block,
                and change with the next value.
        """
        if not isinstance(found, Written):
            return found
        size = os.fstat(self._file.fileno()).st_size
        if self._memory is None or len(self._memory) < size:
            # Arrays that are still in use keep the old mapping.
            self._memory = mmap.mmap(self._file.fileno(), size)
        views = _views(self._memory, found.spans)
        return pickle.loads(found.head, buffers=map(bytearray, views) if copy else views)


def write(path: str, value: Any) -> Any:
    """Writes the arrays of a value into a block of another process, from a worker.

    Returns:
        A `Written`, or `value` itself if it has no arrays or the block cannot be used.
    """
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    if not buffers or not path:
        return value
    spans, end = [], 0
    try:
        file = os.open(path, os.O_WRONLY)
        try:
            for buffer in buffers:
                with buffer.raw() as raw:
                    _write_at(file, raw, end)
                    spans.append((end, raw.nbytes))
                    end += -(-raw.nbytes // _ALIGNMENT) * _ALIGNMENT
        finally:
            os.close(file)
    except OSError:
        return value
    return Written(head, spans)


def _write_at(file: int, raw: memoryview, first: int) -> None:
    done = 0
    # A call writes 2 GB at most.
    while done < raw.nbytes:
        done += os.pwrite(file, raw[done:], first + done)


def _views(memory: mmap.mmap, spans: list[tuple[int, int]]) -> list[memoryview]:
    whole = memoryview(memory)
    return [whole[first : first + length] for first, length in spans]
