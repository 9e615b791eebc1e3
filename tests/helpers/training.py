"""A small network, trained on made-up rows with the options under test."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from reference_trainer import Net, make_data

import tnt_jax as tnt

TOLERANCE = 1e-5


def crossentropy():
    return tnt.losses.SparseCategoricalCrossentropy(from_logits=True)


def fit(
    net,
    optimizer,
    num_examples=24,
    size=8,
    *,
    epochs=2,
    callbacks=None,
    compile_options=None,
    **options,
):
    x, y, _ = make_data(num_examples)
    model = tnt.Model(net, **options)
    model.compile(optimizer, loss=crossentropy(), metrics=["accuracy"], **(compile_options or {}))
    history = model.fit(
        x, y, batch_size=size, epochs=epochs, shuffle=False, verbose=0, callbacks=callbacks
    ).history
    return model, history


def assert_close(actual, expected, tolerance=TOLERANCE):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
        actual,
        expected,
    )


def train_accumulating(optimizer, num_examples, size, num_steps, *, epochs=2):
    """Keras's rule by hand: every `num_steps`-th step updates by the mean gradient, also across
    epochs.
    """
    x, y, _ = make_data(num_examples)
    net = Net()
    params = jax.jit(partial(net.init, train=False))(jax.random.key(0), x[:1])["params"]
    opt_state, total, step = optimizer.init(params), jax.tree.map(jnp.zeros_like, params), 0

    def loss_of(params, x, y):
        return jnp.mean(
            optax.softmax_cross_entropy_with_integer_labels(
                net.apply({"params": params}, x, train=True), y
            )
        )

    gradient = jax.jit(jax.grad(loss_of))
    for _ in range(epochs):
        for start in range(0, num_examples, size):
            grads = gradient(params, x[start : start + size], y[start : start + size])
            total, step = jax.tree.map(jnp.add, total, grads), step + 1
            if step % num_steps == 0:
                updates, opt_state = optimizer.update(
                    jax.tree.map(lambda g: g / num_steps, total), opt_state, params
                )
                params, total = (
                    optax.apply_updates(params, updates),
                    jax.tree.map(jnp.zeros_like, total),
                )
    return params
