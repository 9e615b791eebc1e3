"""Adasum: gradients added as far as they agree in direction.

The method is that of Maleki et al. 2020 (arXiv:2006.02924).
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from tnt_jax import _jax


def adasum(tree: Any, axis_name: str) -> Any:
    """Returns the Adasum of each array over the ranks of an axis, the same bits on every rank.

    Two gradients give `(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b` (section 3): their sum where
    they are orthogonal, their mean where they are parallel. More are combined in a binary tree,
    neighbours first (section 3.4). As in the paper's and Horovod's implementation, each array is
    combined by itself. Products are summed in float32.

    Args:
        tree: Floating arrays that vary over the ranks.
        axis_name: The axis, of a power of two ranks.

    Raises:
        ValueError: If the number of ranks is no power of two.
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
    a, b = (
        jnp.where(is_lower, first, second).astype(jnp.float32)
        for first, second in ((own, other), (other, own))
    )
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
