"""From host batches to arrays on the devices, ahead of the step that needs them."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tnt_jax import _jax
from tnt_jax.data.layout import Place
from tnt_jax.runtime import Runtime

# Batches that wait on the devices while a step runs.
_AHEAD = 2


def place_of(runtime: Runtime) -> Place:
    """Returns this process's part of the data axis."""
    ranks = runtime.local_ranks
    return Place(runtime.num_ranks, ranks[0], len(ranks))


def make_placer(mesh: Mesh, *, stacked: bool = False) -> Callable[[Any], Any]:
    """Returns a function from this process's rows to arrays sharded by row over all ranks.

    It takes a pytree of host arrays `[local_rows, ...]` and returns arrays `[ranks * rows per rank, ...]` without waiting for the copy.

    Args:
        mesh: Ranks, over the axis `data`.
        stacked: Whether arrays hold several batches, `[batches, local_rows, ...]`.
    """
    row_dim = 1 if stacked else 0
    sharding = NamedSharding(mesh, PartitionSpec(*(None,) * row_dim, _jax.DATA_AXIS))
    if jax.process_count() == 1:
        return lambda tree: jax.device_put(tree, sharding)
    local_ranks = sum(device.process_index == jax.process_index() for device in mesh.devices.flat)

    def place(x: np.ndarray) -> jax.Array:
        shape = (*x.shape[:row_dim], x.shape[row_dim] // local_ranks * mesh.size, *x.shape[row_dim + 1 :])
        return jax.make_array_from_process_local_data(sharding, x, shape)

    return lambda tree: jax.tree.map(place, tree)


class Feed:
    """Iterates over items, each prepared in a thread while the caller works on the ones before.

    Args:
        items: Items to prepare, read in the thread only.
        prepare: From an item to what the caller gets, for instance placement on the devices.
        threaded: Whether a thread reads ahead; without one every item is prepared when it is asked for.

    Attributes:
        wait_s: Seconds that the caller has waited for items.

    An exception of `items` or `prepare` is raised to the caller in place of the item. Use it as a context manager: leaving it
    stops the thread.
    """

    def __init__(self, items: Iterator[Any], prepare: Callable[[Any], Any], *, threaded: bool = True) -> None:
        self.wait_s = 0.0
        self._items, self._prepare, self._threaded = items, prepare, threaded
        self._ready: queue.Queue[tuple[str, Any]] = queue.Queue(_AHEAD)
        self._stopped = threading.Event()

    def __enter__(self) -> "Feed":
        if self._threaded:
            threading.Thread(target=self._work, name="tnt_jax-feed", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()

    def __iter__(self) -> Iterator[Any]:
        if not self._threaded:
            yield from map(self._prepare, self._items)
            return
        while True:
            start = time.perf_counter()
            kind, value = self._ready.get()
            self.wait_s += time.perf_counter() - start
            if kind == "error":
                raise value
            if kind == "end":
                return
            yield value

    def _work(self) -> None:
        try:
            for item in self._items:
                if not self._offer("item", self._prepare(item)):
                    return
        except BaseException as error:  # The caller raises it: nothing is lost.
            self._offer("error", error)
        else:
            self._offer("end", None)

    def _offer(self, kind: str, value: Any) -> bool:
        """Hands a value over; returns False when the reader has left."""
        while not self._stopped.is_set():
            try:
                self._ready.put((kind, value), timeout=0.1)
                return True
            except queue.Full:
                continue
        return False
