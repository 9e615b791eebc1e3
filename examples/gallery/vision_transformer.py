"""A vision transformer with random shifts of the images, and averaged weights (EMA).

    tnt-jax -n 2 -- examples/gallery/vision_transformer.py

Dosovitskiy et al. 2020, arXiv:2010.11929, at the size of 8 x 8 images.
"""

import flax.linen as nn
import numpy as np
from digits_data import load

import tnt_jax as tnt


class VisionTransformer(nn.Module):
    """Patches of 2 x 2 pixels, pre-norm blocks, the mean of the tokens; logits `[batch, 10]`."""

    width: int = 64
    num_blocks: int = 3

    @nn.compact
    def __call__(self, images, train: bool):
        x = nn.Conv(self.width, (2, 2), strides=2)(images)
        x = x.reshape(len(x), -1, self.width)
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
        for _ in range(self.num_blocks):
            x = x + nn.MultiHeadAttention(num_heads=4)(nn.LayerNorm()(x))
            y = nn.Dense(self.width)(nn.gelu(nn.Dense(2 * self.width)(nn.LayerNorm()(x))))
            x = x + nn.Dropout(0.1, deterministic=not train)(y)
        return nn.Dense(10)(nn.LayerNorm()(x.mean(1)))


def shifted(example, generator):
    """Moves an image by up to one pixel; the generator is that of the example and the epoch."""
    image, label = example
    top, left = generator.integers(0, 3, 2)
    return np.pad(image, ((1, 1), (1, 1), (0, 0)))[top : top + 8, left : left + 8], label


def main(epochs=40):
    """Trains, and returns the accuracy on the test images."""
    (images, labels), test = load()
    examples = list(zip(images, labels, strict=True))
    train = tnt.data.RandomAccess(examples, batch_size=64, shuffle=True, transform=shifted)
    num_updates = epochs * -(-len(images) // 64)
    model = tnt.Model(VisionTransformer())
    model.compile(
        tnt.optimizers.AdamW(
            tnt.schedules.CosineDecay(2e-3, num_updates, warmup_target=2e-3, warmup_steps=50),
            weight_decay=0.05,
            use_ema=True,
            ema_momentum=0.98,
        ),
        tnt.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(train, epochs=epochs, verbose=2, callbacks=[tnt.callbacks.SwapEMAWeights()])
    accuracy = model.evaluate(*test, verbose=0)[1]
    if tnt.is_master_rank():
        print(f"test accuracy of the averaged weights: {accuracy:.3f}")
    return accuracy


if __name__ == "__main__":
    main()
