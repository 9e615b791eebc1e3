"""Residual networks: those of ImageNet in the v1.5 form, those of CIFAR, and a small one.

He et al. 2015, arXiv:1512.03385. v1.5 puts the stride of a bottleneck on its 3x3 convolution, where
the paper has it on the first 1x1; Goyal et al. 2017 (arXiv:1706.02677) and most published ResNet-50
figures use it.

    model = resnet50(num_classes=1000, dtype=jnp.bfloat16, bn_axis_name="data")
    variables = model.init(key, images, train=False)

Shape legend: B batch, H height, W width, C channels, K classes.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


def kernel_penalty(params: Any, *, l2: float) -> jax.Array:
    """Returns `l2` times the sum of the squares of all leaves named `kernel`, float32.

    This is a Keras `L2` regularizer on each. A weight decay of 1e-4 in the sense of Goyal et al.
    2017 is `l2 = 5e-5`.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    kernels = [leaf for path, leaf in leaves if getattr(path[-1], "key", None) == "kernel"]
    squares = (jnp.sum(jnp.square(kernel.astype(jnp.float32))) for kernel in kernels)
    return l2 * sum(squares, start=jnp.zeros(()))


# He et al. 2015, arXiv:1502.01852, eq. 10: normal with variance 2 / fan_in.
he_normal = nn.initializers.he_normal()

Layer = Callable[..., Any]


class _Block(nn.Module):
    """What makes the convolutions and normalisations of a block."""

    features: int
    strides: int
    conv: Layer
    norm: Layer

    def _with_shortcut(self, y_BHWC: jax.Array, x_BHWC: jax.Array) -> jax.Array:
        """Returns the ReLU of a result and the block's input, projected to its shape if need be."""
        if x_BHWC.shape != y_BHWC.shape:
            features = y_BHWC.shape[-1]
            conv = self.conv(features, (1, 1), strides=self.strides, name="shortcut_conv")
            x_BHWC = self.norm(name="shortcut_norm")(conv(x_BHWC))
        return nn.relu(x_BHWC + y_BHWC)


class BasicBlock(_Block):
    """Two 3x3 convolutions and a shortcut (He et al. 2015, fig. 5 left).

    Attributes:
        features: Channels of the result.
        strides: Stride of the first convolution.
        conv: Convolution without bias.
        norm: Normalisation over the last dimension.
    """

    @nn.compact
    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Maps [B, H, W, C] to [B, H / strides, W / strides, features]."""
        y_BHWC = self.conv(self.features, (3, 3), strides=self.strides, padding=1)(x_BHWC)
        y_BHWC = nn.relu(self.norm()(y_BHWC))
        y_BHWC = self.conv(self.features, (3, 3), padding=1)(y_BHWC)
        y_BHWC = self.norm(scale_init=nn.initializers.zeros)(y_BHWC)
        return self._with_shortcut(y_BHWC, x_BHWC)


class BottleneckBlock(_Block):
    """A 1x1, a 3x3 and a widening 1x1 convolution and a shortcut (He et al. 2015, fig. 5 right).

    Attributes:
        features: Channels of the 3x3 convolution; the result has four times as many.
        strides: Stride of the block.
        conv: Convolution without bias.
        norm: Normalisation over the last dimension.
        stride_first: Whether the first 1x1 convolution has the stride (v1, as in the paper) instead
            of the 3x3 (v1.5).
    """

    stride_first: bool = False

    @nn.compact
    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Maps [B, H, W, C] to [B, H / strides, W / strides, 4 * features]."""
        strides = (self.strides, 1) if self.stride_first else (1, self.strides)
        y_BHWC = self.conv(self.features, (1, 1), strides=strides[0])(x_BHWC)
        y_BHWC = nn.relu(self.norm()(y_BHWC))
        y_BHWC = self.conv(self.features, (3, 3), strides=strides[1], padding=1)(y_BHWC)
        y_BHWC = nn.relu(self.norm()(y_BHWC))
        y_BHWC = self.conv(4 * self.features, (1, 1))(y_BHWC)
        y_BHWC = self.norm(scale_init=nn.initializers.zeros)(y_BHWC)
        return self._with_shortcut(y_BHWC, x_BHWC)


class ResNet(nn.Module):
    """A residual network with the ImageNet stem: 7x7 convolution and 3x3 max-pooling of stride 2.

    Convolutions are He-initialized and have no bias; the last BatchNorm scale of each block starts
    at zero and the classifier from N(0, 0.01), so that training starts from the identity (Goyal et
    al. 2017, section 5.1).

    Attributes:
        stage_sizes: Blocks of each stage; all but the first halve the image, double the channels.
        block: `BasicBlock` or `BottleneckBlock`.
        num_classes: Classes K.
        width: Channels of the stem and of the first stage.
        dtype: Dtype of the computation; parameters, statistics and logits are float32.
        bn_axis_name: Mesh axis of synchronised BatchNorm; None for statistics of each rank's rows.
        kernel_l2: Factor of the sum of squared kernels that training adds to the loss, in the
            collection `losses`.
        bn_epsilon: Added to the variance in BatchNorm.
    """

    stage_sizes: Sequence[int]
    block: Layer
    num_classes: int = 1000
    width: int = 64
    dtype: Any = jnp.float32
    bn_axis_name: str | None = None
    kernel_l2: float = 0.0
    bn_epsilon: float = 1e-5

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        """Returns the logits [B, K], float32, of float pixels [B, H, W, C], H and W at least 32.

        Pixels are normalised already. In training BatchNorm uses (and updates) the statistics of
        the batch.
        """
        conv = partial(nn.Conv, use_bias=False, padding=0, dtype=self.dtype, kernel_init=he_normal)
        norm = batch_norm(
            train=train, axis_name=self.bn_axis_name, epsilon=self.bn_epsilon, dtype=self.dtype
        )
        stem = conv(self.width, (7, 7), strides=2, padding=3, name="stem_conv")
        x_BHWC = nn.relu(norm(name="stem_norm")(stem(images.astype(self.dtype))))
        # Padding a maximum with zeros is exact here: ReLU leaves nothing below zero.
        x_BHWC = jnp.pad(x_BHWC, ((0, 0), (1, 1), (1, 1), (0, 0)))
        x_BHWC = nn.max_pool(x_BHWC, (3, 3), strides=(2, 2))
        block = partial(self.block, conv=conv, norm=norm)
        stages = [(self.width * 2**n, size) for n, size in enumerate(self.stage_sizes)]
        return stages_and_classes(self, x_BHWC, block, stages, train=train)


def batch_norm(*, train: bool, axis_name: str | None, dtype: Any, epsilon: float = 1e-5) -> Layer:
    """Returns `nn.BatchNorm` by Goyal et al. 2017, section 5.1, without name and initializers.

    Statistics are float32 whatever the `dtype` of the result.
    """
    return partial(
        nn.BatchNorm,
        use_running_average=not train,
        momentum=0.9,
        epsilon=epsilon,
        dtype=dtype,
        axis_name=axis_name,
    )


def stages_and_classes(
    module: Any,
    x_BHWC: jax.Array,
    block: Layer,
    stages: Sequence[tuple[int, int]],
    *,
    train: bool,
    first_strides: int = 1,
) -> jax.Array:
    """Returns the logits [B, K], float32, of a compact network from what its stem gives.

    `block` makes a block of channels, strides and a name; stages are channels and numbers of
    blocks. The first block of a stage halves the image, but that of the first has `first_strides`.
    In training the penalty of the kernels is added to the losses.
    """
    for stage, (features, num_blocks) in enumerate(stages):
        strides = 2 if stage else first_strides
        for index in range(num_blocks):
            name = f"stage{stage + 1}_block{index + 1}"
            x_BHWC = block(features, 1 if index else strides, name=name)(x_BHWC)
    x_BC = jnp.mean(x_BHWC, axis=(1, 2), dtype=jnp.float32)
    init = nn.initializers.normal(0.01)
    logits_BK = nn.Dense(module.num_classes, kernel_init=init, name="classifier")(x_BC)
    if train and module.kernel_l2 > 0 and not module.is_initializing():
        penalty = kernel_penalty(module.variables["params"], l2=module.kernel_l2)
        module.sow("losses", "kernel_l2", penalty)
    return logits_BK


# He et al. 2015, table 1.
resnet18 = partial(ResNet, stage_sizes=(2, 2, 2, 2), block=BasicBlock)
resnet34 = partial(ResNet, stage_sizes=(3, 4, 6, 3), block=BasicBlock)
resnet50 = partial(ResNet, stage_sizes=(3, 4, 6, 3), block=BottleneckBlock)
resnet101 = partial(ResNet, stage_sizes=(3, 4, 23, 3), block=BottleneckBlock)
resnet152 = partial(ResNet, stage_sizes=(3, 8, 36, 3), block=BottleneckBlock)
# The form of the paper and of keras.applications, which adds an ineffective bias before each
# BatchNorm.
_v1_block = partial(BottleneckBlock, stride_first=True)
resnet50_v1 = partial(ResNet, stage_sizes=(3, 4, 6, 3), block=_v1_block)


class CifarBlock(_Block):
    """Two 3x3 convolutions and a shortcut without parameters (the paper's option A).

    Where the block changes the shape, the shortcut takes every second pixel and pads the missing
    channels with zeros.
    """

    @nn.compact
    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Maps [B, H, W, C] to [B, H / strides, W / strides, features]."""
        y_BHWC = self.conv(self.features, (3, 3), strides=self.strides)(x_BHWC)
        y_BHWC = nn.relu(self.norm()(y_BHWC))
        y_BHWC = self.conv(self.features, (3, 3))(y_BHWC)
        y_BHWC = self.norm(scale_init=nn.initializers.zeros)(y_BHWC)
        new_channels = self.features - x_BHWC.shape[-1]
        shortcut_BHWC = x_BHWC[:, :: self.strides, :: self.strides]
        padding = ((0, 0), (0, 0), (0, 0), (new_channels // 2, new_channels - new_channels // 2))
        return nn.relu(jnp.pad(shortcut_BHWC, padding) + y_BHWC)


class CifarResNet(nn.Module):
    """A residual network of depth 6n + 2 with 16, 32 and 64 channels, for 32 x 32 images.

    He et al. 2015, section 4.2. The image has full, half and quarter size. The zero-initialized
    last BatchNorm scale of each block follows Goyal et al. 2017 (arXiv:1706.02677), not the paper.
    `depth` are the weighted layers, 20, 32, 44, 56 and 110 in the paper's table 6; `num_classes`,
    `dtype`, `bn_axis_name` and `kernel_l2` are as of `ResNet`.
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
        """Returns the logits [B, K], float32, of float pixels [B, H, W, C], 32 x 32 in the paper.

        Pixels are normalised already. In training BatchNorm uses (and updates) the statistics of
        the batch.
        """
        conv = partial(nn.Conv, use_bias=False, padding=1, dtype=self.dtype, kernel_init=he_normal)
        norm = batch_norm(train=train, axis_name=self.bn_axis_name, dtype=self.dtype)
        x_BHWC = conv(16, (3, 3), name="stem_conv")(images.astype(self.dtype))
        x_BHWC = nn.relu(norm(name="stem_norm")(x_BHWC))
        block = partial(CifarBlock, conv=conv, norm=norm)
        stages = [(16 * 2**stage, (self.depth - 2) // 6) for stage in range(3)]
        return stages_and_classes(self, x_BHWC, block, stages, train=train)


# He et al. 2015, table 6.
resnet20 = partial(CifarResNet, depth=20)
resnet32 = partial(CifarResNet, depth=32)
resnet44 = partial(CifarResNet, depth=44)
resnet56 = partial(CifarResNet, depth=56)
resnet110 = partial(CifarResNet, depth=110)


class SmallBlock(_Block):
    """Convolutions of 1x1, 3x3 and 1x1 of one width, and a shortcut, a convolution for stride 2."""

    @nn.compact
    def __call__(self, x_BHWC: jax.Array) -> jax.Array:
        """Maps [B, H, W, C] to [B, H / strides, W / strides, features]."""
        y_BHWC = self.conv(self.features, (1, 1), strides=self.strides)(x_BHWC)
        y_BHWC = nn.relu(self.norm()(y_BHWC))
        y_BHWC = nn.relu(self.norm()(self.conv(self.features, (3, 3), padding=1)(y_BHWC)))
        y_BHWC = self.norm()(self.conv(self.features, (1, 1))(y_BHWC))
        return self._with_shortcut(y_BHWC, x_BHWC)


class ResNetSmall(nn.Module):
    """The residual network of 26 weighted layers of the NERSC course "Deep Learning at Scale".

    It is for CIFAR-10 and has a 3x3 stem, four stages of 64, 128, 256 and 512 channels with two
    blocks each, and a classifier. Its attributes are as of `ResNet`. Every stage halves the image.
    Unlike in the ImageNet networks, convolutions have a bias and every BatchNorm scale starts at
    one, as in the course. The course leaves the decay of some BatchNorms at Keras's 0.99 and sets
    it to 0.9 in others; here it is 0.9 (and epsilon 1e-5) in all, so that the statistics are
    settled after short runs.
    """

    num_classes: int = 10
    dtype: Any = jnp.float32
    bn_axis_name: str | None = None
    kernel_l2: float = 0.0

    @nn.compact
    def __call__(self, images: jax.Array, *, train: bool) -> jax.Array:
        """Returns the logits [B, K], float32, of float pixels [B, H, W, C], H and W at least 16.

        In training BatchNorm uses (and updates) the statistics of the batch.
        """
        conv = partial(nn.Conv, padding=0, dtype=self.dtype, kernel_init=he_normal)
        norm = batch_norm(train=train, axis_name=self.bn_axis_name, dtype=self.dtype)
        x_BHWC = conv(64, (3, 3), padding=1, name="stem_conv")(images.astype(self.dtype))
        x_BHWC = nn.relu(norm(name="stem_norm")(x_BHWC))
        block = partial(SmallBlock, conv=conv, norm=norm)
        stages = [(features, 2) for features in (64, 128, 256, 512)]
        return stages_and_classes(self, x_BHWC, block, stages, train=train, first_strides=2)
