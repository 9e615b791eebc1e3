"""How many steps one compiled program runs: grouping batches, and choosing their number by the clock."""

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding

from tnt_jax import _jax
from tnt_jax.data.sources import HostBatch

# A program that lasts this long hides what the host spends on starting it, which is well below a millisecond.
_TARGET_S = 0.005
_MOST_STEPS = 128


class Placed(NamedTuple):
    """Batches on the devices, for one program.

    Attributes:
        batch: Arrays `[rows, ...]`; of several steps `[steps, rows, ...]`.
        num_rows: Real rows of all steps.
        num_steps: Steps of the program.
    """

    batch: Any
    num_rows: int
    num_steps: int = 1


def in_groups(items: Iterator[HostBatch], size: int) -> Iterator[list[HostBatch]]:
    """Yields batches in order, in groups of `size` of equal shapes; those that fill no group come one by one.

    Args:
        items: Host batches.
        size: Batches of a group, at least 1.
    """
    group: list[HostBatch] = []
    for item in items:
        if group and _signature(item) != _signature(group[0]):
            yield from ([one] for one in group)
            group = []
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    yield from ([one] for one in group)


def stack(batches: list[Any]) -> Any:
    """Returns pytrees of arrays `[rows, ...]` as one of arrays `[batches, rows, ...]`."""
    return jax.tree.map(lambda *arrays: np.stack(arrays), *batches)


def one_by_one(step: Callable) -> Callable:
    """Returns the function `(state, sums, batches) -> (state, sums)` that runs `step` for each of some stacked batches.

    Args:
        step: The function `(state, sums, batch) -> (state, sums)`.
    """

    def steps(state: Any, sums: Any, batches: Any) -> tuple[Any, Any]:
        for index in range(len(jax.tree.leaves(batches)[0])):
            state, sums = step(state, sums, jax.tree.map(lambda x, index=index: x[index], batches))
        return state, sums

    return steps


def scanned(step: Callable, sharding: NamedSharding) -> Callable:
    """Returns the jitted function `(params, model_state, sums, batches) -> sums`: an evaluation step for each stacked batch.

    Args:
        step: The jitted function `(params, model_state, sums, batch) -> sums`.
        sharding: Of the stacked batches `[steps, rows, ...]`.
    """
    within = _jax.unjitted(step)

    def steps(params: Any, model_state: Any, sums: Any, batches: Any) -> Any:
        return jax.lax.scan(lambda sums, batch: (within(params, model_state, sums, batch), None), sums, batches)[0]

    return jax.jit(steps, in_shardings=(None, None, None, sharding))


def mapped(step: Callable, sharding: NamedSharding) -> Callable:
    """Returns the jitted function `(params, model_state, inputs) -> outputs`: a prediction step for each of some stacked inputs.

    Args:
        step: The jitted function `(params, model_state, inputs) -> outputs`.
        sharding: Of stacked inputs and outputs `[steps, rows, ...]`.
    """
    within = _jax.unjitted(step)

    def steps(params: Any, model_state: Any, inputs: Any) -> Any:
        return jax.lax.map(lambda x: within(params, model_state, x), inputs)

    return jax.jit(steps, in_shardings=(None, None, sharding), out_shardings=sharding)


def choose_num_steps(step_s: float, *, available: int | None) -> int:
    """Returns how many steps one program should run: a power of two, enough to make its start cheap beside its run.

    Args:
        step_s: Seconds of a step.
        available: Steps of an epoch, of which at least two programs are made; None when unknown.
    """
    wanted = 2 ** math.ceil(math.log2(max(_TARGET_S / step_s, 1)))
    fitting = _MOST_STEPS if available is None else 2 ** int(math.log2(max(available // 2, 1)))
    return min(wanted, fitting, _MOST_STEPS)


def _signature(item: HostBatch) -> Any:
    # Ranks pad a batch alike, so that all processes group alike.
    return item.num_rows, item.mask is None, [(np.shape(x), np.asarray(x).dtype) for x in jax.tree.leaves(item.data)]
