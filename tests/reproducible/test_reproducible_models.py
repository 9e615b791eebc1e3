"""The same bits on any number of devices: models that hold their variables, a residual network, and
accumulated gradients.
"""

import numpy as np
import optax
import pytest
from flax import nnx
from reproducible_checks import (
    ConvNet,
    Mlp,
    assert_equal_on,
    compiled,
    devices,
    digests,
    fit_and_digest,
    images,
)

from tnt_jax import Model, optimizers
from tnt_jax.models.resnet import CifarResNet


class NnxNet(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.conv = nnx.Conv(2, 4, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(100, 3, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        return self.head(self.dropout(x.reshape(x.shape[0], -1)))


def keras_net():
    keras = pytest.importorskip("keras")
    layers = keras.layers
    net = keras.Sequential(
        [
            keras.Input((5, 5, 2)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dropout(0.3, seed=0),
            layers.Dense(3),
        ]
    )
    # Keras's own seed is TensorFlow's, too, and would stay for other tests.
    generator = np.random.default_rng(0)
    for variable in net.trainable_variables:
        variable.assign(generator.normal(size=variable.shape))
    return net


@pytest.mark.long
@pytest.mark.parametrize("make", [NnxNet, keras_net])
def test_a_model_that_holds_its_variables(make):
    def run():
        # 22 examples in batches of 11 rows on 4 virtual ranks: every batch is padded.
        model = compiled(make(), optax.adam(0.01), virtual_ranks=4)
        return fit_and_digest(model, images(22), batch_size=11)

    assert_equal_on((1, 4), run)


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(optax.sgd(0.1, momentum=0.9), marks=pytest.mark.long), optax.adam(0.01)],
    ids=["momentum", "adam"],
)
@pytest.mark.long
def test_a_residual_network(optimizer):
    def run():
        # Batches of 9 rows on 4 virtual ranks: the last one holds padding alone.
        model = compiled(CifarResNet(depth=8, num_classes=3), optimizer, virtual_ranks=4)
        history = model.fit(*images(18, size=8), batch_size=9, verbose=0).history
        return digests(model.state) | {"history": history}

    assert_equal_on((1, 4), run)


@pytest.mark.parametrize("epochs", [pytest.param(1, marks=pytest.mark.long), 2])
def test_accumulated_gradients(epochs):
    def run():
        # Three updates of two steps each in two epochs of three batches: after one epoch, half an
        # update is under way.
        optimizer = optimizers.SGD(0.1, momentum=0.9, gradient_accumulation_steps=2)
        model = compiled(Mlp(), optimizer, virtual_ranks=4)
        history = model.fit(*images(29), batch_size=10, epochs=epochs, verbose=0).history
        return digests(model.state) | {"history": history}

    assert_equal_on((1, 4), run)


def test_two_runs_of_the_fast_steps_on_the_same_devices_are_equal():
    def run():
        model = compiled(ConvNet(), optax.adam(0.01), reproducible=False)
        return fit_and_digest(model, images(22), batch_size=11)

    with devices(4):
        assert run() == run()


def test_a_weight_regularizer_counts_where_a_virtual_rank_has_padded_rows_alone(use_ranks):
    """17 rows in batches of 8: seven of eight virtual ranks have none of the last one's row."""
    keras = pytest.importorskip("keras")
    x = np.random.default_rng(0).normal(size=(17, 4)).astype(np.float32)
    net = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_regularizer="l2")])
    net.set_weights([np.ones((4, 1)), np.zeros(1)])
    use_ranks(2)
    model = Model(net, reproducible=True)
    model.compile(optimizers.SGD(0.1), loss="mse")
    history = model.fit(x, x[:, :1], batch_size=8, epochs=2, shuffle=False, verbose=0).history

    kernel, bias, expected = np.ones((4, 1)), np.zeros(1), []
    for _ in range(2):
        total = 0.0
        for rows in (x[:8], x[8:16], x[16:]):
            errors = rows @ kernel + bias - rows[:, :1]
            total += len(rows) * (np.mean(errors**2) + 0.01 * np.sum(kernel**2))
            kernel -= 0.1 * (2 * rows.T @ errors / len(rows) + 0.02 * kernel)
            bias -= 0.1 * 2 * errors.mean(0)
        expected.append(total / len(x))
    np.testing.assert_allclose(history["loss"], expected, rtol=1e-5)
