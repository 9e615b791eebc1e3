"""A program on each node of a Ray cluster for the launcher, and its three streams.

Ray sends these classes to the node as they are, so that the node needs no tnt_jax for them, and
makes them actors. An actor ends with the driver that made it. The program, whose standard input
closes then, ends by itself.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence

# An actor that ends kills its children at once. It is a shell that it kills then, and the program,
# whose standard input closes, has time to end what it has started.
_BETWEEN = '"$@"; exit $?'


class Program:
    """A program with its streams; an actor of which each stream has a thread of its own."""

    def __init__(self) -> None:
        self._popen: subprocess.Popen[bytes] | None = None
        self._starts = 0

    def visible_gpus(self) -> str:
        """Returns the GPUs that Ray has given to this actor, as in `CUDA_VISIBLE_DEVICES`."""
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def start(self, command: Sequence[str], variables: Mapping[str, str]) -> int:
        """Starts the program, once the one before has ended; returns the number of the start."""
        environment = {**os.environ, **variables}
        if environment.get("OMP_NUM_THREADS") == "1":
            # Ray gives an actor as many threads as CPUs; the launcher divides those of the host.
            del environment["OMP_NUM_THREADS"]
        self._popen = subprocess.Popen(
            ["sh", "-c", _BETWEEN, "sh", *command],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._starts += 1
        return self._starts

    def write(self, start: int, data: bytes) -> None:
        """Writes to the standard input of the program of that start; no data close it."""
        if start != self._starts:
            return
        assert self._popen is not None and self._popen.stdin is not None
        stdin = self._popen.stdin
        try:
            if data:
                stdin.write(data)
                stdin.flush()
            else:
                stdin.close()
        except BrokenPipeError:
            # The program has ended, which its other streams tell.
            return

    def read(self, start: int, stream: str) -> bytes:
        """Returns what the program of that start writes to its standard "output", or "errors"."""
        # Nothing at its end, and once another one was started.
        if start != self._starts:
            return b""
        assert self._popen is not None
        source = self._popen.stdout if stream == "output" else self._popen.stderr
        assert source is not None
        return os.read(source.fileno(), 1 << 16)

    def wait(self, start: int) -> int:
        """Returns the exit code of the program of that start once it has ended."""
        # Where another was started in its place, its launcher has given it up.
        if start != self._starts:
            return 1
        assert self._popen is not None
        return self._popen.wait()
