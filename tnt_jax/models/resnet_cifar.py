"""Residual networks for 32 x 32 images: ResNet-20, 32, 44, 56 and 110.

He et al. 2015, arXiv:1512.03385, section 4.2.

Shape legend: B batch, H height, W width, C channels, K classes.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tnt_jax.models.resnet import Layer, batch_norm, classify, he_normal, sow_kernel_penalty


class CifarBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters (the paper's option A).

    Where the block changes the shape, the shortcut takes every second pixel and pads the missing
    channels with zeros.
    """

    features: int
    strides: int
    conv: Layer
    norm: Layer

    @nn.compact
    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Maps [B, H, W, C] to [B, H / strides, W / strides, features]."""
        y_BHWC = self.conv(self.features, (3, 3), strides=self.strides)(x_BHWC)
        y_BHWC = nn.relu(self.norm()(y_BHWC))
        y_BHWC = self.conv(self.features, (3, 3))(y_BHWC)
        y_BHWC = self.norm(scale_init=nn.initializers.zeros)(y_BHWC)
        new_channels = self.features - x_BHWC.shape[-1]
        shortcut_BHWC = x_BHWC[:, :: self.strides, :: self.strides]
        shortcut_BHWC = jnp.pad(
            shortcut_BHWC,
            ((0, 0), (0, 0), (0, 0), (new_channels // 2, new_channels - new_channels // 2)),
        )
        return nn.relu(shortcut_BHWC + y_BHWC)


class CifarResNet(nn.Module):
    """A residual network of depth 6n + 2 with 16, 32 and 64 channels.

    The image has full, half and quarter size. The zero-initialized last BatchNorm scale of each
    block follows Goyal et al. 2017 (arXiv:1706.02677), not the paper.

    Attributes:
        depth: Weighted layers, 6n + 2: 20, 32, 44, 56, 110 in the paper's table 6.
        num_classes: Classes K.
        dtype: Dtype of the computation; parameters, statistics and logits are float32.
        bn_axis_name: Mesh axis for synchronised BatchNorm, or None for the statistics of each
            rank's own rows.
        kernel_l2: Factor of the sum of squared kernels that training adds to the loss, in the
            collection `losses`.
    """

    depth: int
    num_classes: int = 10
    dtype: Any = jnp.float32
    bn_axis_name: str | None = None
    kernel_l2: float = 0.0

    def __post_init__(self) -> None:
        if self.depth < 8 or (self.depth - 2) % 6:
            raise ValueError(
                "depth must be 6n + 2 with n at least 1 (20, 32, 44, 56, 110 ...), but is "
                f"{self.depth}."
            )
        super().__post_init__()

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        """Returns the logits of `images`.

        Args:
            images: Float pixels [B, H, W, C], already normalised; 32 x 32 in the paper, any size
                works.
            train: Whether BatchNorm uses (and updates) the statistics of the batch.

        Returns:
            Logits [B, K], float32.
        """
        conv = partial(nn.Conv, use_bias=False, padding=1, dtype=self.dtype, kernel_init=he_normal)
        norm = batch_norm(train=train, axis_name=self.bn_axis_name, dtype=self.dtype)
        x_BHWC = conv(16, (3, 3), name="stem_conv")(images.astype(self.dtype))
        x_BHWC = nn.relu(norm(name="stem_norm")(x_BHWC))
        for stage in range(3):
            for index in range((self.depth - 2) // 6):
                strides = 2 if stage > 0 and index == 0 else 1
                name = f"stage{stage + 1}_block{index + 1}"
                x_BHWC = CifarBlock(16 * 2**stage, strides, conv=conv, norm=norm, name=name)(x_BHWC)
        logits_BK = classify(x_BHWC, num_classes=self.num_classes)
        if train:
            sow_kernel_penalty(self, l2=self.kernel_l2)
        return logits_BK


# He et al. 2015, table 6.
resnet20 = partial(CifarResNet, depth=20)
resnet32 = partial(CifarResNet, depth=32)
resnet44 = partial(CifarResNet, depth=44)
resnet56 = partial(CifarResNet, depth=56)
resnet110 = partial(CifarResNet, depth=110)
