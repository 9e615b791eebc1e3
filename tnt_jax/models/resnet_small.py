"""The 26-layer residual network of the NERSC course "Deep Learning at Scale", for CIFAR-10.

Shape legend: B batch, H height, W width, C channels, K classes.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tnt_jax.models.resnet import Layer, batch_norm, classify, he_normal, sow_kernel_penalty


class SmallBlock(nn.Module):
    """Convolutions of 1x1, 3x3 and 1x1, all of the same width, and a shortcut.

    The shortcut is a convolution if the stride is 2.
    """

    features: int
    strides: int
    conv: Layer
    norm: Layer

    @nn.compact
    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Maps [B, H, W, C] to [B, H / strides, W / strides, features]."""
        y_BHWC = nn.relu(
            self.norm()(self.conv(self.features, (1, 1), strides=self.strides)(x_BHWC))
        )
        y_BHWC = nn.relu(self.norm()(self.conv(self.features, (3, 3), padding=1)(y_BHWC)))
        y_BHWC = self.norm()(self.conv(self.features, (1, 1))(y_BHWC))
        if self.strides > 1:
            x_BHWC = self.conv(self.features, (1, 1), strides=self.strides, name="shortcut_conv")(
                x_BHWC
            )
            x_BHWC = self.norm(name="shortcut_norm")(x_BHWC)
        return nn.relu(x_BHWC + y_BHWC)


class ResNetSmall(nn.Module):
    """A residual network of 26 weighted layers.

    It has a 3x3 stem, four stages of 64, 128, 256 and 512 channels with two blocks each, and a
    classifier.

    Every stage, including the first, halves the image. Unlike in the ImageNet networks,
    convolutions have a bias and every BatchNorm scale starts at one, as in the course. The course
    leaves the decay of some BatchNorms at Keras's 0.99 and sets it to 0.9 in others; here it is 0.9
    (and epsilon 1e-5) in all, so that the statistics are settled after short runs.

    Attributes:
        num_classes: Classes K.
        dtype: Dtype of the computation; parameters, statistics and logits are float32.
        bn_axis_name: Mesh axis for synchronised BatchNorm, or None for the statistics of each
            rank's own rows.
        kernel_l2: Factor of the sum of squared kernels that training adds to the loss, in the
            collection `losses`.
    """

    num_classes: int = 10
    dtype: Any = jnp.float32
    bn_axis_name: str | None = None
    kernel_l2: float = 0.0

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        """Returns the logits of `images`.

        Args:
            images: Float pixels [B, H, W, C], H and W at least 16.
            train: Whether BatchNorm uses (and updates) the statistics of the batch.

        Returns:
            Logits [B, K], float32.
        """
        conv = partial(nn.Conv, padding=0, dtype=self.dtype, kernel_init=he_normal)
        norm = batch_norm(train=train, axis_name=self.bn_axis_name, dtype=self.dtype)
        x_BHWC = conv(64, (3, 3), padding=1, name="stem_conv")(images.astype(self.dtype))
        x_BHWC = nn.relu(norm(name="stem_norm")(x_BHWC))
        for stage, features in enumerate((64, 128, 256, 512), start=1):
            for index, strides in enumerate((2, 1), start=1):
                x_BHWC = SmallBlock(
                    features, strides, conv=conv, norm=norm, name=f"stage{stage}_block{index}"
                )(x_BHWC)
        logits_BK = classify(x_BHWC, num_classes=self.num_classes)
        if train:
            sow_kernel_penalty(self, l2=self.kernel_l2)
        return logits_BK
