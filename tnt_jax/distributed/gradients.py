"""The entry point for the sums of a step: gradients, and what is summed with them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

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
    """
    if residual is not None:
        own = jax.tree.map(lambda x: x[0], residual)
        first, others = psum(first), psum(others)
        grads, own = sum_compressed(grads, own, reduction, order=order)
        return Summed(grads, first, others, jax.tree.map(lambda x: x[None], own))
    first, grads = sum_over_ranks((first, grads), reduction, order=prepend_to_order(first, order))
    return Summed(grads, first, psum(others), None)
