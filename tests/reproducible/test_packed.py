"""Small arrays travel as one, and come back as they were."""

import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax.reproducible.batch_sum import Packed

TREE = {
    "kernel": jnp.arange(6.0).reshape(2, 3),
    "count": jnp.arange(4, dtype=jnp.int32),
    "large": jnp.arange(2.0**17).reshape(2, -1),
    "half": [jnp.arange(3, dtype=jnp.bfloat16), jnp.ones((), jnp.bfloat16)],
    "nothing": jnp.zeros((0, 2)),
    "loss": 2.5,
}


def test_small_arrays_of_a_dtype_lie_in_one_and_large_ones_alone():
    packed = Packed.of(TREE)
    assert sorted((x.shape, str(x.dtype)) for x in packed.arrays) == [
        ((1, 2, 2**16), "float32"),
        ((1, 4), "bfloat16"),
        ((1, 4), "int32"),
        ((1, 7), "float32"),
    ]


def test_what_was_packed_comes_back_from_a_program():
    result = jax.jit(lambda tree: jax.tree.map(lambda x: x + x, Packed.of(tree)))(TREE).unpack()
    assert jax.tree.structure(result) == jax.tree.structure(TREE)
    for found, expected in zip(jax.tree.leaves(result), jax.tree.leaves(TREE), strict=True):
        assert found.dtype == jnp.asarray(expected).dtype
        np.testing.assert_array_equal(found, np.asarray(expected) * 2)


def test_an_empty_tree():
    assert Packed.of(None).arrays == ()
    assert Packed.of(None).unpack() is None
