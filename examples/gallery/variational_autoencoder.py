"""A variational autoencoder, which then draws digits that nobody has written.

    tnt-jax -n 2 -- examples/gallery/variational_autoencoder.py

Kingma and Welling 2013, arXiv:1312.6114, section 3. A sample is drawn for each row of the global
batch, in training and in evaluation, so the numbers are the same on any number of devices.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits_data import as_text, load

import tnt_jax as tnt


class Autoencoder(nn.Module):
    """Logits of pixels `[batch, 64]`, with mean and log variance `[batch, latents]` of the code."""

    latents: int = 8

    def setup(self):
        self.encoder = nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(2 * self.latents)])
        self.decoder = nn.Sequential([nn.Dense(128), nn.relu, nn.Dense(64)])

    def __call__(self, images):
        mean, log_variance = jnp.split(self.encoder(images.reshape(len(images), -1)), 2, axis=-1)
        noise = jax.random.normal(self.make_rng("sample"), mean.shape)
        return self.decoder(mean + jnp.exp(log_variance / 2) * noise), mean, log_variance


def negative_elbo(params, batch, rngs, apply):
    """The nats that an image costs: its pixels given the code, and the code (appendix B)."""
    logits, mean, log_variance = apply(params, batch.inputs)
    pixels = batch.inputs.reshape(logits.shape)
    reconstruction = jnp.sum(optax.sigmoid_binary_cross_entropy(logits, pixels), axis=-1)
    divergence = -jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance), axis=-1) / 2
    return reconstruction + divergence, {"divergence": divergence}


def main(epochs=60):
    """Trains, draws some digits, and returns the nats per test image."""
    (images, _), (test_images, _) = load()
    model = tnt.Model(Autoencoder())
    model.compile(tnt.optimizers.Adam(2e-3), objective=negative_elbo)
    model.fit(images, batch_size=64, epochs=epochs, verbose=2)
    nats = model.evaluate(test_images, verbose=0, return_dict=True)["loss"]

    autoencoder = model.module
    codes = np.random.default_rng(0).normal(size=(5, autoencoder.latents))
    images = nn.sigmoid(autoencoder.bind(model.variables).decoder(codes)).reshape(-1, 8, 8)
    if tnt.is_master_rank():
        print(as_text(images))
        print(f"{nats:.1f} nats a test image")
    return nats


if __name__ == "__main__":
    main()
