"""Every small number of rows, batch size and rank: a linear model by a loop, beside NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from long_params import long_but_last

import tnt_jax as tnt

RATE, MOMENTUM = 0.1, 0.5
RNG = np.random.default_rng(0)


@tnt.distributed_step
def train_step(state, batch):
    weights, velocity = state

    def loss_fn(weights):
        losses = (batch.inputs @ weights - batch.targets) ** 2  # [rows, 2]
        return tnt.compute_average_loss(losses, sample_weight=batch.weight)

    loss, grad = tnt.value_and_grad(loss_fn)(weights)
    velocity = MOMENTUM * velocity - RATE * grad
    return (weights + velocity, velocity), {"loss": loss, "rows": tnt.reduce(ones(batch), "sum")}


def ones(batch):
    return jnp.ones_like(batch.inputs[:, 0])


def by_numpy(x, y, weight, size):
    weights = velocity = np.zeros((x.shape[1], y.shape[1]))
    losses, rows = [], []
    for start in range(0, len(x), size):
        part = slice(start, start + size)
        error = x[part] @ weights - y[part]
        own = np.ones(len(error)) if weight is None else weight[part]
        losses.append(float((own[:, None] * error**2).sum() / error.size))
        rows.append(len(error))
        grad = 2 * x[part].T @ (own[:, None] * error) / error.size
        velocity = MOMENTUM * velocity - RATE * grad
        weights = weights + velocity
    return weights, losses, rows


@pytest.mark.parametrize("num_ranks", long_but_last(1, 2, 4))
@pytest.mark.parametrize("size", [4, 5])
def test_every_small_batch_on_few_ranks_gives_the_numbers_of_numpy(use_ranks, num_ranks, size):
    use_ranks(num_ranks)
    for num_rows in range(size, 2 * size + 2):
        x, y = RNG.normal(size=(num_rows, 3)), RNG.normal(size=(num_rows, 2))
        weight = RNG.integers(0, 4, num_rows) / 2 if num_rows % 2 else None
        arrays = (a if a is None else a.astype(np.float32) for a in (x, y, weight))
        x32, y32, weight32 = arrays
        dataset = tnt.distribute(x32, y32, sample_weight=weight32, batch_size=size, shuffle=False)
        state, losses, rows = (jnp.zeros((3, 2)), jnp.zeros((3, 2))), [], []
        for batch in dataset:
            state, metrics = train_step(state, batch)
            losses.append(float(metrics["loss"]))
            rows.append(float(metrics["rows"]))
        weights, expected_losses, expected_rows = by_numpy(x, y, weight, size)
        where = f"{num_rows} rows"
        assert rows == expected_rows, where
        np.testing.assert_allclose(losses, expected_losses, rtol=1e-5, atol=1e-6, err_msg=where)
        np.testing.assert_allclose(
            jax.device_get(state[0]), weights, rtol=1e-5, atol=1e-5, err_msg=where
        )


@pytest.mark.parametrize("op", ["max", "min"])
def test_infinite_rows_are_reduced_alike_on_any_number_of_ranks(use_ranks, op):
    use_ranks(2)  # One of them has two rows and a row of padding.
    infinite = np.full(5, -np.inf if op == "max" else np.inf, np.float32)
    step = tnt.distributed_eval_step(lambda _, batch: tnt.reduce(batch.inputs, op))
    for batch in tnt.distribute(infinite, infinite, batch_size=5, shuffle=False):
        assert float(step({}, batch)) == infinite[0]
