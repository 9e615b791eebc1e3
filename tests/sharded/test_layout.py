"""Where the arrays of a training state lie."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import AxisType, Mesh

from tnt_jax.sharded.layout import Layout, boxed_names
from tnt_jax.sharded.pipeline.pipeline import Pipeline


@pytest.fixture
def layout():
    devices = jax.devices()
    mesh = Mesh([devices[:4], devices[4:]], ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    return Layout.of(PARAMS, mesh, [("b/w", ())])


PARAMS = {
    "a": {"w": jnp.zeros((64, 32)), "bias": jnp.zeros(32)},
    "b": {"w": jnp.zeros((64, 32))},
    "w": jnp.zeros((32, 64)),
}


def specs(tree):
    return [tuple(sharding.spec) for sharding in jax.tree.leaves(tree)]


def test_parameters_are_cut_by_path(layout):
    # In the order of the leaves: a/bias, a/w, b/w, w.
    assert specs(layout.shardings) == [(None,), ("fsdp", None), (None, None), (None, "fsdp")]
    assert [cut and cut.dim for cut in layout.cuts] == [None, 0, None, 1]


def test_the_state_of_an_optimizer_lies_like_the_parameters(layout):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    state = jax.eval_shape(optimizer.init, PARAMS)
    placed = layout.like_params(state)
    assert jax.tree.structure(placed) == jax.tree.structure(state)
    moments = specs(layout.shardings)
    assert specs(placed) == [(), *moments, *moments]


def test_the_state_of_an_optimizer_by_name_lies_like_the_parameters(layout):
    compiled = {"a": {"w": {"m": PARAMS["a"]["w"], "v": PARAMS["a"]["w"]}}, "rate": jnp.zeros(())}
    assert specs(layout.like_params({"slots": compiled})) == [*[("fsdp", None)] * 2, ()]


def test_arrays_of_other_shapes_are_replicated(layout):
    factored = {"v_row": {"a": {"w": jax.ShapeDtypeStruct((64,), jnp.float32)}}}
    assert specs(layout.like_params(factored)) == [()]


def test_accumulated_gradients_lie_like_the_parameters(layout):
    sums = jax.tree.map(lambda x: jax.ShapeDtypeStruct((1, *x.shape), x.dtype), PARAMS)
    placed = specs(layout.like_params(sums, before=1))
    assert placed[1] == (None, "fsdp", None)
    assert placed[3] == (None, None, "fsdp")


def test_names_are_read_from_boxes():
    params = {"w": nn.LogicallyPartitioned(jnp.zeros((4, 8)), ("embed", "mlp")), "b": jnp.zeros(8)}
    assert boxed_names(params) == {"w": ("embed", "mlp")}


LISTED = {f"layers_{i}": {"w": jnp.zeros((4, 16)), "b": jnp.zeros(3)} for i in range(4)}


def stage_mesh(**sizes):
    shape = tuple(sizes.values())
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def test_the_blocks_of_a_list_are_cut_over_the_stages_along_their_own_dimensions():
    pipeline = Pipeline("layers", microbatches=2)
    layout = Layout.of(
        LISTED, stage_mesh(stage=2, fsdp=2), [("*/w", (None, "fsdp"))], None, pipeline
    )
    assert specs(layout.shardings) == [(None,), ("stage", "fsdp")] * 4
    assert layout.blocks.names == ("layers_0", "layers_1", "layers_2", "layers_3")
    assert Layout.of(LISTED, stage_mesh(data=2), (), None, pipeline).blocks is None


@pytest.mark.parametrize(
    ("sizes", "rules", "message"),
    [
        (
            {"stage": 8},
            (),
            r"The 4 block\(s\) of the list layers_0, layers_1, ... cannot be divided",
        ),
        (
            {"stage": 2, "tensor": 2},
            [("layers_1/w", (None, "tensor"))],
            r"cut layers_1/w by \(None, 'tensor'\) and layers_0/w by \(None, None\), but the blocks",
        ),
    ],
)
def test_blocks_of_a_list_that_cannot_be_divided_are_refused(sizes, rules, message):
    with pytest.raises(ValueError, match=message):
        Layout.of(LISTED, stage_mesh(**sizes), rules, None, Pipeline("layers", microbatches=2))
