"""Flax's variational autoencoder (Linen) on all devices, here on Fashion-MNIST with two grey
levels.

    python examples/flax/vae.py --data DATA
    tnt-jax -n 2 -- examples/flax/vae.py --data DATA

After examples/vae of Flax (Copyright The Flax Authors, Apache-2.0, https://github.com/google/flax):
the same network, loss and optimizer. The lines marked with `tnt` are changed, or stand in place of
its steps and loops.
"""

import argparse

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from real_data import add_arguments, fashion_mnist

import tnt_jax as tnt


class Encoder(nn.Module):
    """From images `[batch, 784]` to mean and logarithm of the variance `[batch, latents]`."""

    latents: int

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(500, name="fc1")(x))
        return nn.Dense(self.latents, name="fc2_mean")(x), nn.Dense(
            self.latents, name="fc2_logvar"
        )(x)


class Decoder(nn.Module):
    """From latent variables `[batch, latents]` to logits of images `[batch, 784]`."""

    @nn.compact
    def __call__(self, z):
        return nn.Dense(784, name="fc2")(nn.relu(nn.Dense(500, name="fc1")(z)))


class VAE(nn.Module):
    """Encoder, sampling and decoder; without a key the mean is decoded."""

    latents: int = 20

    def setup(self):
        self.encoder = Encoder(self.latents)
        self.decoder = Decoder()

    def __call__(self, x, z_rng=None):  # tnt: evaluation and init have no key.
        mean, logvar = self.encoder(x)
        z = mean if z_rng is None else reparameterize(z_rng, mean, logvar)  # tnt
        return self.decoder(z), mean, logvar


def reparameterize(rng, mean, logvar):
    """Returns samples `[batch, latents]`; they are drawn by row of the global batch, whatever the
    number of devices.
    """
    return mean + jnp.exp(0.5 * logvar) * jax.random.normal(rng, logvar.shape)


def kl_divergence(mean, logvar):
    """Returns the divergence from the standard normal distribution, `[batch]`."""
    return -0.5 * jnp.sum(1 + logvar - jnp.square(mean) - jnp.exp(logvar), axis=-1)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    args = parser.parse_args(argv)
    images, test_images = (
        (fashion_mnist(args.data, part, args.examples)[0].reshape(-1, 784) > 0.5).astype(np.float32)
        for part in ("train", "t10k")
    )
    vae = VAE(latents=20)

    def loss_fn(params, batch, rngs):  # tnt
        recon_x, mean, logvar = vae.apply(
            {"params": params}, batch.inputs, rngs.get("dropout")
        )  # tnt
        bce = jnp.sum(optax.sigmoid_binary_cross_entropy(recon_x, batch.inputs), axis=-1)
        kld = kl_divergence(mean, logvar)
        return bce + kld, {
            "bce": bce,
            "kld": kld,
        }  # tnt: values of rows, whose mean is left to the step.

    model = tnt.Model(vae)  # tnt
    model.compile(optax.adam(1e-3), objective=loss_fn)  # tnt
    model.fit(images, batch_size=128, epochs=args.epochs, validation_data=test_images)  # tnt

    noise = jax.random.normal(jax.random.key(1), (64, vae.latents))
    samples = nn.sigmoid(vae.bind(model.variables).decoder(noise))
    if tnt.is_master_rank():
        print(f"{len(samples)} new images, {float(samples.mean()):.2f} of the pixels are white")
    return model


if __name__ == "__main__":
    main()
