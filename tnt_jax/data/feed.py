"""Threads that read data, and put it on the devices, ahead of the step that needs it.

Such a thread may wait for a file or for a user's generator without an end, so the interpreter does
not wait for it as for other threads. It must not be in the middle of JAX or TensorFlow either when
the interpreter ends: Python ends a thread that then wants to go on, which aborts the process.
"""

import atexit
import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tnt_jax import _jax
from tnt_jax.data.agreement import reader_stopped
from tnt_jax.data.layout import RankSlice
from tnt_jax.distributed import timeline
from tnt_jax.distributed.joining.runtime import Runtime
from tnt_jax.distributed.liveness import phases

# Longer than putting a batch on the devices takes.
_PATIENCE_S = 5.0

# For the life of the process: a thread may outlive its job.
_running: dict[threading.Thread, threading.Event] = {}


def start_reader(read: Callable[[], None], name: str, stopped: threading.Event) -> None:
    """Starts a thread that the end of the interpreter asks to end, by `stopped`, and waits for."""
    readers = phases.here().readers

    def run() -> None:
        own = threading.get_ident()
        readers.add(own)
        try:
            read()
        finally:
            readers.discard(own)
            _running.pop(thread, None)

    thread = threading.Thread(target=run, name=f"tnt_jax-{name}", daemon=True)
    _running[thread] = stopped
    thread.start()


@atexit.register
def _stop_readers() -> None:
    end = time.monotonic() + _PATIENCE_S
    readers = list(_running.items())
    for _, stopped in readers:
        stopped.set()
    for thread, _ in readers:
        thread.join(max(0.0, end - time.monotonic()))


# Batches that wait on the devices while a step runs.
BATCHES_AHEAD = 2
_TICK_S = 0.2


def rank_slice_of(runtime: Runtime) -> RankSlice:
    """Returns this process's slice of the data axis."""
    ranks = runtime.local_ranks
    return RankSlice(runtime.num_ranks, ranks[0], len(ranks))


def make_put(mesh: Mesh, *, stacked: bool = False) -> Callable[[Any], Any]:
    """Returns a function from this process's rows to arrays sharded by row over all ranks.

    It takes a pytree of host arrays `[local_rows, ...]`, or stacked `[batches, local_rows, ...]`.
    """
    row_dim = 1 if stacked else 0
    sharding = NamedSharding(mesh, PartitionSpec(*(None,) * row_dim, _jax.rank_axes(mesh)))
    if not mesh.is_multi_process:
        return lambda tree: jax.device_put(tree, sharding)
    local_ranks, num_ranks = len(_jax.local_ranks(mesh)), _jax.num_ranks(mesh)

    def put(x: np.ndarray) -> jax.Array:
        shape = [*x.shape]
        shape[row_dim] = shape[row_dim] // local_ranks * num_ranks
        return jax.make_array_from_process_local_data(sharding, x, tuple(shape))

    return lambda tree: jax.tree.map(put, tree)


class Feed:
    """Iterates over items that a thread prepares while the caller works on earlier ones.

    The caller gets what `prepare` returns for an item, or its exception. The items end if it
    `gives_up`, asked a few times a second, while one is waited for. Leaving the context stops the
    thread.
    """

    def __init__(
        self,
        items: Iterator[Any],
        prepare: Callable[[Any], Any],
        *,
        threaded: bool = True,
        gives_up: Callable[[], bool] | None = None,
    ) -> None:
        self._items, self._threaded, self._gives_up = items, threaded, gives_up
        self._prepare = timeline.recorded(prepare, "put a batch on the devices", "data")
        self._ready: queue.Queue[tuple[str, Any]] = queue.Queue(BATCHES_AHEAD)
        self._stopped = threading.Event()

    def __enter__(self) -> "Feed":
        if self._threaded:
            start_reader(self._work, "feed", self._stopped)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def __iter__(self) -> Iterator[Any]:
        here = phases.here()
        while True:
            outer = here.doing
            here.doing = ("data", "")
            try:
                kind, value = self._take() if self._threaded else self._next()
            finally:
                here.doing = outer
            if kind == "error":
                raise value
            if kind == "end":
                return
            yield value

    def _next(self) -> tuple[str, Any]:
        for item in self._items:
            return "item", self._prepare(item)
        return "end", None

    def _take(self) -> tuple[str, Any]:
        with timeline.span("wait for data", "data"):
            if self._gives_up is None:
                return self._ready.get()
            while True:
                with contextlib.suppress(queue.Empty):
                    return self._ready.get(timeout=_TICK_S)
                if self._gives_up():
                    return "end", None

    def _work(self) -> None:
        reader_stopped.set(self._stopped)
        try:
            for item in self._items:
                if not self._offer("item", self._prepare(item)):
                    return
        except BaseException as error:  # Raised again by the caller.
            self._offer("error", error)
        else:
            self._offer("end", None)

    def _offer(self, kind: str, value: Any) -> bool:
        """Hands over a value; returns False if the reader has left."""
        while not self._stopped.is_set():
            with contextlib.suppress(queue.Full):
                self._ready.put((kind, value), timeout=0.1)
                return True
        return False
