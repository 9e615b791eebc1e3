"""Sums over the ranks on CPUs that overlap with computation.

A compiled program hands each gradient to a ring of processes in a callback as soon as it is
finished, continues to compute, and waits for the sums when all have started. XLA's own sums on CPUs
stop the program, each until the slowest process has come.
"""

import functools
import itertools
import threading
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax import _jax
from tnt_jax.distributed import stall
from tnt_jax.distributed.cpu_ring.connection import Endpoint, connect_neighbours, open_endpoint
from tnt_jax.distributed.cpu_ring.ring import Ring, Tag
from tnt_jax.distributed.hlo import RING_START, RING_WAIT
from tnt_jax.distributed.joining import own_address
from tnt_jax.distributed.rendezvous import raise_while_waiting, read_key
from tnt_jax.distributed.runtime import Runtime, init
from tnt_jax.job import Slot

_KEY = "tnt_jax/ring"
_CONNECT_S = 60
_NUMBER = jax.ShapeDtypeStruct((), np.int32)
_slots = Slot(itertools.count)


class _Round:
    """One sum of one bucket: the inputs of this process's ranks, and whether it has started."""

    def __init__(self, num_ranks: int) -> None:
        self.parts: dict[int, Sequence[np.ndarray]] = {}
        self.ticket: Future[Future] = Future()
        self.unread = num_ranks


class RingReducer:
    """Sums over the ranks of all processes, driven by callbacks of compiled programs.

    A bucket has a slot, a number that is unique among all programs. Each time a program starts the
    bucket, all ranks of the process add their values, and later read the sum.

    Args:
        ring: Connections to the other processes.
        num_ranks: Number of ranks of this process.
    """

    def __init__(self, ring: Ring, num_ranks: int) -> None:
        self._ring = ring
        self._num_ranks = num_ranks
        self._lock = threading.Lock()
        self._rounds: dict[tuple[int, int], _Round] = {}
        self._started: dict[Any, Any] = defaultdict(itertools.count)
        self._read: dict[Any, Any] = defaultdict(itertools.count)
        # Epoch and number of the step that follows an update of a number.
        self._epoch, self._first_step, self._first_update = 0, 0, 0

    def begin_epoch(self, epoch: int, first_step: int, update: int) -> None:
        """Records the position in training, which the messages of all following sums carry.

        Args:
            epoch: Number of the epoch, from 1 on.
            first_step: Number of its next step, from 1 on.
            update: Number of the step since the start of training, as `TrainState.step`.
        """
        self._epoch, self._first_step, self._first_update = epoch, first_step, update

    def end_epoch(self, num_steps: int) -> None:
        """Waits until all processes have ended the epoch.

        Args:
            num_steps: Steps of this process.

        Raises:
            ConnectionError: On all processes, if one is elsewhere; the text names their positions.
        """
        tag = Tag(self._epoch, num_steps, 1)
        with stall.waiting("end of the epoch"):
            self._ring.wait(self._ring.start([np.zeros(jax.process_count(), np.int8)], tag=tag))

    def close(self) -> None:
        """Ends the connections; sums that are started later fail."""
        self._ring.close()

    def start(self, slot: int, rank: Any, arrays: Sequence[Any], update: int = 0) -> None:
        """Adds a rank's values to a bucket; the last rank starts the sum.

        Args:
            slot: Number of the bucket.
            rank: The rank.
            arrays: The values, which are copied.
            update: Number of the step in the whole training.
        """
        own = [np.asarray(x) if self._num_ranks == 1 else np.array(x) for x in arrays]
        with self._lock:
            key = slot, next(self._started[slot, int(rank)])
            entry = self._rounds.setdefault(key, _Round(self._num_ranks))
            entry.parts[int(rank)] = own
            is_last = len(entry.parts) == self._num_ranks
        if is_last:
            # In rank order, so that the sum is the same in every run.
            parts = [entry.parts[rank] for rank in sorted(entry.parts)]
            entry.parts = {}
            tag = Tag(self._epoch, self._first_step + update - self._first_update)
            try:
                with np.errstate(all="ignore"):  # Training looks for infinity and NaN by itself.
                    own = [functools.reduce(np.add, x) for x in zip(*parts, strict=True)]
                entry.ticket.set_result(self._ring.start(own, tag=tag))
            except Exception as error:
                entry.ticket.set_exception(error)  # For the ranks that already wait.
                raise

    def wait(self, slot: int, rank: Any) -> list[np.ndarray]:
        """Returns the sums of a bucket.

        Args:
            slot: Number of the bucket.
            rank: The rank that reads.

        Raises:
            ConnectionError: If a neighbour has gone.
        """
        with self._lock:
            key = slot, next(self._read[slot, int(rank)])
            entry = self._rounds.setdefault(key, _Round(self._num_ranks))
        with stall.waiting("sum of gradients"):
            totals = self._ring.wait(entry.ticket.result())
        with self._lock:
            entry.unread -= 1
            if entry.unread == 0:
                del self._rounds[key]
        return totals


def connect() -> RingReducer:
    """Returns the job's reducer once all processes have made their first call.

    Raises:
        TimeoutError: If a neighbour cannot be reached.
    """
    reducer = _reducer.get()
    if reducer is None:
        reducer = _connect(init())
        _reducer.set(reducer)
    return reducer


def _close(reducer: RingReducer | None) -> None:
    if reducer is not None:
        reducer.close()


_reducer = Slot[RingReducer | None](lambda: None, close=_close)


def _connect(runtime: Runtime) -> RingReducer:
    process, num_processes = jax.process_index(), jax.process_count()
    client = _jax.coordination_client()
    # A host without an address of its own is the only one: XLA's sums could not reach another
    # either.
    listener, own = open_endpoint(own_address() or "127.0.0.1")
    client.key_value_set(f"{_KEY}/{process}", f"{own.host} {own.port} {own.token}")
    texts = [
        read_key(f"{_KEY}/{other}", "connection of the ring") or ""
        for other in range(num_processes)
    ]
    endpoints = [
        Endpoint(host, int(port), token)
        for host, port, token in (text.split(" ") for text in texts)
    ]
    with stall.waiting("connection of the ring"):
        neighbours = connect_neighbours(process, endpoints, listener=listener, timeout_s=_CONNECT_S)
    ring = Ring(process, num_processes, *neighbours)
    raise_while_waiting(ring.check)
    return RingReducer(ring, len(runtime.local_ranks))


def sum_in_background(
    reducer: RingReducer,
    buckets: Sequence[Sequence[jax.Array]],
    *,
    after: Sequence[jax.Array] = (),
    update: Any = 0,
) -> list[Any]:
    """Returns the sums of buckets over the ranks, inside `shard_map` in a program for CPUs.

    Each bucket starts when its arrays are finished; waiting begins when all have started.

    Args:
        reducer: What sums.
        buckets: Arrays of one type each, in order of availability, earliest first.
        after: What must be computed before the first start: values that XLA exchanges between ranks
            and that no bucket depends on.
        update: Number of the step since the start of training, int32, with which the sums are
            tagged.
    """
    rank = jax.lax.axis_index(_jax.DATA_AXIS)
    slots = [next(_slots.get()) for _ in buckets]
    # Each callback takes numbers from the previous one: they fix the order on all processes, and
    # carry the update.
    before: Any = 2 * jnp.asarray(update, jnp.int32) + _number_of(
        [x for x in after if jnp.issubdtype(jnp.result_type(x), jnp.inexact)]
    )
    for slot, arrays in zip(slots, buckets, strict=True):
        before = _start(reducer, slot, rank, before, arrays)
    totals = []
    for slot, arrays in zip(slots, buckets, strict=True):
        before, *sums = _wait(reducer, slot, rank, before, arrays)
        totals.append(sums)
    return totals


def _number_of(arrays: Sequence[Any]) -> jax.Array:
    """Returns a number that the compiler cannot know before all arrays are computed."""
    firsts = [jnp.ravel(x)[:1].astype(jnp.float32) for x in arrays if jnp.size(x)]
    return jnp.isnan(jnp.concatenate(firsts)).any().astype(jnp.int32) if firsts else jnp.int32(0)


def _start(
    reducer: RingReducer, slot: int, rank: Any, before: Any, arrays: Sequence[jax.Array]
) -> Any:
    def start(rank: np.ndarray, before: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
        reducer.start(slot, rank, arrays, int(before) // 2)
        return [before.copy()]

    with jax.named_scope(RING_START):
        return _jax.host_call(start, [_NUMBER], rank, before, *arrays)[0]


def _wait(
    reducer: RingReducer, slot: int, rank: Any, before: Any, arrays: Sequence[jax.Array]
) -> Any:
    def wait(rank: np.ndarray, before: np.ndarray) -> list[np.ndarray]:
        return [np.zeros((), np.int32), *reducer.wait(slot, rank)]

    with jax.named_scope(RING_WAIT):
        return _jax.host_call(
            wait, [_NUMBER, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)], rank, before
        )
