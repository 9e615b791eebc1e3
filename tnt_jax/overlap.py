"""Sums over ranks on CPUs that travel while the program computes.

A compiled program hands its gradients to a ring of processes in callbacks, each as soon as it is finished, goes on computing, and
waits for the sums when all have started. XLA's own sums on CPUs stop the program, each until the slowest process has come.
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
from tnt_jax.hlo import RING_START, RING_WAIT
from tnt_jax.host_call import host_call
from tnt_jax.ring import Ring
from tnt_jax.ring_connection import Door, connect_neighbours, open_door
from tnt_jax.runtime import Runtime, init, own_address

_KEY = "tnt_jax/ring"
# A process may read and prepare its data for long before it needs the others.
_FIRST_MEETING_S = 3600
_CONNECT_S = 60
_NUMBER = jax.ShapeDtypeStruct((), np.int32)
_slots = itertools.count()


class _Round:
    """One sum of one bucket: what the ranks of this process bring, and when it has started."""

    def __init__(self, num_ranks: int) -> None:
        self.parts: dict[int, Sequence[np.ndarray]] = {}
        self.ticket: Future[Future] = Future()
        self.unread = num_ranks


class Exchange:
    """Sums over the ranks of all processes, started and waited for by callbacks of compiled programs.

    A bucket has a slot, a number of its own in all programs; each time a program starts it, all ranks of the process bring their
    part, and later read the sum.

    Args:
        ring: Connections to the other processes.
        num_ranks: Ranks of this process.
    """

    def __init__(self, ring: Ring, num_ranks: int) -> None:
        self._ring, self._num_ranks = ring, num_ranks
        self._lock = threading.Lock()
        self._rounds: dict[tuple[int, int], _Round] = {}
        self._started: dict[Any, Any] = defaultdict(itertools.count)
        self._read: dict[Any, Any] = defaultdict(itertools.count)

    def start(self, slot: int, rank: Any, arrays: Sequence[Any]) -> None:
        """Brings a rank's part of a bucket; with the last part the sum begins.

        Args:
            slot: Number of the bucket.
            rank: The rank.
            arrays: The part; it is copied.
        """
        own = [np.asarray(x) if self._num_ranks == 1 else np.array(x) for x in arrays]
        with self._lock:
            place = slot, next(self._started[slot, int(rank)])
            entry = self._rounds.setdefault(place, _Round(self._num_ranks))
            entry.parts[int(rank)] = own
            is_last = len(entry.parts) == self._num_ranks
        if is_last:
            # In the order of the ranks, so that the sum is the same in every run.
            parts = [entry.parts[rank] for rank in sorted(entry.parts)]
            entry.parts = {}
            try:
                entry.ticket.set_result(
                    self._ring.start([functools.reduce(np.add, arrays) for arrays in zip(*parts, strict=True)])
                )
            except Exception as error:
                entry.ticket.set_exception(error)  # For the ranks that wait already.
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
            place = slot, next(self._read[slot, int(rank)])
            entry = self._rounds.setdefault(place, _Round(self._num_ranks))
        totals = self._ring.wait(entry.ticket.result())
        with self._lock:
            entry.unread -= 1
            if entry.unread == 0:
                del self._rounds[place]
        return totals


def connect() -> Exchange:
    """Returns the exchange of the job, once all its processes have come here for the first time.

    Raises:
        TimeoutError: If a neighbour cannot be reached.
    """
    return _connect(init())


@functools.cache
def _connect(runtime: Runtime) -> Exchange:
    process, num_processes = jax.process_index(), jax.process_count()
    client = _jax.coordination_client()
    # Where a host has no address of its own, there is one host: XLA's own sums could not reach another either.
    listener, own = open_door(own_address() or "127.0.0.1")
    client.key_value_set(f"{_KEY}/{process}", f"{own.host} {own.port} {own.secret}")
    texts = [client.blocking_key_value_get(f"{_KEY}/{other}", _FIRST_MEETING_S * 1000) for other in range(num_processes)]
    doors = [Door(host, int(port), secret) for host, port, secret in (text.split(" ") for text in texts)]
    neighbours = connect_neighbours(process, doors, listener=listener, timeout_s=_CONNECT_S)
    return Exchange(Ring(process, num_processes, *neighbours), len(runtime.local_ranks))


def sum_in_background(
    exchange: Exchange, buckets: Sequence[Sequence[jax.Array]], *, after: Sequence[jax.Array] = ()
) -> list[Any]:
    """Returns the sums of buckets over ranks, inside `shard_map` in a program for CPUs.

    Each bucket starts when its arrays are finished; waiting begins when all have started.

    Args:
        exchange: What sums.
        buckets: Arrays of one type each, those in front that are ready first.
        after: What must be computed before the first start: whatever XLA itself exchanges between ranks and no bucket depends on.
    """
    rank = jax.lax.axis_index(_jax.DATA_AXIS)
    slots = [next(_slots) for _ in buckets]
    # Numbers that each callback takes of the one before keep their order the same on all processes.
    before: Any = _number_of([x for x in after if jnp.issubdtype(jnp.result_type(x), jnp.inexact)])
    for slot, arrays in zip(slots, buckets, strict=True):
        before = _start(exchange, slot, rank, before, arrays)
    totals = []
    for slot, arrays in zip(slots, buckets, strict=True):
        before, *sums = _wait(exchange, slot, rank, before, arrays)
        totals.append(sums)
    return totals


def _number_of(arrays: Sequence[Any]) -> jax.Array:
    """Returns a number that the compiler cannot know before it has computed all arrays."""
    firsts = [jnp.ravel(x)[:1].astype(jnp.float32) for x in arrays if jnp.size(x)]
    return jnp.isnan(jnp.concatenate(firsts)).any().astype(jnp.int32) if firsts else jnp.int32(0)


def _start(exchange: Exchange, slot: int, rank: Any, before: Any, arrays: Sequence[jax.Array]) -> Any:
    def start(rank: np.ndarray, before: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
        exchange.start(slot, rank, arrays)
        return [np.zeros((), np.int32)]

    with jax.named_scope(RING_START):
        return host_call(start, [_NUMBER], rank, before, *arrays)[0]


def _wait(exchange: Exchange, slot: int, rank: Any, before: Any, arrays: Sequence[jax.Array]) -> Any:
    def wait(rank: np.ndarray, before: np.ndarray) -> list[np.ndarray]:
        return [np.zeros((), np.int32), *exchange.wait(slot, rank)]

    with jax.named_scope(RING_WAIT):
        return host_call(wait, [_NUMBER, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)], rank, before)
