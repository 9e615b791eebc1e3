import jax
import jax.numpy as jnp
import numpy as np
import ring_steps
from rings import make_rings


def loss(params, x):
    for kernel in params:
        x = jnp.tanh(x @ kernel)
    return jnp.mean(x**2)


def train(exchange, params, x, steps):
    """Returns weights after steps, with the sums of a ring of one process."""
    ring = make_rings(1)[0] if exchange.startswith("ring") else None
    tickets = [None] * len(params)
    step = jax.jit(
        lambda params: ring_steps.step(
            exchange, loss, params, x, ring=ring, link=None, tickets=tickets
        )[0]
    )
    for _ in range(steps):
        params = jax.block_until_ready(step(params))
    if ring is not None:
        ring.close()
    return params


def test_deferred_sums_train_as_a_step_without_them():
    rng = np.random.default_rng(0)
    params = [jnp.asarray(rng.normal(size=(6, 6)).astype(np.float32)) for _ in range(3)]
    x = jnp.asarray(rng.normal(size=(5, 6)).astype(np.float32))
    # A deferred step applies the update of the step before.
    expected, found = train("alone", params, x, 3), train("ring deferred", params, x, 4)
    for one, other, start in zip(expected, found, params, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6, atol=1e-7)
        assert np.max(np.abs(one - start)) > 1e-4
