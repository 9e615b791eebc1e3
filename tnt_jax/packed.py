"""Small arrays as one, so that a program has few results and the devices exchange few arrays."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

# A larger array travels alone: a copy of it would take longer than it saves, and memory.
_LARGE_BYTES = 2**18


@jax.tree_util.register_pytree_node_class
class Packed:
    """A pytree of arrays of which the small ones of a dtype lie one behind the other in one array `[1, n]`.

    Attributes:
        arrays: The packed arrays `[1, n]`, in the order of dtypes, and the large ones `[1, ...]`; this object's leaves.
    """

    def __init__(self, arrays: Sequence[Any], layout: tuple[Any, tuple[Any, ...]]) -> None:
        self.arrays, self._layout = tuple(arrays), layout

    @classmethod
    def of(cls, tree: Any) -> "Packed":
        """Packs a pytree of arrays or numbers."""
        leaves, structure = jax.tree.flatten(jax.tree.map(jnp.asarray, tree))
        shapes = tuple((x.shape, x.dtype) for x in leaves)
        return cls([_join([leaves[index] for index in group])[None] for group in _groups(shapes)], (structure, shapes))

    def unpack(self) -> Any:
        """Returns the pytree."""
        structure, shapes = self._layout
        return jax.tree.unflatten(structure, [leaf for _, leaf in sorted(self._parts(shapes), key=lambda part: part[0])])

    def _parts(self, shapes: tuple[Any, ...]) -> Iterator[tuple[int, jax.Array]]:
        for array, group in zip(self.arrays, _groups(shapes), strict=True):
            flat, start = array.reshape(-1), 0
            for index in group:
                shape, _ = shapes[index]
                size = math.prod(shape)
                yield index, flat[start : start + size].reshape(shape)
                start += size

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Any, tuple[Any, ...]]]:
        """Returns the leaves and what `tree_unflatten` needs besides."""
        return self.arrays, self._layout

    @classmethod
    def tree_unflatten(cls, layout: tuple[Any, tuple[Any, ...]], arrays: Sequence[Any]) -> "Packed":
        """Returns what `tree_flatten` took apart."""
        return cls(arrays, layout)


def _join(arrays: list[jax.Array]) -> jax.Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate([x.reshape(-1) for x in arrays])


def _groups(shapes: tuple[Any, ...]) -> list[list[int]]:
    """Returns the positions of the arrays that lie in one array."""
    groups: dict[Any, list[int]] = {}
    for index, (shape, dtype) in enumerate(shapes):
        is_large = math.prod(shape) * dtype.itemsize >= _LARGE_BYTES
        groups.setdefault(index if is_large else dtype, []).append(index)
    return list(groups.values())
