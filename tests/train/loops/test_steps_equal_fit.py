"""A custom training loop equals a plain loop on one device closely, and `fit` bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from long_params import long_but_last
from own_loops import make_state, make_step
from reference_trainer import Net, make_data, train

import tnt_jax as tnt
from tnt_jax.distributed.sums.random_rows import row_key


def close(actual, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, expected
    )


def equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def loop(net, tx, data, size, *, epochs=2):
    x, y, weight = data
    dataset = tnt.distribute(x, y, sample_weight=weight, batch_size=size, shuffle=False)
    step, state, losses = make_step(net), make_state(net, tx, x), []
    for _ in range(epochs):
        for batch in dataset:
            state, metrics = step(state, batch, jax.random.key(0))
            losses.append(metrics["loss"] * batch.num_rows)
    return {"params": state.params, "batch_stats": state.batch_stats}, sum(losses) / len(x)


def fit(net, tx, data, size):
    x, y, weight = data
    model = tnt.Model(net)
    model.compile(tx, loss=optax.softmax_cross_entropy_with_integer_labels)
    model.fit(x, y, batch_size=size, epochs=2, shuffle=False, verbose=0, sample_weight=weight)
    return model.variables


OPTIMIZERS = {
    "momentum": lambda: optax.sgd(0.05, momentum=0.9),
    "adam": lambda: optax.adam(1e-2),
    "accumulation": lambda: optax.MultiSteps(optax.sgd(0.1), 2),
}


# Batches that divide, that do not, a last batch smaller than the number of ranks.
@pytest.mark.parametrize(
    ("num_ranks", "num_examples", "size", "optimizer"),
    [
        pytest.param(1, 31, 9, "momentum", marks=pytest.mark.long),
        (2, 31, 9, "accumulation"),
        pytest.param(3, 17, 8, "adam", marks=pytest.mark.long),
        pytest.param(4, 31, 9, "momentum", marks=pytest.mark.long),
    ],
)
def test_a_loop_equals_fit_to_the_bit_and_one_device_closely(
    use_ranks, num_ranks, num_examples, size, optimizer
):
    use_ranks(num_ranks)
    data, tx = make_data(num_examples), OPTIMIZERS[optimizer]()
    # Statistics of one or two rows amplify rounding beyond any tolerance.
    norm = num_examples % size not in (1, 2)
    net = Net(batch_norm=norm, dropout=0.4, axis_name="data")
    variables, loss_sum = loop(net, tx, data, size)
    if optimizer != "accumulation":  # Optax's own: `fit` does not take a pair of functions alone.
        equal(variables["params"], fit(net, tx, data, size)["params"])

    def make_key(step, rows):
        # The numbers of a single device that holds the whole batch.
        return jax.random.fold_in(row_key(jax.random.fold_in(jax.random.key(0), step), 0), 1)

    parts = [slice(i, i + size) for i in range(0, num_examples, size)]
    batches = [tuple(array[part] for array in data) for part in parts]
    one = Net(batch_norm=norm, dropout=0.4)
    history, expected = train(one, tx, batches, epochs=2, make_key=make_key)
    close(variables, expected)
    np.testing.assert_allclose(loss_sum, sum(history["loss"]), rtol=1e-5)


def test_stacked_steps_equal_single_ones(use_ranks):
    use_ranks(2)
    data, tx, net = make_data(31), optax.sgd(0.1), Net(dropout=0.4)
    x, y, weight = data
    one_by_one, _ = loop(net, tx, data, 9)
    dataset = tnt.distribute(x, y, sample_weight=weight, batch_size=9, shuffle=False)
    step, state, shapes = make_step(net), make_state(net, tx, x), []
    for _ in range(2):
        for batches in dataset.stacked():
            state, metrics = step.scan(state, batches, jax.random.key(0))
            shapes.append((batches.num_steps, metrics["loss"].shape))
    equal(state.params, one_by_one["params"])
    assert shapes == [(3, (3,)), (1, (1,))] * 2


class Module(nnx.Module):
    """A network with statistics and dropout."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(6, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, axis_name="data", rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.last = nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


@pytest.mark.long  # `fit` of NNX modules is tested beside.
def test_an_nnx_module_and_its_optimizer_are_a_state(use_ranks):
    use_ranks(4)
    x, y, _ = make_data(31)

    @tnt.distributed_step
    def step(state, batch, key):
        module, optimizer = state

        def loss_fn(module):
            losses = optax.softmax_cross_entropy_with_integer_labels(
                module(batch.inputs), batch.targets
            )
            return tnt.compute_average_loss(losses)

        loss, grads = tnt.value_and_grad(loss_fn)(module)
        optimizer.update(module, grads)
        return (module, optimizer), {"loss": loss}

    module = Module()
    state = module, nnx.Optimizer(module, optax.sgd(0.1), wrt=nnx.Param)
    for batch in tnt.distribute(x, y, batch_size=9, shuffle=False):
        state, _ = step(state, batch, jax.random.key(0))
    by_fit = Module()
    model = tnt.Model(by_fit)
    model.compile(optax.sgd(0.1), loss=optax.softmax_cross_entropy_with_integer_labels)
    model.fit(x, y, batch_size=9, shuffle=False, verbose=0)
    kept = nnx.Any(nnx.Param, nnx.BatchStat)
    equal(nnx.state(state[0], kept), nnx.state(by_fit, kept))


@pytest.mark.parametrize("num_ranks", long_but_last(1, 3))
@pytest.mark.parametrize("weight_shape", [None, (11,), (11, 5)])
def test_losses_and_penalties_of_several_dimensions_equal_numpy(use_ranks, num_ranks, weight_shape):
    use_ranks(num_ranks)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(11, 5, 2)), rng.normal(size=(11, 5))
    x, y = x.astype(np.float32), y.astype(np.float32)
    weight = None if weight_shape is None else rng.uniform(size=weight_shape).astype(np.float32)

    @tnt.distributed_step
    def step(w, batch):
        def loss_fn(w):
            losses = (batch.inputs @ w - batch.targets) ** 2
            penalty = tnt.scale_regularization_loss(0.1 * jnp.sum(w**2))
            return tnt.compute_average_loss(losses, batch.weight) + penalty

        loss, gradient = tnt.value_and_grad(loss_fn)(w)
        return w - 0.1 * gradient, {"loss": loss, "same": tnt.grad(loss_fn)(w) - gradient}

    (batch,) = tnt.distribute(x, y, sample_weight=weight, batch_size=11, shuffle=False)
    w, metrics = step(np.ones(2, np.float32), batch)
    errors = x.sum(-1) - y
    weights = np.ones((11, 5)) if weight is None else weight
    if weights.ndim == 1:
        weights = np.broadcast_to(weights, (5, 11)).T
    np.testing.assert_allclose(metrics["loss"], np.mean(weights * errors**2) + 0.2, rtol=1e-5)
    gradient = np.einsum("nt,nti->i", 2 * weights * errors, x) / errors.size + 0.2
    np.testing.assert_allclose(w, 1 - 0.1 * gradient, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(metrics["same"], 0)
