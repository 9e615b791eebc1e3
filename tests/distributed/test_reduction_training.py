"""Training with other reductions than the plain one, against a plain loop on one device."""

from functools import cache, partial

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from long_params import long_but_last

import tnt_jax as tnt
from tnt_jax.train.steps.sharded_step import shard_dim, shard_spec

TOLERANCE = 1e-5
STEPS_PER_EPOCH, EPOCHS, ROWS = 3, 2, 15  # Four ranks pad each batch.


class Net(nn.Module):
    """A net with arrays that four ranks can cut along their first, last or no dimension, and with
    batch statistics.
    """

    @nn.compact
    def __call__(self, x, *, train):
        x = nn.relu(nn.Dense(12)(x))
        x = nn.BatchNorm(use_running_average=not train, axis_name="data" if train else None)(x)
        return nn.Dense(5)(x)


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.01),
    # The norm of all gradients and those of single arrays: no rank can compute them from its part.
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.3), optax.lamb(0.01)),
}


pytestmark = pytest.mark.usefixtures("four_ranks")


def make_data():
    rng = np.random.default_rng(0)
    num_rows = STEPS_PER_EPOCH * ROWS
    return rng.normal(size=(num_rows, 7)).astype(np.float32), rng.integers(0, 5, num_rows).astype(
        np.int32
    )


def train(optimizer, *, compile_options=None, **choices):
    x, y = make_data()
    model = tnt.Model(Net(), **choices)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, metrics=["accuracy"], **(compile_options or {}))
    history = model.fit(x, y, batch_size=ROWS, epochs=EPOCHS, shuffle=False, verbose=0).history
    return model, history


@cache
def train_plainly(name):
    """Trains with a loop on one device, written without the package."""
    optimizer = OPTIMIZERS[name]()
    x, y = make_data()

    class Plain(nn.Module):
        @nn.compact
        def __call__(self, x, *, train):
            x = nn.relu(nn.Dense(12)(x))
            x = nn.BatchNorm(use_running_average=not train)(x)
            return nn.Dense(5)(x)

    variables = jax.jit(partial(Net().init, train=False))(jax.random.key(0), x[:1])
    params, statistics = variables["params"], variables["batch_stats"]
    opt_state = jax.jit(optimizer.init)(params)

    @jax.jit
    def step(params, statistics, opt_state, x, y):
        def objective(params):
            logits, changed = Plain().apply(
                {"params": params, "batch_stats": statistics},
                x,
                train=True,
                mutable=["batch_stats"],
            )
            return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), changed[
                "batch_stats"
            ]

        grads, statistics_ = jax.grad(objective, has_aux=True)(params)
        updates, opt_state_ = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), statistics_, opt_state_

    for _ in range(EPOCHS):
        for start in range(0, len(x), ROWS):
            params, statistics, opt_state = step(
                params, statistics, opt_state, x[start : start + ROWS], y[start : start + ROWS]
            )
    return params


def assert_close(actual, expected, tolerance=TOLERANCE):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
        actual,
        expected,
    )


@pytest.mark.parametrize("name", long_but_last("sgd", "adam", "clip"))
@pytest.mark.parametrize(
    "choices",
    [{"fusion_threshold": "xla"}, {"ranks_per_host": 2}, {"shard_optimizer_state": True}],
    ids=str,
)
def test_exact_reductions_equal_a_plain_loop(choices, name):
    if name == "clip" and "shard_optimizer_state" not in choices:
        pytest.skip("The update is the plain one, whatever the optimizer.")
    model, _ = train(OPTIMIZERS[name](), **choices)
    assert_close(model.variables["params"], train_plainly(name))


@pytest.mark.parametrize("name", long_but_last("sgd", "adam"))
def test_compression_stays_within_its_rounding(name):
    model, _ = train(OPTIMIZERS[name](), gradient_compression="bfloat16")
    expected = train_plainly(name)
    # Adam divides by the size of a gradient, so that a rounding of 2**-8 of it moves a weight by
    # about that part of the rate.
    assert_close(model.variables["params"], expected, {"sgd": 2e-3, "adam": 5e-3}[name])
    assert any(np.any(x) for x in jax.tree.leaves(model._trainer.require_state().residual))


@pytest.mark.parametrize(
    "choices", [{"gradient_compression": "bfloat16"}, {"shard_optimizer_state": True}], ids=str
)
def test_several_steps_in_one_program_equal_single_ones(choices):
    single, history = train(OPTIMIZERS["sgd"](), **choices)
    several, other = train(
        OPTIMIZERS["sgd"](), compile_options={"steps_per_execution": 2}, **choices
    )
    assert_close(several.variables["params"], single.variables["params"])
    np.testing.assert_allclose(other["loss"], history["loss"], rtol=TOLERANCE)


def test_each_rank_keeps_its_part_of_the_optimizer_state_and_gradients_are_reduce_scattered():
    model, _ = train(optax.adam(0.01), shard_optimizer_state=True)
    state = model._trainer.require_state()
    moments = jax.tree.leaves_with_path(state.opt_state)
    cut = {
        jax.tree_util.keystr(path): x for path, x in moments if shard_dim(x.shape, 4) is not None
    }
    assert len(cut) == 2 * 5  # Both moments of everything but the last bias, which has 5 entries.
    for name, x in cut.items():
        assert x.addressable_shards[0].data.size * 4 == x.size, name
    assert all(x.sharding.is_fully_replicated for x in jax.tree.leaves(state.params))
    assert "stablehlo.reduce_scatter" in model.lowered_text(*make_data(), ROWS)


@pytest.mark.long
def test_sharded_state_accumulates_parts_of_gradients():
    make = lambda: tnt.optimizers.Adam(0.01, gradient_accumulation_steps=2)  # noqa: E731
    plain, history = train(make())
    # Three steps an epoch: sums are carried from one epoch, and program, into the next.
    model, sharded_history = train(make(), shard_optimizer_state=True)
    assert_close(model.variables["params"], plain.variables["params"])
    assert_close(sharded_history["loss"], history["loss"])
    kernel = model.state.accumulated["Dense_0"]["kernel"]
    assert kernel.shape == (1, 7, 12)
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(1, 7, 3)}


@pytest.mark.long  # Each of the two is tested beside.
def test_compressed_gradients_are_accumulated_first():
    choices = {"gradient_compression": "bfloat16"}
    plain, _ = train(tnt.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    model, _ = train(tnt.optimizers.SGD(0.1, gradient_accumulation_steps=2), **choices)
    assert_close(model.variables["params"], plain.variables["params"], 2e-3)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((), P()),
        ((5,), P()),
        ((8,), P("data")),
        ((7, 12), P(None, "data")),
        ((8, 12), P(None, "data")),
        ((12, 8), P("data")),
        ((0,), P()),
    ],
)
def test_the_largest_dimension_that_ranks_divide_is_cut(shape, spec):
    assert shard_spec(shape, 4) == spec
