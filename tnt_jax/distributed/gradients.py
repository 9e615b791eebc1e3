"""The entry point for gradient sums; `sum_gradients` chooses the engine.

The engine is the compiler's collectives or the ring all-reduce between CPU processes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from tnt_jax import _jax
from tnt_jax.distributed import cpu_ring
from tnt_jax.distributed.backward_order import prepend_to_order
from tnt_jax.distributed.fused_psum import psum
from tnt_jax.distributed.reduction import Reduction, sum_compressed, sum_over_ranks


class Summed(NamedTuple):
    """The result of an exchange; everything but the residual is the same on all ranks.

    Attributes:
        grads: Sums of the gradients.
        first: Sums of the values that are ready before any gradient.
        others: Sums of the other values that a step exchanges.
        residual: What compression left out of this rank's gradients, arrays `[1, ...]`; None
            without compression.
    """

    grads: Any
    first: Any
    others: Any
    residual: Any


def sum_gradients(
    grads: Any,
    reduction: Reduction,
    *,
    order: Sequence[int],
    first: Any = (),
    others: Any = (),
    residual: Any = None,
    after: Any = (),
    update: Any = 0,
) -> Summed:
    """Returns the sums over the ranks of the values that a step exchanges, inside `shard_map`.

    Args:
        grads: Gradients that vary over the ranks.
        reduction: How they are summed.
        order: Indices of the leaves of `grads`, in order of availability, earliest first.
        first: Values that are ready before any gradient, such as the loss; they are sent in the
            first bucket.
        others: Other values to sum, in any bucket.
        residual: What compression left out of this rank's gradients in earlier steps, arrays `[1,
            ...]`; None without compression.
        after: Other values that XLA sums, before or while the gradients are computed; see
            `sum_over_ranks`.
        update: Number of the step since the start of training; detects processes that are at
            different steps.
    """
    if residual is not None:
        own = jax.tree.map(lambda x: x[0], residual)
        first, others = psum(first), psum(others)
        grads, own = sum_compressed(grads, own, reduction, order=order)
        return Summed(grads, first, others, jax.tree.map(lambda x: x[None], own))
    if reduction.by_ring:
        # Nothing may be left to XLA that could start after the ring on one process and before it on
        # another.
        ahead = (first, others)
        order = prepend_to_order(ahead, order)
        (first, others), grads = sum_over_ranks(
            (ahead, grads), reduction, order=order, after=after, update=update
        )
        return Summed(grads, first, others, None)
    first, grads = sum_over_ranks((first, grads), reduction, order=prepend_to_order(first, order))
    return Summed(grads, first, psum(others), None)


def waits_for_ring(equation: Any) -> bool:
    """Returns whether an equation of a trace waits for sums of the ring."""
    return _jax.called_function(equation) == "wait"


class EpochExchange:
    """Announces the epochs of training to the engine that sums gradients.

    It has no effect if the compiler's collectives sum them.

    Args:
        reduction: How gradients are summed.
    """

    def __init__(self, reduction: Reduction) -> None:
        self._is_ours = reduction.by_ring

    def prepare(self) -> None:
        """Connects the processes; all must call it."""
        if self._is_ours:
            cpu_ring.connect()

    def begin(self, epoch: int, step: int, update: int) -> None:
        """Records the position in training, for the errors of processes that are elsewhere.

        Args:
            epoch: Epoch, from 1 on.
            step: Next step of the epoch, from 1 on.
            update: Number of the next step in the whole training.
        """
        if self._is_ours:
            cpu_ring.connect().begin_epoch(epoch, step, update)

    def end(self, num_steps: int) -> None:
        """Raises an error on all processes unless all ended the epoch after `num_steps` steps."""
        if self._is_ours:
            cpu_ring.connect().end_epoch(num_steps)
