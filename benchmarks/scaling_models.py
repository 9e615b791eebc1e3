"""Models and data of `benchmarks/scaling.py`: the same architectures in Flax, PyTorch and Keras, on
random or on real data.

Libraries are imported by the function that needs them, because each contender runs in processes of
its own.
"""

import gzip
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

NUM_TOKENS, WIDTH, NUM_HEADS, FILTER, NUM_LAYERS, VOCABULARY = 32, 128, 4, 512, 2, 256


@dataclass(frozen=True)
class Size:
    """How much of a model is run.

    Attributes:
        rows: Rows of a rank in a step.
        steps: Steps of a round.
        shape: Shape of a random image.
        classes: Number of classes.
    """

    rows: int
    steps: int
    shape: tuple[int, ...] = ()
    classes: int = 10


SIZES = {
    "mlp": Size(128, 20, (28, 28, 1)),
    "resnet20": Size(32, 3, (32, 32, 3)),
    "transformer_tiny": Size(16, 10, classes=VOCABULARY),
    "digits": Size(32, 40, (8, 8, 1)),
    "resnet50": Size(8, 3, (64, 64, 3), 1000),
}


def load(model: str, *, real: bool, num_rows: int) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Returns inputs, each `[rows, ...]`, and labels: random ones, or scikit-learn's digits, or
    Fashion-MNIST and sentence pairs below `TNT_JAX_DATA`.
    """
    if real:
        inputs, labels = {"transformer_tiny": _sentences, "digits": _digits}.get(model, _fashion)()
        # Repeated where a run needs more than there is.
        chosen = np.arange(num_rows) % len(labels)
        return tuple(x[chosen] for x in inputs), labels[chosen]
    rng, size = np.random.default_rng(0), SIZES[model]
    if model == "transformer_tiny":
        sources, targets = rng.integers(1, VOCABULARY, (2, num_rows, NUM_TOKENS), np.int32)
        return (sources, targets), targets
    images = rng.normal(size=(num_rows, *size.shape)).astype(np.float32)
    return (images,), rng.integers(0, size.classes, num_rows).astype(np.int32)


def _fashion() -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    folder = Path(os.environ["TNT_JAX_DATA"]) / "fashion_mnist"
    images = gzip.decompress((folder / "train-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((folder / "train-labels-idx1-ubyte.gz").read_bytes())
    pixels = np.frombuffer(images, np.uint8, offset=16).reshape(-1, 28, 28, 1)
    return (pixels.astype(np.float32) / 255,), np.frombuffer(labels, np.uint8, offset=8).astype(
        np.int32
    )


def _digits() -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return (images.reshape(-1, 8, 8, 1).astype(np.float32) / 16,), labels.astype(np.int32)


def _sentences() -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    path = Path(os.environ["TNT_JAX_DATA"]) / "tatoeba_ende" / "train.eng-deu.tsv.gz"
    with gzip.open(path, "rt", encoding="utf-8") as file:
        pairs = [
            line.rstrip("\n").split("\t")[-2:] for line, _ in zip(file, range(20000), strict=False)
        ]

    def encode(texts: Sequence[str]) -> np.ndarray:
        rows = [text.encode()[:NUM_TOKENS].ljust(NUM_TOKENS, b"\0") for text in texts]
        return np.frombuffer(b"".join(rows), np.uint8).reshape(-1, NUM_TOKENS).astype(np.int32)

    sources, targets = encode([pair[0] for pair in pairs]), encode([pair[1] for pair in pairs])
    return (sources, targets), targets


def make_flax(model: str) -> Any:
    """Returns a Linen module."""
    import flax.linen as nn

    from tnt_jax.models.resnet import resnet20, resnet50
    from tnt_jax.models.transformer import Transformer

    if model == "mlp":

        class MLP(nn.Module):
            @nn.compact
            def __call__(self, x: Any) -> Any:
                x = nn.relu(nn.Dense(1024)(x.reshape(len(x), -1)))
                return nn.Dense(10)(nn.relu(nn.Dense(1024)(x)))

        return MLP()
    if model == "digits":

        class DigitNet(nn.Module):
            @nn.compact
            def __call__(self, x: Any, train: bool = True) -> Any:
                for width in (16, 32):
                    x = nn.BatchNorm(not train, momentum=0.9, axis_name="data")(
                        nn.Conv(width, (3, 3))(x)
                    )
                    x = nn.max_pool(nn.relu(x), (2, 2), (2, 2))
                x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
                return nn.Dense(10)(nn.Dropout(0.3, deterministic=not train)(x))

        return DigitNet()
    if model == "transformer_tiny":
        return Transformer(
            vocab_size=VOCABULARY, width=WIDTH, num_heads=NUM_HEADS, filter_dim=FILTER,
            num_layers=NUM_LAYERS,
            dropout=0.0, attention_dropout=0.0, relu_dropout=0.0,
        )  # fmt: skip
    return resnet20() if model == "resnet20" else resnet50(num_classes=1000)


def make_torch(model: str, image_channels: int) -> Any:
    """Returns a PyTorch module that takes images `[rows, channels, height, width]`, or sources and
    targets.
    """
    from torch import nn

    class Network(nn.Module):
        # Within DistributedDataParallel, torch.compile leaves an nn.Sequential as it is.
        def __init__(self) -> None:
            super().__init__()
            self.body = _torch_layers(model, image_channels)

        def forward(self, *inputs: Any) -> Any:
            return self.body(*inputs)

    return Network()


def _torch_layers(model: str, image_channels: int) -> Any:
    import torch
    from torch import nn

    if model == "resnet50":
        return _torch_resnet50()
    if model == "mlp":
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(784, 1024),
            nn.ReLU(),
            nn.Linear(1024, 1024),
            nn.ReLU(),
            nn.Linear(1024, 10),
        )

    if model == "digits":
        layers: list[Any] = []
        for before, width in ((image_channels, 16), (16, 32)):
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
            layers.append(nn.MaxPool2d(2))
        layers += [nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 10)]
        return nn.Sequential(*layers)

    class Block(nn.Module):
        def __init__(self, before: int, width: int) -> None:
            super().__init__()
            stride = 1 if before == width else 2
            self.body = nn.Sequential(
                nn.Conv2d(before, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width),
            )  # fmt: skip
            self.shortcut = (
                nn.Identity()
                if before == width
                else nn.Conv2d(before, width, 1, stride, bias=False)
            )

        def forward(self, x: Any) -> Any:
            return torch.relu(self.body(x) + self.shortcut(x))

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, WIDTH)
            self.body = nn.Transformer(
                WIDTH,
                NUM_HEADS,
                NUM_LAYERS,
                NUM_LAYERS,
                FILTER,
                0.0,
                batch_first=True,
                norm_first=True,
            )

        def forward(self, sources: Any, targets: Any) -> Any:
            mask = nn.Transformer.generate_square_subsequent_mask(targets.shape[1])
            out = self.body(
                self.embedding(sources), self.embedding(targets), tgt_mask=mask, tgt_is_causal=True
            )
            return out @ self.embedding.weight.T

    if model == "transformer_tiny":
        return Translator()
    widths = [16] * 3 + [32] * 3 + [64] * 3
    blocks = [Block(before, width) for before, width in zip([16, *widths], widths, strict=False)]
    stem = [nn.Conv2d(image_channels, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def _torch_resnet50() -> Any:
    """Returns ResNet-50 with the stride in the 3x3 convolutions, 25,557,032 parameters, as
    torchvision's.
    """
    import torch
    from torch import nn

    def convolve(before: int, width: int, size: int, stride: int = 1) -> list[Any]:
        return [
            nn.Conv2d(before, width, size, stride, size // 2, bias=False),
            nn.BatchNorm2d(width),
        ]

    class Bottleneck(nn.Module):
        def __init__(self, before: int, width: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                *convolve(before, width, 1),
                nn.ReLU(),
                *convolve(width, width, 3, stride),
                nn.ReLU(),
                *convolve(width, 4 * width, 1),
            )
            self.shortcut = (
                nn.Identity()
                if before == 4 * width
                else nn.Sequential(*convolve(before, 4 * width, 1, stride))
            )

        def forward(self, x: Any) -> Any:
            return torch.relu(self.body(x) + self.shortcut(x))

    blocks, before = [], 64
    for width, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for index in range(count):
            blocks.append(Bottleneck(before, width, 2 if index == 0 and width > 64 else 1))
            before = 4 * width
    stem = [*convolve(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    return nn.Sequential(
        *stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)
    )


def make_keras(model: str, shape: Sequence[int]) -> Any:
    """Returns a Keras 3 model on whatever backend Keras runs on, for images of a shape or for
    sources and targets.
    """
    import keras
    from keras import layers

    if model == "resnet50":
        options: dict[str, Any] = {"weights": None, "classifier_activation": None}
        return keras.applications.ResNet50(input_shape=tuple(shape), **options)
    if model == "mlp":
        widths = [
            layers.Dense(1024, activation="relu"),
            layers.Dense(1024, activation="relu"),
            layers.Dense(10),
        ]
        return keras.Sequential([keras.Input(tuple(shape)), layers.Flatten(), *widths])
    if model == "digits":
        # On JAX, Keras computes the statistics of the global batch anyway.
        is_asked_for = keras.backend.backend() == "tensorflow"
        found = [keras.Input(tuple(shape))]
        for width in (16, 32):
            found += [
                layers.Conv2D(width, 3, padding="same"),
                layers.BatchNormalization(synchronized=is_asked_for),
                layers.ReLU(),
                layers.MaxPooling2D(2),
            ]
        found += [layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dropout(0.3)]
        return keras.Sequential([*found, layers.Dense(10)])
    return (
        _keras_translator(keras) if model == "transformer_tiny" else _keras_resnet20(keras, shape)
    )


def _keras_resnet20(keras: Any, shape: Sequence[int]) -> Any:
    layers = keras.layers

    def convolve(x: Any, width: int, stride: int) -> Any:
        return layers.BatchNormalization()(
            layers.Conv2D(width, 3, stride, "same", use_bias=False)(x)
        )

    inputs = keras.Input(tuple(shape))
    x = layers.ReLU()(convolve(inputs, 16, 1))
    for width in [16] * 3 + [32] * 3 + [64] * 3:
        stride = 1 if x.shape[-1] == width else 2
        shortcut = x if stride == 1 else layers.Conv2D(width, 1, stride, use_bias=False)(x)
        x = convolve(layers.ReLU()(convolve(x, width, stride)), width, 1)
        x = layers.ReLU()(layers.Add()([x, shortcut]))
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def _keras_translator(keras: Any) -> Any:
    layers = keras.layers

    def attend(x: Any, memory: Any, *, causal: bool) -> Any:
        normal = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(NUM_HEADS, WIDTH // NUM_HEADS)
        return x + attention(normal, normal if memory is None else memory, use_causal_mask=causal)

    def feed_forward(x: Any) -> Any:
        return x + layers.Dense(WIDTH)(
            layers.Dense(FILTER, activation="relu")(layers.LayerNormalization()(x))
        )

    sources, targets = (
        keras.Input((NUM_TOKENS,), dtype="int32"),
        keras.Input((NUM_TOKENS,), dtype="int32"),
    )
    embedding = layers.ReversibleEmbedding(VOCABULARY, WIDTH)
    memory, x = embedding(sources), embedding(targets)
    for _ in range(NUM_LAYERS):
        memory = feed_forward(attend(memory, None, causal=False))
    memory = layers.LayerNormalization()(memory)
    for _ in range(NUM_LAYERS):
        x = feed_forward(attend(attend(x, None, causal=True), memory, causal=False))
    return keras.Model([sources, targets], embedding(layers.LayerNormalization()(x), reverse=True))


MODELS: dict[str, Callable[..., Any]] = {
    "flax": make_flax,
    "torch": make_torch,
    "keras": make_keras,
}
