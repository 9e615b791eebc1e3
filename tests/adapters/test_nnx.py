"""NNX modules train on any number of ranks as a plain loop over the same object does, and hold the
results afterwards.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from long_params import long_but_last

import tnt_jax as tnt
from tnt_jax.adapters import adapter_for
from tnt_jax.distributed.sums.random_rows import row_key

TOLERANCE = 1e-5
NUM_FEATURES, NUM_CLASSES, EPOCHS = 5, 3, 2


class Net(nnx.Module):
    def __init__(self, *, dropout=0.0, axis_name=None, has_norm=False, seed=0):
        rngs = nnx.Rngs(seed)
        self.blocks = nnx.List(
            [nnx.Linear(NUM_FEATURES, 8, rngs=rngs), nnx.Linear(8, NUM_CLASSES, rngs=rngs)]
        )
        self.norm = (
            nnx.BatchNorm(8, axis_name=axis_name, use_fast_variance=False, rngs=rngs)
            if has_norm
            else None
        )
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.offset = jnp.full((8,), 0.5)

    def __call__(self, x):
        x = self.blocks[0](x) + self.offset
        x = x if self.norm is None else self.norm(x)
        return self.blocks[1](self.dropout(nnx.relu(x)))


def make_data(num_examples):
    rng = np.random.default_rng(0)
    return rng.normal(size=(num_examples, NUM_FEATURES)).astype(np.float32), rng.integers(
        0, NUM_CLASSES, num_examples
    )


def fit(net, num_examples, size, *, seed=0):
    x, y = make_data(num_examples)
    model = tnt.Model(net, seed=seed)
    model.compile(optax.sgd(0.1), loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model, model.fit(x, y, batch_size=size, epochs=EPOCHS, shuffle=False, verbose=0).history[
        "loss"
    ]


def train_by_hand(net, num_examples, size, *, make_key=None):
    """The loop of the Flax documentation, on one device; a key sets the dropout of each step."""
    x, y = make_data(num_examples)
    optimizer = nnx.Optimizer(net, optax.sgd(0.1), wrt=nnx.Param)
    net.train()

    def loss_of(net, x, y):
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(net(x), y))

    @nnx.jit
    def update(net, optimizer, x, y):
        loss, grads = nnx.value_and_grad(loss_of)(net, x, y)
        optimizer.update(net, grads)
        return loss

    losses, step = [], 0
    for _ in range(EPOCHS):
        total = 0.0
        for start in range(0, num_examples, size):
            rows = slice(start, start + size)
            if make_key is not None:
                # Counts come before keys in the state, so the key of the one stream has position 1.
                net.dropout.rngs.key.set_value(jax.random.fold_in(make_key(step, len(y[rows])), 1))
                net.dropout.rngs.count.set_value(jnp.zeros((), jnp.uint32))
            loss = update(net, optimizer, x[rows], y[rows])
            total, step = total + float(loss) * len(y[rows]), step + 1
        losses.append(total / num_examples)
    return losses


def assert_same_variables(actual, expected):
    actual, expected = (nnx.state(net, nnx.Not(nnx.RngState)) for net in (actual, expected))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE),
        actual,
        expected,
    )


@pytest.mark.parametrize("num_ranks", long_but_last(1, 2, 4))
def test_sgd_equals_a_loop_by_hand_with_uneven_batches(use_ranks, num_ranks):
    use_ranks(num_ranks)
    net, expected = Net(), Net()
    losses = train_by_hand(expected, 27, 10)
    np.testing.assert_allclose(fit(net, 27, 10)[1], losses, rtol=TOLERANCE)
    assert_same_variables(net, expected)


@pytest.mark.parametrize("num_ranks", long_but_last(1, 2, 4))
@pytest.mark.parametrize("num_examples", long_but_last(24, 27))
def test_synchronised_batch_norm_equals_one_device(use_ranks, num_ranks, num_examples):
    use_ranks(num_ranks)
    net, expected = Net(has_norm=True, axis_name="data"), Net(has_norm=True)
    losses = train_by_hand(expected, num_examples, 12)
    np.testing.assert_allclose(fit(net, num_examples, 12)[1], losses, rtol=TOLERANCE)
    assert_same_variables(net, expected)


def test_padding_stays_out_of_statistics_of_one_rank_each(use_ranks):
    use_ranks(2)
    net = Net(has_norm=True)
    x, _ = make_data(3)
    hidden = x @ net.blocks[0].kernel[...] + net.offset
    # Rank 0 has rows 0 and 1, rank 1 row 2 and one row of padding; moving averages weigh ranks by
    # their rows.
    expected = (2 * hidden[:2].mean(0) + hidden[2]) / 3
    model = tnt.Model(net)
    model.compile(optax.sgd(0.0), loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, np.zeros(3, np.int64), batch_size=3, epochs=1, verbose=0, shuffle=False)
    np.testing.assert_allclose(net.norm.mean[...], 0.01 * expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("num_ranks", long_but_last(1, 2, 4))
def test_dropout_is_that_of_one_device(use_ranks, num_ranks):
    use_ranks(num_ranks)
    net, expected = Net(dropout=0.5), Net(dropout=0.5)
    make_key = lambda step, rows: row_key(jax.random.fold_in(jax.random.key(3), step), 0)  # noqa: E731
    losses = train_by_hand(expected, 27, 10, make_key=make_key)
    np.testing.assert_allclose(fit(net, 27, 10, seed=3)[1], losses, rtol=TOLERANCE)
    assert_same_variables(net, expected)


def test_module_is_usable_after_fit_and_keeps_its_mode_and_streams(use_ranks):
    use_ranks(2)
    net = Net(dropout=0.5, has_norm=True)
    net.eval()
    streams = jax.random.key_data(net.dropout.rngs.key[...])
    model, _ = fit(net, 24, 8)
    x, _ = make_data(24)
    np.testing.assert_allclose(model.predict(x, verbose=0), net(x), rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_array_equal(jax.random.key_data(net.dropout.rngs.key[...]), streams)
    assert net.dropout.deterministic
    assert net.norm.mean[...].std() > 0


class Hidden(nnx.Module):
    """The first layer of `Net`, at the same path."""

    def __init__(self):
        self.blocks = nnx.List([nnx.Linear(NUM_FEATURES, 8, rngs=nnx.Rngs(9))])

    def __call__(self, x):
        return self.blocks[0](x)


class Flagged(nnx.Module):
    """Takes its mode as an argument, sows a loss and an intermediate, and shares one matrix between
    two uses.
    """

    def __init__(self):
        rngs = nnx.Rngs(1)
        self.linear = nnx.Linear(NUM_FEATURES, NUM_FEATURES, use_bias=False, rngs=rngs)
        self.tied = self.linear

    def __call__(self, x, *, train):
        self.sow("losses", "l2", 0.1 * jnp.sum(self.linear.kernel[...] ** 2))
        self.sow(nnx.Intermediate, "hidden", x)
        return self.tied(self.linear(x)) * (2.0 if train else 1.0)


class Recurrent(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(2)
        self.rnn = nnx.RNN(nnx.LSTMCell(1, 4, rngs=rngs))
        self.head = nnx.Linear(4, NUM_CLASSES, rngs=rngs)
        self.norm = self.dropout = None

    def __call__(self, x):
        return self.head(self.rnn(x[..., None])[:, -1])


@pytest.mark.long  # A recurrent model takes long to compile.
def test_recurrent_layers_start_from_constants(use_ranks):
    use_ranks(4)
    net, expected = Recurrent(), Recurrent()
    losses = train_by_hand(expected, 27, 10)
    np.testing.assert_allclose(fit(net, 27, 10)[1], losses, rtol=TOLERANCE)
    assert_same_variables(net, expected)


@pytest.mark.parametrize(
    ("precision", "master"),
    [
        ("mixed_bfloat16", jnp.float32),
        pytest.param("bfloat16", jnp.bfloat16, marks=pytest.mark.long),
    ],
)
def test_precision_and_frozen_paths(use_ranks, precision, master):
    use_ranks(2)
    net, start = Net(has_norm=True), Net(has_norm=True)
    x, y = make_data(24)
    model = tnt.Model(net, precision=precision, frozen=["blocks/0"])
    model.compile("adam", loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=8, epochs=1, verbose=0)
    assert net.blocks[1].kernel[...].dtype == master
    assert net.norm.mean[...].dtype == jnp.float32
    np.testing.assert_array_equal(
        net.blocks[0].kernel[...], start.blocks[0].kernel[...].astype(master)
    )
    assert np.any(net.blocks[1].kernel[...] != start.blocks[1].kernel[...].astype(master))


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize("num_ranks", long_but_last(1, 4))
def test_flag_sown_losses_and_shared_variables(use_ranks, num_ranks):
    use_ranks(num_ranks)
    net = Flagged()
    x, _ = make_data(10)
    y = np.zeros_like(x)
    kernel = np.array(net.linear.kernel[...])

    @jax.jit
    @jax.value_and_grad
    def objective(kernel):
        return jnp.mean(jnp.square(2 * (x @ kernel) @ kernel)) + 0.1 * jnp.sum(kernel**2)

    model = tnt.Model(net)
    model.compile(optax.sgd(0.1), loss="mse")
    loss = model.fit(x, y, batch_size=10, epochs=1, verbose=0).history["loss"][0]
    expected, grads = objective(kernel)
    assert loss == pytest.approx(float(expected), rel=TOLERANCE)
    np.testing.assert_allclose(
        net.linear.kernel[...], kernel - 0.1 * np.asarray(grads), rtol=1e-4, atol=1e-6
    )
    assert net.tied is net.linear
    assert not hasattr(net, "hidden")


class Loss(nnx.Variable):
    """As in Flax's own variational autoencoder."""


class WithLosses(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(NUM_FEATURES, 1, use_bias=False, rngs=nnx.Rngs(1))
        self.held = Loss(jnp.float32(0))

    def __call__(self, x):
        size = jnp.sum(self.linear.kernel[...] ** 2)
        self.made, self.held[...] = Loss(0.1 * size), 0.2 * size
        return self.linear(x)


@pytest.mark.parametrize("num_ranks", long_but_last(1, 4))
def test_variables_of_a_class_loss_are_added_to_the_training_loss(use_ranks, num_ranks):
    use_ranks(num_ranks)
    net = WithLosses()
    x, _ = make_data(8)
    y = np.zeros((8, 1), np.float32)
    kernel = np.array(net.linear.kernel[...])
    grads = 2 * x.T @ (x @ kernel) / len(x) + 0.6 * kernel
    model = tnt.Model(net)
    model.compile(optax.sgd(0.1), loss="mse")
    assert model.evaluate(x, y, verbose=0) == pytest.approx(np.mean((x @ kernel) ** 2), rel=1e-5)
    model.fit(x, y, batch_size=8, verbose=0)
    np.testing.assert_allclose(net.linear.kernel[...], kernel - 0.1 * grads, rtol=1e-4, atol=1e-6)


def test_view_computes_with_the_trained_variables(use_ranks):
    use_ranks(2)
    net = Net()
    x, _ = make_data(24)
    model, _ = fit(net, 24, 8)
    view = model.view(Hidden())
    np.testing.assert_allclose(
        view.predict(x, verbose=0),
        x @ net.blocks[0].kernel[...] + net.blocks[0].bias[...],
        atol=1e-6,
    )
    with pytest.raises(
        ValueError,
        match=r"Flagged has the variables linear/kernel, which the variables given to it lack",
    ):
        model.view(Flagged()).predict(x, verbose=0)


def test_errors_name_what_is_wrong():
    with pytest.raises(TypeError, match="got the class Net"):
        adapter_for(Net)
    with pytest.raises(ValueError, match="a NNX model holds its own"):
        adapter_for(Net(), variables={})
    with pytest.raises(
        TypeError, match=r"flax\.nnx\.Module or a keras\.Model, but got builtins\.int"
    ):
        adapter_for(3)


class Scaled(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.dropout, self.scale = nnx.Dropout(0.9, rngs=rngs), 1.0
        self.head = nnx.Linear(NUM_FEATURES, 3, rngs=rngs)

    def __call__(self, x):
        self.sow(nnx.Intermediate, "seen", x)
        return self.head(self.dropout(x)) * self.scale


@pytest.mark.filterwarnings("ignore:Using 'Module.sow")
def test_changes_between_two_calls_count(use_ranks):
    use_ranks(2)
    x, y = make_data(8)
    options = {"batch_size": 8, "verbose": 0}

    def fitted(net):
        model = tnt.Model(net)
        model.compile(optax.sgd(0.1), optax.softmax_cross_entropy_with_integer_labels)
        return model, model.fit(x, y, **options).history["loss"]

    def check(model, net):
        programs = model._trainer.programs
        np.testing.assert_allclose(
            model.predict(x, **options), nnx.clone(net)(x), rtol=TOLERANCE, atol=TOLERANCE
        )
        model.fit(x, y, **options)
        return model._trainer.programs is programs

    net = Scaled()
    model, _ = fitted(net)
    model.fit(x, y, **options)
    net.dropout.rate = 0.0
    without_dropout = Scaled()
    nnx.update(without_dropout, nnx.state(net))
    without_dropout.dropout.rate = 0.0
    assert model.fit(x, y, **options).history["loss"] == fitted(without_dropout)[1]
    net.eval()
    net(x)
    assert check(model, net)  # Neither its mode nor what a call sows has anything compiled anew.
    net.scale = 3.0
    assert not check(model, net)
    net.head = nnx.Linear(NUM_FEATURES, 3, use_bias=False, rngs=nnx.Rngs(1))
    assert not check(model, net)
