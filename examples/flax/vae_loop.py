"""Flax's variational autoencoder (Linen) with a loop of its own on all devices, here on
Fashion-MNIST with two grey levels; the lines marked with `tnt` are those in which it differs from
`vae_one_device.py`.

    tnt-jax -n 2 -- examples/flax/vae_loop.py --data DATA
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState
from real_data import add_arguments, fashion_mnist
from vae import VAE, kl_divergence

import tnt_jax as tnt  # tnt

BATCH_SIZE = 128
vae = VAE(latents=20)


def batches(images, seed):
    """Yields batches in a new order every epoch, without end."""
    random = np.random.default_rng(seed)
    while True:
        order = random.permutation(len(images))
        for start in range(0, len(order) - BATCH_SIZE + 1, BATCH_SIZE):
            yield images[order[start : start + BATCH_SIZE]]


@tnt.distributed_step  # tnt
def train_step(state, batch, z_rng):  # tnt: a key of this batch alone.
    """Makes an update and returns the state and the parts of the loss before it."""
    images = batch.inputs  # tnt

    def loss_fn(params):
        recon, mean, logvar = state.apply_fn({"params": params}, images, z_rng)
        bce = jnp.sum(optax.sigmoid_binary_cross_entropy(recon, images), axis=-1)
        kld = kl_divergence(mean, logvar)
        return tnt.compute_average_loss(bce + kld), (bce, kld)  # tnt

    (loss, (bce, kld)), grads = tnt.value_and_grad(loss_fn, has_aux=True)(state.params)  # tnt
    bce, kld = tnt.reduce((bce, kld), "mean")  # tnt
    return state.apply_gradients(grads=grads), {"loss": loss, "bce": bce, "kld": kld}


def create_state(images):
    """Returns the untrained parameters with the optimizer."""
    params = vae.init(jax.random.key(0), images[:1])["params"]
    return TrainState.create(apply_fn=vae.apply, params=params, tx=optax.adam(1e-3))


def train(images, rng, *, epochs):
    """Returns the trained parameters and the metrics of all steps."""
    state, history = create_state(images), []
    train_data = tnt.distribute(batches(images, seed=0))  # tnt
    for _, batch in zip(range(epochs * (len(images) // BATCH_SIZE)), train_data, strict=False):
        state, metrics = train_step(state, batch, rng)
        history.append(metrics)
    return state.params, jax.device_get(history)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    args = parser.parse_args(argv)
    images = fashion_mnist(args.data, "train", args.examples)[0].reshape(-1, 784) > 0.5
    _, history = train(images.astype(np.float32), jax.random.key(1), epochs=args.epochs)
    print(f"last loss: {history[-1]['loss']:.2f}, of which KLD: {history[-1]['kld']:.2f}")


if __name__ == "__main__":
    main()
