"""How many steps one compiled program runs, with batches grouped accordingly, and how many run."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from itertools import chain, groupby, islice
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from tnt_jax import _jax
from tnt_jax.data.sources import HostBatch

# A program that runs this long hides the host's cost of starting it, which is well below a
# millisecond.
_TARGET_S = 0.005
_MOST_STEPS = 128
# Programs that the host may be ahead of the devices. Each holds a batch, and virtual CPU devices
# deadlock with too many.
IN_FLIGHT = 4
# The same for one device that runs alone: the time that the programs take, and their number.
_AHEAD_S, _MOST_IN_FLIGHT = 0.02, 32


class DeviceBatches(NamedTuple):
    """Batches on the devices, for one program."""

    batch: Any  # Arrays `[rows, ...]`, or `[steps, rows, ...]` for several steps.
    num_rows: int  # Real rows of all steps.
    num_steps: int = 1
    # Real rows of each shard in every step, if each process brings its own; see `HostBatch`.
    shards: tuple[slice, ...] | None = None
    first_row: int = 0  # Of a step in the global batch, of which a group of ranks has a part.

    @property
    def real_rows(self) -> tuple[slice, ...]:
        """The positions of a step's real rows: one range, or one per shard."""
        return (slice(0, self.num_rows // self.num_steps),) if self.shards is None else self.shards


def lacks_memory(error: Exception) -> bool:
    """Returns whether an error says that a device, or the host, has no memory for an array."""
    return "RESOURCE_EXHAUSTED" in str(error)


class InFlight:
    """The programs that the devices may still run, so that the host is never far ahead of them.

    On a machine with other work, a thread that was woken waits some milliseconds for a core. A host
    that is a few short steps ahead would leave the devices idle then. Where no other process and no
    second device takes part (`is_alone`), it waits seldom; it gets further ahead, too, unless a job
    of several processes must agree on where training ends. Of programs that just fit the memory,
    `most` is 0: CPUs hold the memory of each program that was started.
    """

    def __init__(self, *, is_alone: bool = False, most: int | None = None) -> None:
        self._results: deque[jax.Array] = deque()
        self._is_alone = is_alone and most is None
        self._limit = IN_FLIGHT if most is None else most
        self._highest = _MOST_IN_FLIGHT if jax.process_count() == 1 else IN_FLIGHT
        # Time at which the programs before `_results` had run.
        self._since_s = 0.0

    def add(self, result: jax.Array) -> None:
        """Waits until few programs run.

        No later program may overwrite this result of the one that was started last.
        """
        self._results.append(result)
        if len(self._results) <= self._limit:
            return
        if self._is_alone:
            self._wait_for_half()
        else:
            jax.block_until_ready(self._results.popleft())

    def _wait_for_half(self) -> None:
        """Waits until half of the programs have run; limits later ones by the time it took."""
        num_waited = len(self._results) // 2
        for _ in range(num_waited - 1):
            self._results.popleft()
        jax.block_until_ready(self._results.popleft())
        now_s = time.perf_counter()
        if self._since_s:
            step_s = (now_s - self._since_s) / num_waited
            self._limit = min(max(int(_AHEAD_S / step_s), IN_FLIGHT), self._highest)
        self._since_s = now_s


def in_groups(items: Iterator[HostBatch], size: int) -> Iterator[list[HostBatch]]:
    """Yields batches in order, in groups of `size` with equal shapes, the others one by one."""
    if size == 1:
        yield from ([item] for item in items)
        return
    for _, alike in groupby(items, key=signature):
        while group := list(islice(alike, size)):
            yield from [group] if len(group) == size else ([item] for item in group)


def stack(batches: list[Any]) -> Any:
    """Stacks pytrees of arrays `[rows, ...]` into one of arrays `[batches, rows, ...]`."""
    return jax.tree.map(lambda *arrays: np.stack(arrays), *batches)


def scanned(step: Callable, sharding: NamedSharding | None) -> Callable:
    """Returns the jitted `(params, model_state, sums, batches) -> sums` of an evaluation step."""
    plain_step = _jax.unjitted(step)

    def steps(params: Any, model_state: Any, sums: Any, batches: Any) -> Any:
        return jax.lax.scan(
            lambda sums, batch: (plain_step(params, model_state, sums, batch), None), sums, batches
        )[0]

    return jax.jit(steps, in_shardings=(None, None, None, sharding))


def mapped(step: Callable, sharding: NamedSharding | None) -> Callable:
    """Returns the jitted `(params, model_state, inputs, first_rows) -> outputs` of a prediction."""
    plain_step = _jax.unjitted(step)

    def steps(params: Any, model_state: Any, inputs: Any, first_rows: Any) -> Any:
        return jax.lax.map(lambda x: plain_step(params, model_state, *x), (inputs, first_rows))

    return jax.jit(steps, in_shardings=(None, None, sharding, None), out_shardings=sharding)


def choose_num_steps(step_s: float, *, available: int | None) -> int:
    """Returns how many steps one program should run: a power of two.

    It is large enough to make the start of the program cheap compared with its run. The steps that
    are available in an epoch, if known, are divided into at least two programs.
    """
    wanted = 2 ** math.ceil(math.log2(max(_TARGET_S / step_s, 1)))
    fitting = _MOST_STEPS if available is None else 2 ** int(math.log2(max(available // 2, 1)))
    return min(wanted, fitting, _MOST_STEPS)


def signature(item: HostBatch) -> Any:
    """Returns what batches must have in common to be stacked."""
    # Ranks pad a batch alike, so all processes form the same groups.
    return (
        item.num_rows,
        item.mask is None,
        item.shards,
        [(np.shape(x), np.asarray(x).dtype) for x in jax.tree.leaves(item.data)],
    )


def local_rows(x: jax.Array, dim: int = 0) -> np.ndarray:
    """Returns this process's rows of an array with rows along `dim`, each once and in order."""
    parts = {shard.index[dim].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([np.asarray(parts[start]) for start in sorted(parts)], axis=dim)


class RowsInOrder:
    """Collects the real rows of outputs, shard after shard."""

    def __init__(self) -> None:
        self._pieces: dict[int, list[Any]] = {}

    def add(self, outputs: Any, group: DeviceBatches) -> None:
        """Adds the rows of a group of batches, whose host outputs are `[steps, rows, ...]`."""
        for shard, rows in enumerate(group.real_rows):
            self._pieces.setdefault(shard, []).extend(
                jax.tree.map(lambda x, at=(step, rows): x[at], outputs)
                for step in range(group.num_steps)
            )

    def joined(self) -> Any:
        """Returns all rows, as host arrays `[examples, ...]`; a ValueError if there are none."""
        if not self._pieces:
            raise ValueError("The dataset is empty: at least one example is needed.")
        pieces = chain.from_iterable(self._pieces.values())
        return jax.tree.map(lambda *pieces: np.concatenate(pieces), *pieces)


def described(group: DeviceBatches) -> DeviceBatches:
    """Returns a group of batches as descriptions of its arrays."""

    def describe(x: Any) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=getattr(x, "sharding", None))

    return group._replace(batch=jax.tree.map(describe, group.batch))


def described_batch(group: DeviceBatches) -> Any:
    """Returns shapes and dtypes of one of the batches of a group."""
    first_dim, dtype_of = int(group.num_steps > 1), jax.dtypes.canonicalize_dtype
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[first_dim:], dtype_of(x.dtype)), group.batch
    )
