"""CLIP with two towers: images of digits and their names in four languages, then zero-shot labels.

    tnt-jax -n 2 -- examples/gallery/clip.py

Each image is compared with all texts of the global batch, on any number of devices (Radford et al.
2021, arXiv:2103.00020, figure 3). Nobody gathers anything by hand.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from digits_data import load

import tnt_jax as tnt

NAMES = [
    "zero one two three four five six seven eight nine".split(),
    "null eins zwei drei vier fuenf sechs sieben acht neun".split(),
    "zero un deux trois quatre cinq six sept huit neuf".split(),
    "cero uno dos tres cuatro cinco seis siete ocho nueve".split(),
]


def spelled(name):
    """Returns a name as 8 numbers of letters; 0 is padding."""
    return np.array([ord(letter) - 96 for letter in name.ljust(8, "`")], np.int32)


class Towers(nn.Module):
    """Embeddings of images and texts `[batch, 32]` of length 1, the first ones times a scale."""

    @nn.compact
    def __call__(self, image, text):
        x = nn.relu(nn.Conv(32, (3, 3))(image))
        x = nn.max_pool(nn.relu(nn.Conv(64, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.Dense(32)(x.reshape(len(x), -1))
        letters = nn.Embed(32, 32)(text)
        z = nn.Dense(32)(nn.relu(nn.Dense(128)(letters.reshape(len(text), -1))))
        scale = jnp.exp(self.param("scale", nn.initializers.constant(2.0), ()))
        x, z = (each / jnp.linalg.norm(each, axis=-1, keepdims=True) for each in (x, z))
        return scale * x, z


def contrast(params, batch, rngs, apply):
    """The loss of each row: its image among all texts, and its text among all images."""
    image, text = apply(params, batch.inputs)
    logits, own = image @ text.T, jnp.arange(len(image))
    losses = [optax.softmax_cross_entropy_with_integer_labels(x, own) for x in (logits, logits.T)]
    return (losses[0] + losses[1]) / 2


def main(epochs=12):
    """Trains, and returns how often the best English name is right, for test images."""
    (images, labels), (test_images, test_labels) = load()
    languages = np.random.default_rng(0).integers(0, 4, len(labels))
    texts = [spelled(NAMES[each][label]) for each, label in zip(languages, labels, strict=True)]
    model = tnt.Model(Towers())
    model.compile(tnt.optimizers.Adam(2e-3), objective=contrast)
    model.fit({"image": images, "text": np.stack(texts)}, batch_size=64, epochs=epochs)

    english = np.stack([spelled(name) for name in NAMES[0]])
    apply, variables = jax.jit(model.module.apply), model.variables
    image, _ = apply(variables, test_images, np.zeros((len(test_images), 8), np.int32))
    _, text = apply(variables, np.zeros((10, 8, 8, 1), np.float32), english)
    accuracy = float(np.mean(np.argmax(image @ text.T, axis=-1) == test_labels))
    if tnt.is_master_rank():
        print(f"zero-shot accuracy: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
