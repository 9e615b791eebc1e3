"""Averages over the ranks, inside a step: of state that a model updates itself, and Adasum."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tnt_jax import _jax


def adasum(tree: Any, axis_name: str) -> Any:
    """Returns the Adasum of each array over the ranks of an axis, the same bits on every rank.

    Two gradients give `(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b` (Maleki et al. 2020,
    arXiv:2006.02924, section 3): their sum where they are orthogonal, their mean where they are
    parallel. More are combined in a binary tree, neighbours first (section 3.4). As in the paper's
    and Horovod's implementation, each array is combined by itself. Products are summed in float32.
    """
    num_ranks = jax.lax.axis_size(axis_name)
    if num_ranks & (num_ranks - 1):
        raise ValueError(
            f"Adasum combines ranks in pairs and needs a power of two of them, but {axis_name!r} "
            f'has {num_ranks}. Use op="average", or fewer ranks.'
        )
    rank = jax.lax.axis_index(axis_name)
    distance = 1
    while distance < num_ranks:
        pairs = [(source, source ^ distance) for source in range(num_ranks)]
        combined = partial(_combined, is_lower=rank & distance == 0)
        tree = jax.tree.map(combined, tree, jax.lax.ppermute(tree, axis_name, pairs))
        distance *= 2
    return _same_everywhere(tree, axis_name)


def _combined(own: jax.Array, other: jax.Array, is_lower: jax.Array) -> jax.Array:
    # Both partners compute the same sum in the same order.
    a = jnp.where(is_lower, own, other).astype(jnp.float32)
    b = jnp.where(is_lower, other, own).astype(jnp.float32)
    product, a_square, b_square = jnp.vdot(a, b), jnp.vdot(a, a), jnp.vdot(b, b)
    a_share, b_share = (
        1 - jnp.where(square > 0, product / (2 * jnp.where(square > 0, square, 1)), 0)
        for square in (a_square, b_square)
    )
    return (a_share * a + b_share * b).astype(own.dtype)


def _same_everywhere(tree: Any, axis_name: str) -> Any:
    """Returns arrays that are equal on all ranks marked as such, where arrays are marked."""
    if not _jax.tracks_varying(axis_name):
        return tree
    is_first = jax.lax.axis_index(axis_name) == 0
    return jax.tree.map(
        lambda x: jax.lax.psum(jnp.where(is_first, x, jnp.zeros_like(x)), axis_name), tree
    )


class StateAverage:
    """The average of model state over the ranks, split into the parts before and after the sum.

    Leaves that differ between ranks are averaged; leaves that are equal on all ranks are kept.
    `share` is this rank's part of the global batch's real rows; None for equal parts. `summands` is
    what this rank adds to the averages; pass their sums over the ranks to `result`.
    """

    def __init__(self, tree: Any, share: jax.Array | None) -> None:
        paths_and_leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
        varying = [(path, leaf) for path, leaf in paths_and_leaves if _jax.is_varying(leaf)]
        for path, leaf in varying:
            check_can_be_averaged(path, leaf)
        self._tree = tree
        self._share = share
        self.summands = [
            leaf if share is None else leaf * share.astype(leaf.dtype) for _, leaf in varying
        ]

    def result(self, totals: list[jax.Array]) -> Any:
        """Returns the model state, averaged from the sums of `summands` over the ranks."""
        num_ranks = jax.lax.axis_size(_jax.rank_axes())
        remaining = iter(totals)

        def average(leaf: jax.Array) -> jax.Array:
            if not _jax.is_varying(leaf):
                return leaf
            return next(remaining) / num_ranks if self._share is None else next(remaining)

        return jax.tree.map(average, self._tree)


def check_can_be_averaged(path: Any, leaf: jax.Array) -> None:
    """Raises a TypeError if a leaf of model state that differs between ranks is not floating."""
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise TypeError(
            f"Model state {jax.tree_util.keystr(path)} ({leaf.dtype}) differs between ranks and "
            "cannot be averaged. Only floating state may depend on the batch; make this state the "
            f"same on every rank, for instance with jax.lax.psum(..., {_jax.DATA_AXIS!r})."
        )
