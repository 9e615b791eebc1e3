"""Packs small arrays into one, for programs with few results and few arrays to exchange."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from tnt_jax.distributed.sums.fused_psum import flatten, groups_of_small, split_like

# A larger array is sent separately: a copy would cost memory and more time than it saves.
_LARGE_BYTES = 2**18


@jax.tree_util.register_pytree_node_class
class Packed:
    """A pytree of arrays whose small leaves are concatenated by dtype into arrays `[1, n]`."""

    def __init__(self, arrays: Sequence[Any], layout: tuple[Any, tuple[Any, ...]]) -> None:
        self.arrays = tuple(arrays)
        self._layout = layout

    @classmethod
    def of(cls, tree: Any) -> "Packed":
        """Packs a pytree of arrays or numbers."""
        leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
        shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves)
        groups = groups_of_small(shapes, _LARGE_BYTES)
        return cls(
            [_join([leaves[index] for index in group])[None] for group in groups],
            (structure, shapes),
        )

    def unpack(self) -> Any:
        """Returns the pytree."""
        structure, shapes = self._layout
        leaves: dict[int, jax.Array] = {}
        for array, group in zip(self.arrays, groups_of_small(shapes, _LARGE_BYTES), strict=True):
            leaves.update(
                zip(
                    group,
                    split_like(array.reshape(-1), [shapes[index] for index in group]),
                    strict=True,
                )
            )
        return jax.tree.unflatten(structure, [leaves[index] for index in range(len(shapes))])

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, tuple[Any, ...]]]:
        """Returns the leaves and the other arguments of `tree_unflatten`."""
        return self.arrays, self._layout

    @classmethod
    def tree_unflatten(cls, layout: tuple[Any, tuple[Any, ...]], arrays: Sequence[Any]) -> "Packed":
        """Reverses `tree_flatten`."""
        return cls(arrays, layout)


def _join(arrays: list[jax.Array]) -> jax.Array:
    return arrays[0] if len(arrays) == 1 else flatten(arrays)
