"""Blocks of a list among the parameters: `layers_0`, `layers_1`, ..., as modules of a list have.

Their arrays stay apart in the training state. A step works on `Staged` parameters, in which the
arrays of all blocks are stacked as those of `nn.scan` are.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, NoReturn

import jax

from tnt_jax import _jax
from tnt_jax.train.state import state_arrays

# What may stand between the path of a list and the number of a block.
_SEPARATORS = ("_", "/", "")


@dataclass(frozen=True)
class BlockList:
    """The arrays of equal blocks, as leaves of the parameters of a model."""

    path: str  # Of the list, such as `layers`.
    names: tuple[str, ...]  # Path of each block, such as `layers_0`, in order of the numbers.
    arrays: tuple[str, ...]  # Path of each array within a block, such as `Dense_0/kernel`.
    indices: tuple[tuple[int, ...], ...]  # Of every block's leaf, for each of these arrays.

    @classmethod
    def of(cls, params: Any, path: str) -> "BlockList | None":
        """Returns the blocks of a list, also by Keras's names; None if no modules have the path."""
        saved, leaves = (list(x) for x in zip(*state_arrays(params).items(), strict=True))
        stem = path.strip("/")
        keys = jax.tree_util.tree_leaves_with_path(params)
        by_library = [jax.tree_util.keystr(key, simple=True, separator="/") for key, _ in keys]
        for paths in (saved, by_library):
            blocks = _blocks_at(paths, stem)
            if blocks:
                if paths is not saved:
                    blocks = {name: _renamed(block, saved) for name, block in blocks.items()}
                _check_equal(blocks, leaves, stem)
                first = next(iter(blocks.values()))
                indices = tuple(tuple(block[name] for block in blocks.values()) for name in first)
                return cls(stem, tuple(blocks), tuple(first), indices)
        return None


@jax.tree_util.register_pytree_with_keys_class
class Staged:
    """A pytree of parameters, by path: single arrays, and then stacked blocks `[blocks, ...]`."""

    def __init__(self, arrays: dict[str, Any], blocks: BlockList, structure: Any) -> None:
        self.arrays = arrays
        self.blocks = blocks
        self.structure = structure

    @classmethod
    def of(cls, params: Any, blocks: BlockList, stacks: Iterable[Any]) -> "Staged":
        """Returns parameters of the model with these stacks for each array of the blocks."""
        in_blocks = {index for indices in blocks.indices for index in indices}
        leaves = enumerate(state_arrays(params).items())
        others = dict(item for index, item in leaves if index not in in_blocks)
        paths = [f"{blocks.path}/{name}" for name in blocks.arrays]
        stacked = dict(zip(paths, stacks, strict=True))
        return cls(others | stacked, blocks, jax.tree.structure(params))

    def leaves(self, unstack: Callable[[Any], Sequence[Any]]) -> list[Any]:
        """Returns leaves of the model's parameters, each stack as what `unstack` gives."""
        leaves: list[Any] = [None] * self.structure.num_leaves
        arrays = list(self.arrays.values())
        num_others = len(arrays) - len(self.blocks.arrays)
        for indices, stack in zip(self.blocks.indices, arrays[num_others:], strict=True):
            for index, x in zip(indices, unstack(stack), strict=True):
                leaves[index] = x
        others = iter(arrays[:num_others])
        return [next(others) if x is None else x for x in leaves]

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """Returns the arrays with their paths, for JAX."""
        children = [(jax.tree_util.DictKey(path), x) for path, x in self.arrays.items()]
        return children, (tuple(self.arrays), self.blocks, self.structure)

    @classmethod
    def tree_unflatten(cls, others: Any, arrays: Iterable[Any]) -> "Staged":
        """Returns parameters with other arrays, for JAX."""
        paths, blocks, structure = others
        return cls(dict(zip(paths, arrays, strict=True)), blocks, structure)

    def __getitem__(self, name: Any) -> NoReturn:
        """Raises a TypeError: an objective may not read parameters that lie on other stages."""
        raise TypeError(
            f"In a pipeline over the blocks {self.blocks.names[0]}, ... no device holds all "
            f"parameters, so params[{name!r}] cannot be read: pass params to apply alone."
        )


def _blocks_at(paths: Sequence[str], stem: str) -> dict[str, dict[str, int]]:
    """Returns the index of each array of each block, by the block's path and its own."""
    for separator in _SEPARATORS:
        numbered = re.compile(rf"({re.escape(stem + separator)}(\d+))/(.+)").fullmatch
        found = {index: match for index, path in enumerate(paths) if (match := numbered(path))}
        others = {
            index: path.removeprefix(f"{stem}/")
            for index, path in enumerate(paths)
            if path.startswith(f"{stem}/") and index not in found
        }
        # Of layers with automatic names, Keras gives the first one no number.
        has_unnumbered = bool(others) and separator == "_"
        if not found or (others and not has_unnumbered):
            continue
        blocks: dict[tuple[int, str], dict[str, int]] = {}
        if has_unnumbered:
            blocks[-1, stem] = {name: index for index, name in others.items()}
        for index, match in found.items():
            blocks.setdefault((int(match[2]), match[1]), {})[match[3]] = index
        return {name: blocks[number, name] for number, name in sorted(blocks)}
    return {}


def _renamed(block: dict[str, int], saved: Sequence[str]) -> dict[str, int]:
    """Returns the arrays of a block by their paths in files, which Keras numbers by their place."""
    keys = [saved[index].split("/") for index in block.values()]
    columns = zip(*(path[:-1] for path in keys), strict=False)
    common = len(list(takewhile(lambda column: len(set(column)) == 1, columns)))
    return {"/".join(path[common:]): i for path, i in zip(keys, block.values(), strict=True)}


def _check_equal(blocks: dict[str, dict[str, int]], leaves: Sequence[Any], stem: str) -> None:
    kinds = {
        name: {array: _jax.kind_of(leaves[index]) for array, index in block.items()}
        for name, block in blocks.items()
    }
    (first, expected), *others = kinds.items()
    for name, block in others:
        lacking = [(first, x, name) for x in expected if x not in block]
        lacking += [(name, x, first) for x in block if x not in expected]
        found = [f"{owner} has {x}, which {other} has not" for owner, x, other in lacking]
        found += [
            f"{name}/{x} is {block[x]}, and {first}/{x} is {kind}"
            for x, kind in expected.items()
            if block.get(x, kind) != kind
        ]
        if found:
            raise ValueError(
                f"A pipeline over {stem!r} needs equal blocks, but {found[0]}. Give the path of a "
                "list of equal blocks, or leave the axis 'stage' out of mesh."
            )
