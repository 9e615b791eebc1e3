"""Divided inputs of convolutions: which programs have them, and that nothing that training computes
changes by them.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import tnt_jax as tnt
from tnt_jax import _jax
from tnt_jax.adapters.base import Applied
from tnt_jax.distributed.sums.reduction import trace_grads
from tnt_jax.train.contracts import Batch, LossTerm, StepParts
from tnt_jax.train.state import create_state
from tnt_jax.train.steps import step
from tnt_jax.train.steps.step import keep_inputs

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(30, 6, 6, 4)).astype(np.float32), RNG.integers(0, 3, 30)


class Residual(nn.Module):
    """Two blocks of one convolution each, a block that is an argument, and a head with a
    convolution.
    """

    last: Any = None

    @nn.compact
    def __call__(self, x, train=False):
        for _ in range(2):
            x = nn.relu(x + nn.BatchNorm(use_running_average=not train)(nn.Conv(4, (3, 3))(x)))
        x = x if self.last is None else self.last()(x)
        return nn.Dense(3)(nn.Conv(8, (3, 3), strides=2)(x).reshape(len(x), -1))


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.relu(x + nn.Conv(4, (3, 3))(nn.relu(nn.Conv(4, (3, 3))(x))))


class Loop(nn.Module):
    @nn.compact
    def __call__(self, x):
        body = nn.scan(
            lambda block, x, _: (block(x), None),
            variable_broadcast="params",
            split_rngs={"params": False},
            length=2,
        )
        return body(Block(), x, None)[0]


def differentiated(module, dtype=jnp.float32):
    """Returns a function from variables to loss and gradients, and variables."""
    x = jnp.asarray(X, dtype)

    def objective(variables):
        return jnp.sum(jnp.square(module.apply(variables, x))).astype(jnp.float32)

    return jax.value_and_grad(objective), module.init(jax.random.key(0), x)


def count(jaxpr, name):
    return sum(equation.primitive.name == name for equation in jaxpr.eqns)


@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.long), jnp.bfloat16])
def test_gradients_stay_the_same_bit_by_bit(dtype):
    function, variables = differentiated(Residual(), dtype)
    run = jax.jit(
        lambda variables, step: trace_grads(
            function, variables, rewrite=partial(keep_inputs, step=step)
        )[:2]
    )
    expected = jax.jit(function)(variables)
    for number in (0, 1, 2**31 - 1):
        jax.tree.map(np.testing.assert_array_equal, run(variables, number), expected)
    # What is divided by is in use: inputs twice as small make other gradients.
    assert run(variables, -1)[0] != expected[0]


# The first convolution takes the given images; the two of the last block stay as they are where it
# is called or looped over.
@pytest.mark.parametrize(
    ("last", "num_divisions"),
    [(None, 2), (Block, 4), (nn.jit(Block), 2), (nn.remat(Block), 2), (Loop, 2)],
    ids=["none", "block", "jit", "remat", "scan"],
)  # fmt: skip
def test_each_computed_input_is_divided_once(last, num_divisions):
    function, variables = differentiated(Residual(last))
    traced = jax.make_jaxpr(function)(variables)
    kept = keep_inputs(traced, jnp.int32(0))
    assert count(kept.jaxpr, "div") - count(traced.jaxpr, "div") == num_divisions


def test_a_program_without_gradients_of_kernels_stays_as_it_is():
    _, variables = differentiated(Residual())
    traced = jax.make_jaxpr(Residual().apply)(variables, X)
    assert keep_inputs(traced, jnp.int32(0)) is traced


def train(last, *, model_choices=None, **choices):
    """Returns the history of training and the variables that it leaves behind."""
    model = tnt.Model(Residual(last), seed=0, **(model_choices or {}))
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optax.sgd(0.1, momentum=0.9), loss=loss, **choices)
    history = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history
    return history, model.variables


# The last of the batches is padded.
@pytest.mark.parametrize(
    ("num_ranks", "last", "choices"),
    [
        (1, None, {}),
        pytest.param(4, Block, {}, marks=pytest.mark.long),
        pytest.param(
            2,
            nn.remat(Block),
            {"model_choices": {"shard_optimizer_state": True}},
            marks=pytest.mark.long,
        ),
        pytest.param(2, None, {"steps_per_execution": 2}, marks=pytest.mark.long),
    ],
    ids=["one rank", "four ranks", "sharded", "several steps"],
)
def test_training_stays_the_same_bit_by_bit(use_ranks, monkeypatch, num_ranks, last, choices):
    use_ranks(num_ranks)
    changed = set()

    def watched(traced, step):
        kept = keep_inputs(traced, step)
        changed.add(kept is not traced)
        return kept

    monkeypatch.setattr(step, "keep_inputs", watched)
    kept = train(last, **choices)
    assert changed == {True}
    monkeypatch.setattr(step, "keep_inputs", lambda traced, step: traced)
    jax.tree.map(np.testing.assert_array_equal, kept, train(last, **choices))


@pytest.mark.parametrize(("platform", "is_kept"), [("cpu", True), ("gpu", False), ("tpu", False)])
def test_inputs_are_kept_on_cpus_alone(platform, is_kept, monkeypatch):
    called = []
    monkeypatch.setattr(step, "keep_inputs", lambda traced, step: called.append(platform) or traced)
    devices = np.array([SimpleNamespace(platform=platform)])
    mesh: Any = SimpleNamespace(size=1, shape={"data": 1}, devices=devices)
    variables = Residual().init(jax.random.key(0), X)

    def apply(params, model_state, inputs, *, key, train, mask):
        outputs: Any = Residual().apply({"params": params, **model_state}, inputs)
        return Applied(outputs, model_state, 0.0)

    def loss_terms(outputs, batch):
        return [LossTerm(jnp.sum(outputs), None)]

    parts = StepParts(apply, loss_terms, lambda outputs, batch: {})
    state = create_state(
        variables["params"], {"batch_stats": variables["batch_stats"]}, optax.sgd(0.1), seed=0
    )
    grads_of: Any = lambda state, x: step.differentiate(parts, state, Batch(x, None), mesh).grads  # noqa: E731
    mapped = _jax.shard_map(
        grads_of,
        mesh=_jax.make_data_mesh(jax.devices()[:1]),
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(),
    )
    jax.eval_shape(mapped, state, X)
    assert bool(called) == is_kept
