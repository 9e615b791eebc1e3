"""Which parameters are blocks of a list."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tnt_jax.adapters.base import VariablePath
from tnt_jax.sharded.blocks.block_list import BlockList, Staged

W = np.zeros((2, 3), np.float32)


def names(params, path):
    found = BlockList.of(params, path)
    return found and list(found.names)


@pytest.mark.parametrize(
    ("params", "path", "expected"),
    [
        (
            {f"layers_{i}": {"w": W} for i in range(11)},
            "layers",
            [f"layers_{i}" for i in range(11)],
        ),
        ({"net": {"layers_0": {"w": W}, "layers_1": {"w": W}}}, "net/layers", None),
        ({"layers": {0: {"w": W}, 1: {"w": W}}, "head": W}, "/layers/", ["layers/0", "layers/1"]),
        ({"block4": {"w": W}, "block5": {"w": W}}, "block", ["block4", "block5"]),
        # The first of Keras's automatic names has no number.
        ({"dense": {"w": W}, "dense_2": {"w": W}}, "dense", ["dense", "dense_2"]),
        # Stacked layers, beside a list of another name.
        ({"layers": {"w": W}, "layer_0": {"w": W}}, "layers", None),
        ({"layers": {"0": {"w": W}, "norm": W}}, "layers", None),
        ({"layers_0": W, "layers_1": W}, "layers", None),
    ],
)
def test_blocks_are_found_by_their_numbers(params, path, expected):
    if path == "net/layers":
        expected = ["net/layers_0", "net/layers_1"]
    assert names(params, path) == expected


def test_keras_layers_are_found_by_their_own_names_too():
    params = {
        VariablePath(f"block_{i}/norm_{i + 5}/{name}", f"layers/Block_{i + 3}/norm/{name}"): W
        for i in range(2)
        for name in ("w", "b")
    }
    assert names(params, "layers/Block") == ["layers/Block_3", "layers/Block_4"]
    assert names(params, "block") == ["block_0", "block_1"]
    assert BlockList.of(params, "block").arrays == ("b", "w")


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"w": W, "b": W}, "layers_1 has b, which layers_0 has not"),
        ({"b": W}, "layers_0 has w, which layers_1 has not"),
        ({"w": W[:1]}, r"layers_1/w is float32\[1, 3\], and layers_0/w is float32\[2, 3\]"),
        ({"w": W.astype(np.float16)}, r"layers_1/w is float16\[2, 3\], and"),
    ],
)
def test_a_block_with_other_arrays_is_refused(block, message):
    with pytest.raises(ValueError, match=f"over 'layers' needs equal blocks, but {message}"):
        BlockList.of({"layers_0": {"w": W}, "layers_1": block}, "layers")


def test_stacked_parameters_become_those_of_the_model_again():
    params = {
        "layers_1": {"w": jnp.ones(2)}, "a": jnp.full(3, 2), "layers_0": {"w": jnp.zeros(2)},
        "z": jnp.full(1, 3),
    }  # fmt: skip
    staged = Staged.of(params, BlockList.of(params, "layers"), [jnp.eye(2)])
    assert list(staged.arrays) == ["a", "z", "layers/w"]
    doubled = jax.tree.map(lambda x: 2 * x, staged)
    leaves = doubled.leaves(list)
    assert [x.tolist() for x in leaves] == [[4, 4, 4], [2, 0], [0, 2], [6]]
    with pytest.raises(TypeError, match=r"params\['a'\] cannot be read: pass params to apply"):
        staged["a"]
