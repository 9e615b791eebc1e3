"""A GAN in a custom loop: one distributed step updates the critic, then the generator.

    tnt-jax -n 2 -- examples/gallery/gan.py

Goodfellow et al. 2014, arXiv:1406.2661, algorithm 1 with one step of the critic, and the
generator's loss of section 3 that does not saturate. Noise is drawn by row of the global batch.
"""

import flax.linen as nn
import jax
import numpy as np
import optax
from digits_data import as_text, load
from flax.training.train_state import TrainState

import tnt_jax as tnt

LATENTS = 16
generator = nn.Sequential([nn.Dense(128), nn.leaky_relu, nn.Dense(64), nn.sigmoid])
critic = nn.Sequential([nn.Dense(128), nn.leaky_relu, nn.Dense(1)])


def initialized(net, seed, width):
    """Returns the parameters of a network with an optimizer."""
    params = jax.jit(net.init)(jax.random.key(seed), np.zeros((1, width)))["params"]
    return TrainState.create(apply_fn=net.apply, params=params, tx=optax.adam(1e-3, b1=0.5))


def judged(params, images, label):
    """The critic's mean loss over the global batch if all its images had this label."""
    logits = critic.apply({"params": params}, images)[:, 0]
    return tnt.compute_average_loss(optax.sigmoid_binary_cross_entropy(logits, label))


@tnt.distributed_step
def train_step(state, batch, key):
    """Updates the critic, and with it the generator."""
    forger, judge = state
    noise = jax.random.normal(key, (len(batch.inputs), LATENTS))
    fakes = generator.apply({"params": forger.params}, noise)

    def critic_loss(params):
        return judged(params, batch.inputs, 1.0) + judged(params, fakes, 0.0)

    loss_of_critic, grads = tnt.value_and_grad(critic_loss)(judge.params)
    judge = judge.apply_gradients(grads=grads)

    def generator_loss(params):
        return judged(judge.params, generator.apply({"params": params}, noise), 1.0)

    loss, grads = tnt.value_and_grad(generator_loss)(forger.params)
    return (forger.apply_gradients(grads=grads), judge), {"loss": loss, "critic": loss_of_critic}


def main(epochs=150):
    """Trains, and returns how far a drawn digit, and a real one, is from the nearest real one."""
    images = load()[0][0].reshape(-1, 64)
    state = initialized(generator, 0, LATENTS), initialized(critic, 1, 64)
    dataset = tnt.distribute(images, batch_size=64)
    for _ in range(epochs):
        for batch in dataset:
            state, _ = train_step(state, batch, jax.random.key(2))

    noise = np.random.default_rng(0).normal(size=(200, LATENTS))
    drawn = np.asarray(jax.jit(generator.apply)({"params": state[0].params}, noise))
    distances = [np.linalg.norm(x[:, None] - images, axis=-1) for x in (drawn, images[:200])]
    # The nearest to a real digit is itself.
    nearest = [np.sort(d, axis=1)[:, n].mean() for n, d in enumerate(distances)]
    if tnt.is_master_rank():
        print(as_text(drawn[:5].reshape(-1, 8, 8)))
        print("distance to the nearest real digit: {:.2f}, of a real one {:.2f}".format(*nearest))
    return nearest


if __name__ == "__main__":
    main()
