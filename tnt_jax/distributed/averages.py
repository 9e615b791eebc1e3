"""Averages over the ranks of state that a model updates itself, such as moving statistics.

Used inside a step.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tnt_jax import _jax


class StateAverage:
    """The average of model state over the ranks, split into the parts before and after the sum.

    Leaves that differ between ranks are averaged; leaves that are equal on all ranks are kept.

    Args:
        tree: Model state after a step, inside `shard_map`.
        share: This rank's part of the global batch's real rows, a scalar that sums to 1 over the
            ranks; None for equal parts.

    Attributes:
        summands: What this rank adds to the averages; pass their sums over the ranks to `result`.

    Raises:
        TypeError: If a leaf that is not floating differs between ranks.
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

    @property
    def unchanged(self) -> list[jax.Array]:
        """The leaves that are the same on every rank."""
        return [x for x in jax.tree.leaves(self._tree) if not _jax.is_varying(x)]

    def result(self, totals: list[jax.Array]) -> Any:
        """Returns the model state with the averaged leaves.

        Args:
            totals: Sums of `summands` over the ranks.
        """
        num_ranks = jax.lax.axis_size(_jax.rank_axes())
        remaining = iter(totals)

        def average(leaf: jax.Array) -> jax.Array:
            if not _jax.is_varying(leaf):
                return leaf
            return next(remaining) / num_ranks if self._share is None else next(remaining)

        return jax.tree.map(average, self._tree)


def check_can_be_averaged(path: Any, leaf: jax.Array) -> None:
    """Raises a TypeError if a leaf of the model state that differs between ranks is not floating.

    Args:
        path: Key path of the leaf.
        leaf: The leaf.
    """
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise TypeError(
            f"Model state {jax.tree_util.keystr(path)} ({leaf.dtype}) differs between ranks and "
            "cannot be averaged. Only floating state may depend on the batch; make this state the "
            f"same on every rank, for instance with jax.lax.psum(..., {_jax.DATA_AXIS!r})."
        )
