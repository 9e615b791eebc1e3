"""Steps of a custom training loop that compare rows give what one device gives."""

from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batch_models import TOLERANCE, make_rows
from flax import nnx
from long_params import long_but_last

import tnt_jax as tnt


@pytest.fixture(autouse=True)
def told(monkeypatch):
    monkeypatch.setenv("TNT_LOG_LEVEL", "INFO")


def assert_close(found, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE),
        found,
        expected,
    )


def losses_of(params, inputs):
    left, right = inputs["image"] @ params["image"], inputs["text"] @ params["text"]
    return optax.softmax_cross_entropy_with_integer_labels(left @ right.T, jnp.arange(len(left)))


def fresh():
    rng = np.random.default_rng(1)
    return {"image": rng.normal(size=(6, 5)) / 3, "text": rng.normal(size=(4, 5)) / 3}


@jax.jit
def plain_step(params, inputs):
    loss, grads = jax.value_and_grad(lambda params: jnp.mean(losses_of(params, inputs)))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


def plain(batches):
    params, losses = jax.tree.map(np.float32, fresh()), []
    for inputs in batches:
        params, loss = plain_step(params, inputs)
        losses.append(loss)
    return params, losses


@tnt.distributed_step
def train_step(params, batch):
    def loss_fn(params):
        return tnt.compute_average_loss(losses_of(params, batch.inputs))

    loss, grads = tnt.value_and_grad(loss_fn)(params)
    params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
    return params, {"loss": loss, "losses": tnt.reduce(losses_of(params, batch.inputs), "concat")}


@tnt.distributed_eval_step
def eval_step(params, batch):
    return tnt.compute_average_loss(losses_of(params, batch.inputs))


@pytest.mark.parametrize("num_ranks", long_but_last(1, 2, 3, 8, 4))
def test_a_contrastive_loop_equals_a_plain_loop(num_ranks, use_ranks):
    use_ranks(num_ranks)
    x, _ = make_rows(29)
    data = tnt.distribute(x, batch_size=12, shuffle=False)
    params, losses = jax.tree.map(np.float32, fresh()), []
    for batch in data:
        params, metrics = train_step(params, batch)
        losses.append(metrics["loss"])
        rows = batch.without_padding(metrics["losses"])
        assert len(rows) == batch.num_rows
    batches = [jax.tree.map(lambda a, i=i: a[i : i + 12], x) for i in (0, 12, 24)]
    expected, expected_losses = plain(batches)
    assert_close(losses, expected_losses)
    assert_close(params, expected)
    assert_close(rows, jax.jit(losses_of)(expected, batches[-1]))
    (batch,) = tnt.distribute(x, batch_size=29, shuffle=False)
    assert_close(eval_step(params, batch), np.mean(jax.jit(losses_of)(expected, x)))


@pytest.mark.parametrize("num_ranks", long_but_last(1, 2, 3, 4, 8))
def test_stacked_batches_equal_a_plain_loop(num_ranks, use_ranks):
    use_ranks(num_ranks)
    x, _ = make_rows(36)
    data = tnt.distribute(x, batch_size=9, shuffle=False)
    (batches,) = data.stacked()
    params, metrics = train_step.scan(jax.tree.map(np.float32, fresh()), batches)
    expected, losses = plain(
        [jax.tree.map(lambda a, i=i: a[i : i + 9], x) for i in range(0, 36, 9)]
    )
    assert_close(list(metrics["loss"]), losses)
    assert_close(params, expected)


class Normed(nnx.Module):
    def __init__(self, compares):
        rngs = nnx.Rngs(0)
        self.dense = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, axis_name="data", rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(8, 3, rngs=rngs)
        self.compares = compares

    def __call__(self, x):
        x = self.norm(self.dense(x))
        return self.head(self.drop(x - x.mean(0) if self.compares else x))


@pytest.mark.parametrize("compares", [True, False])
def test_synchronised_statistics_hide_no_comparison_and_are_none(compares, use_ranks, capsys):
    @tnt.distributed_step
    def step(module, batch, key):
        def loss_fn(module):
            logits = module(batch.inputs["image"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
            return tnt.compute_average_loss(losses)

        loss, grads = tnt.value_and_grad(loss_fn)(module)
        state = nnx.state(module, nnx.Param)
        nnx.update(module, jax.tree.map(lambda p, g: p - 0.1 * g, state, grads))
        return module, {"loss": loss}

    found = []
    for num_ranks in (1, 4):
        use_ranks(num_ranks)
        x, y = make_rows(16)
        module, losses = Normed(compares), []
        for batch in tnt.distribute(x, y, batch_size=8, shuffle=False):
            module, metrics = step(module, batch, jax.random.key(1))
            losses.append(metrics["loss"])
        found.append(losses)
    assert_close(*found)
    code = Path(__file__).read_text().splitlines()
    line = 1 + next(n for n, text in enumerate(code) if "x - x.mean(0)" in text)
    said = f"step compares rows of a batch, by reduce_sum (test_comparing_steps.py:{line})"
    assert capsys.readouterr().err.count(said) == compares


def test_a_loop_of_independent_rows_keeps_the_fused_sums(use_ranks, capsys):
    use_ranks(4)
    module = nn.Dense(3)

    @tnt.distributed_step
    def step(params, batch):
        def loss_fn(params):
            logits = module.apply({"params": params}, batch.inputs["image"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
            return tnt.compute_average_loss(losses)

        loss, grads = tnt.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}

    x, y = make_rows(16)
    params = jax.tree.map(np.asarray, module.init(jax.random.key(0), x["image"])["params"])
    for batch in tnt.distribute(x, y, batch_size=8):
        params, _ = step(params, batch)
    assert "compares rows" not in capsys.readouterr().err
