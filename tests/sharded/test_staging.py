"""Arrays of blocks that are cut along their own dimensions get to their stages, and back."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from tnt_jax import _jax
from tnt_jax.sharded.layout import Layout, at_stages
from tnt_jax.sharded.pipeline.pipeline import Pipeline

RNG = np.random.default_rng(0)
NUM_BLOCKS = 8
SHAPES = {"kernel": (3, 12), "wide": (8, 5), "bias": (4,), "odd": (3, 5)}
PARAMS = {
    f"layers_{i}": {
        name: RNG.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()
    }
    for i in range(NUM_BLOCKS)
} | {"head": RNG.normal(size=(4, 4)).astype(np.float32)}


def test_stages_get_their_blocks_and_gradients_return():
    mesh = Mesh(jax.devices()[:4], ("stage",), axis_types=(AxisType.Auto,))
    layout = Layout.of(PARAMS, mesh, pipeline=Pipeline("layers", microbatches=2))
    cut = {name: layout.axes[f"layers_0/{name}"] for name in SHAPES}
    assert cut == {
        "kernel": (None, "stage"), "wide": ("stage", None), "bias": ("stage",), "odd": (None, None)
    }  # fmt: skip
    weights = {name: RNG.normal(size=(NUM_BLOCKS, *SHAPES[name])) for name in SHAPES}

    def work(params):
        first = jax.lax.axis_index("stage") * 2

        def loss(params):
            here = at_stages(params, layout)
            assert here.shapes[1:] == [(NUM_BLOCKS, *SHAPES[name]) for name in sorted(SHAPES)]
            own = {path.removeprefix("layers/"): x for path, x in here.params.arrays.items()}
            return sum(
                jnp.sum(own[name] * jax.lax.dynamic_slice_in_dim(jnp.asarray(w), first, 2))
                for name, w in weights.items()
            ), [own[name] for name in SHAPES]

        (_, own), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return own, grads

    mapped = _jax.shard_map(
        work,
        mesh=mesh,
        in_specs=(layout.manual_specs,),
        out_specs=(jax.sharding.PartitionSpec("stage"), layout.manual_specs),
    )
    # Small arrays go together, there and back.
    assert str(jax.make_jaxpr(mapped)(PARAMS)).count("all_to_all[") == 2
    stacks, grads = jax.jit(mapped)(PARAMS)
    for name, stack in zip(SHAPES, stacks, strict=True):
        expected = np.stack([PARAMS[f"layers_{i}"][name] for i in range(NUM_BLOCKS)])
        np.testing.assert_array_equal(stack, expected)
    expected = {
        f"layers_{i}": {name: weights[name][i].astype(np.float32) for name in SHAPES}
        for i in range(NUM_BLOCKS)
    } | {"head": np.zeros((4, 4), np.float32)}
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), grads, expected)
