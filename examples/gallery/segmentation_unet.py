"""A U-Net that finds each digit of a noisy scene, pixel by pixel.

    tnt-jax -n 2 -- examples/gallery/segmentation_unet.py

Ronneberger et al. 2015, arXiv:1505.04597, figure 1, at the size of 16 x 16 pixels. The confusion
matrix behind the metric counts each pixel of the global batch once.
"""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from digits_data import as_text, load

import tnt_jax as tnt

NUM_CLASSES = 11  # Ten digits; 0 is the background.


def scenes(images, labels, seed):
    """Returns scenes `[n, 16, 16, 1]` of two digits in noise, and the class of each pixel."""
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(images) // 2 * 2).reshape(-1, 2)
    inputs = generator.uniform(0, 0.4, (len(order), 16, 16, 1)).astype(np.float32)
    classes = np.zeros((len(order), 16, 16), np.int32)
    for scene, pixels, pair in zip(inputs, classes, order, strict=True):
        for left, digit in zip((0, 8), pair, strict=True):
            top = generator.integers(0, 9)
            box = np.s_[top : top + 8, left : left + 8]
            scene[box] = np.maximum(scene[box], images[digit])
            pixels[box][images[digit, ..., 0] > 0.4] = labels[digit] + 1
    return inputs, classes


def convolved(x, width):
    """Two convolutions with ReLU."""
    for _ in range(2):
        x = nn.relu(nn.Conv(width, (3, 3))(x))
    return x


class UNet(nn.Module):
    """Logits `[batch, height, width, classes]`; features of the way down join on the way up."""

    widths: tuple = (16, 32, 64)

    @nn.compact
    def __call__(self, x):
        seen = []
        for width in self.widths[:-1]:
            seen.append(convolved(x, width))
            x = nn.max_pool(seen[-1], (2, 2), (2, 2))
        x = convolved(x, self.widths[-1])
        for width in self.widths[-2::-1]:
            x = nn.ConvTranspose(width, (2, 2), strides=(2, 2))(x)
            x = convolved(jnp.concatenate([seen.pop(), x], axis=-1), width)
        return nn.Conv(NUM_CLASSES, (1, 1))(x)


def main(epochs=60):
    """Trains, shows a test scene with what was found, and returns the mean IoU of the classes."""
    train, test = (scenes(*part, seed) for seed, part in enumerate(load()))
    model = tnt.Model(UNet())
    model.compile(
        tnt.optimizers.Adam(2e-3),
        tnt.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[tnt.metrics.MeanIoU(NUM_CLASSES, sparse_y_pred=False, name="iou")],
    )
    model.fit(*train, batch_size=32, epochs=epochs, verbose=2)
    iou = model.evaluate(*test, verbose=0, return_dict=True)["iou"]
    found = np.argmax(model.predict(test[0][:1], verbose=0)[0], axis=-1)
    if tnt.is_master_rank():
        print(as_text(test[0][:1, ..., 0]))
        print("\n".join("".join("  " if c == 0 else 2 * str(c - 1) for c in row) for row in found))
        print(f"mean IoU of test scenes: {iou:.3f}")
    return iou


if __name__ == "__main__":
    main()
