"""Pipelines of 1, 2 and 4 stages against the same layers on one device, without a pipeline."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from tnt_jax.sharded.pipeline.pipeline import Pipeline
from tnt_jax.sharded.pipeline.schedules import Ends, gpipe, one_forward_one_backward

NUM_LAYERS, WIDTH, ROWS = 8, 5, 3


def problem(num_micro_batches, num_data=1):
    """Layers, what stands around them, and rows with targets, of which one is not a number of rows
    that the others have.
    """
    rng = np.random.default_rng(num_micro_batches)

    def normal(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    layers = {"w": normal(NUM_LAYERS, WIDTH, WIDTH) / WIDTH, "b": normal(NUM_LAYERS, WIDTH)}
    shared = {"embed": normal(7, WIDTH), "head": normal(WIDTH, 2), "unused": normal(3)}
    batch = {
        "x": normal(num_micro_batches, ROWS * num_data, 7),
        "y": normal(num_micro_batches, ROWS * num_data, 2),
    }
    return shared, layers, batch


def layer(x, params):
    # The norm makes the layer's result for zeros infinite.
    y = x["y"] / jnp.linalg.norm(x["y"], axis=-1, keepdims=True)
    y = jnp.tanh(y @ params["w"] + params["b"]) + x["y"]
    return {**x, "y": y, "count": x["count"] + 1.0}, None


def stage(layers, x, m):
    # A number that belongs to the micro-batch: each layer adds it.
    y, _ = jax.lax.scan(layer, x, layers)
    return {**y, "numbers": x["numbers"] + m}


def enter(shared, batch):
    zeros = jnp.zeros_like(batch["x"][:, 0])
    return {"y": batch["x"] @ shared["embed"], "count": zeros, "numbers": zeros}


def leave(shared, x, batch):
    errors = x["y"] @ shared["head"] - batch["y"]
    numbers = {"layers": x["count"], "numbers": x["numbers"], "errors": abs(errors)}
    return jnp.sum(errors**2), jax.tree.map(jnp.sum, numbers)


def reference(shared, layers, batch, num_stages):
    def loss(shared, layers):
        results = []
        for m in range(len(batch["x"])):
            micro = jax.tree.map(lambda x, m=m: x[m], batch)
            x = stage(layers, enter(shared, micro), m)
            results.append(leave(shared, {**x, "numbers": x["numbers"] * num_stages}, micro))
        return jax.tree.map(lambda *x: sum(x), *results)

    (value, numbers), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(shared, layers)
    return value, numbers, grads


def mesh_of(**sizes):
    devices = np.array(jax.devices()[: np.prod(list(sizes.values()))])
    return Mesh(devices.reshape(*sizes.values()), tuple(sizes))


REPLICATED, STACKED = PartitionSpec(), PartitionSpec("stage")


def with_gpipe(shared, layers, batch):
    def loss(shared, layers):
        entered = jax.vmap(partial(enter, shared))(batch)
        outputs = gpipe(stage, layers, entered)
        losses, numbers = jax.vmap(partial(leave, shared))(outputs, batch)
        return jnp.sum(losses), jax.tree.map(jnp.sum, numbers)

    (value, numbers), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(shared, layers)
    return value, numbers, grads


def with_1f1b(shared, layers, batch):
    return one_forward_one_backward(Ends(enter, leave), stage, shared, layers, batch)


# Less micro-batches than stages, and more; 1 and 2 stages with one schedule each.
@pytest.mark.parametrize(
    ("schedule", "num_stages", "num_micro_batches"),
    [
        (with_gpipe, 1, 3),
        (with_1f1b, 2, 1),
        (with_gpipe, 4, 2),
        (with_1f1b, 4, 2),
        (with_gpipe, 4, 7),
        (with_1f1b, 4, 7),
        pytest.param(with_1f1b, 1, 3, marks=pytest.mark.long),
        pytest.param(with_gpipe, 2, 1, marks=pytest.mark.long),
    ],
)
def test_pipeline_equals_one_device(schedule, num_stages, num_micro_batches):
    shared, layers, batch = problem(num_micro_batches)
    mapped = jax.shard_map(
        schedule,
        mesh=mesh_of(stage=num_stages),
        in_specs=(REPLICATED, STACKED, REPLICATED),
        out_specs=(REPLICATED, REPLICATED, (REPLICATED, STACKED)),
    )
    expected = reference(shared, layers, batch, num_stages)
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
        jax.jit(mapped)(shared, layers, batch),
        expected,
    )
    assert expected[1]["layers"] == NUM_LAYERS * ROWS * num_micro_batches


@pytest.mark.parametrize("schedule", [with_gpipe, with_1f1b])
def test_pipelines_of_two_ranks_sum_to_one_device(schedule):
    shared, layers, batch = problem(3, num_data=2)
    by_row = PartitionSpec(None, "data")

    def step(shared, layers, batch):
        # Gradients stay local, as in the training step, and are summed once.
        varying = jax.lax.pcast((shared, layers), "data", to="varying")
        return jax.lax.psum(schedule(*varying, batch), "data")

    mapped = jax.shard_map(
        step,
        mesh=mesh_of(data=2, stage=4),
        in_specs=(REPLICATED, STACKED, by_row),
        out_specs=(REPLICATED, REPLICATED, (REPLICATED, STACKED)),
    )
    jax.tree.map(
        partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5),
        jax.jit(mapped)(shared, layers, batch),
        reference(shared, layers, batch, 4),
    )


def peak_bytes(schedule, num_micro_batches):
    """Returns the compiler's temporary memory of 4 stages."""
    arguments = jax.eval_shape(partial(problem, num_micro_batches, num_data=2000))
    mapped = jax.shard_map(
        lambda *args: schedule(*args)[2],
        mesh=mesh_of(stage=4),
        in_specs=(REPLICATED, STACKED, REPLICATED),
        out_specs=(REPLICATED, STACKED),
    )
    compiled = jax.jit(mapped).lower(*arguments).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_1f1b_keeps_as_many_inputs_as_stages():
    # Four times the micro-batches, and hardly more memory; GPipe keeps all of them.
    assert peak_bytes(with_1f1b, 32) < 1.1 * peak_bytes(with_1f1b, 8)
    assert peak_bytes(with_gpipe, 32) > 2.5 * peak_bytes(with_gpipe, 8)


@pytest.mark.parametrize(
    ("num_stages", "num_micro_batches", "expected"),
    # Counted in a drawing of the schedule: slots in which the first stage waits, of all slots.
    [(1, 4, 0), (2, 1, 1 / 2), (4, 4, 3 / 7), (4, 12, 3 / 15)],
)
def test_bubble_share(num_stages, num_micro_batches, expected):
    assert Pipeline("layers", num_micro_batches).bubble_share(num_stages) == expected


def test_arrays_with_different_numbers_of_micro_batches_are_refused():
    shared, layers, batch = problem(4)
    batch["y"] = batch["y"][:3]
    with pytest.raises(ValueError, match=r"one leading dimension, .*, but have \[3, 4\]"):
        one_forward_one_backward(Ends(enter, leave), stage, shared, layers, batch)
