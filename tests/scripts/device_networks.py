"""Trains small networks of every library on the device that JAX finds, and prints JSON: of each the
losses, an evaluation and some outputs, or its error.

The tests marked `gpu` run it on a GPU and on CPUs, in full precision.
"""

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
from flax import nnx

import tnt_jax as tnt
from tnt_jax.models import DECODER_SIZES, Decoder, resnet20

RNG = np.random.default_rng(0)
IMAGES = RNG.standard_normal((90, 16, 16, 3)).astype(np.float32)
LABELS = RNG.integers(0, 10, 90).astype(np.int32)
TOKENS = RNG.integers(0, 256, (90, 32)).astype(np.int32)
LOSS = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)


class Cnn(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Conv(16, (3, 3), strides=2)(x))
        x = nn.Dropout(0.2, deterministic=not train)(x.mean((1, 2)))
        return nn.Dense(10)(nn.tanh(nn.Dense(64)(x)))


class OfNnx(nnx.Module):
    def __init__(self, rngs):
        self.conv, self.norm = nnx.Conv(3, 16, (3, 3), rngs=rngs), nnx.LayerNorm(16, rngs=rngs)
        self.dropout, self.head = nnx.Dropout(0.2, rngs=rngs), nnx.Linear(16, 10, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(nnx.relu(self.norm(self.conv(x))).mean((1, 2))))


def of_keras(*layers):
    return keras.Sequential([*layers, keras.layers.Dense(10)])


def fitted(module, x=IMAGES, y=LABELS, *, optimizer=None, fit=None, **options):
    """Returns what two epochs with an incomplete last batch give."""
    compiling = {k: options.pop(k) for k in ("steps_per_execution", "on_nan") if k in options}
    model = tnt.Model(module, seed=3, **options)
    model.compile(optimizer or tnt.optimizers.SGD(0.05), loss=LOSS, metrics=["accuracy"],
                  **compiling)  # fmt: skip
    history = model.fit(x, y, batch_size=32, epochs=2, verbose=0, **(fit or {})).history["loss"]
    evaluation = model.evaluate(x, y, batch_size=32, verbose=0)
    outputs = np.asarray(model.predict(x[:5], verbose=0), np.float32)
    return [*history, evaluation[0], *outputs.ravel()[:20].tolist()]


def resumed():
    """Two epochs in one call, and in two models, of which the second one goes on with a file."""
    whole = fitted(Cnn(), reproducible=True)
    with tempfile.TemporaryDirectory() as folder:
        for epochs in (1, 2):
            model = tnt.Model(Cnn(), seed=3, reproducible=True)
            model.compile(tnt.optimizers.SGD(0.05), loss=LOSS, metrics=["accuracy"])
            callback = tnt.callbacks.BackupAndRestore(
                Path(folder, "backup"), delete_checkpoint=False
            )
            model.fit(IMAGES, LABELS, batch_size=32, epochs=epochs, verbose=0, callbacks=[callback])
    loss = model.evaluate(IMAGES, LABELS, batch_size=32, verbose=0)[0]
    assert loss == whole[2], (loss, whole[2])
    return [loss]


def own_loop():
    net, optimizer = Cnn(), optax.sgd(0.05)

    @tnt.distributed_step
    def step(state, batch, key):
        def loss_of(params):
            outputs = net.apply({"params": params}, batch.inputs, train=True, rngs={"dropout": key})
            losses = optax.softmax_cross_entropy_with_integer_labels(outputs, batch.targets)
            return tnt.compute_average_loss(losses)

        params, opt_state = state
        loss, grads = tnt.value_and_grad(loss_of)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    params = net.init(jax.random.key(0), IMAGES[:1], train=False)["params"]
    state, losses = (params, optimizer.init(params)), []
    for batch in tnt.distribute(IMAGES, LABELS, batch_size=32):
        state, metrics = step(state, batch, jax.random.key(1))
        losses.append(float(metrics["loss"]))
    return losses


def in_half_precision(policy):
    # Rounding differs from device to device: the caller compares with less.
    return fitted(Cnn(), precision=policy)[:3]


def decoder():
    sizes = DECODER_SIZES["tiny"]
    return fitted(Decoder(**sizes), TOKENS, np.roll(TOKENS, -1, 1))


LAYERS = keras.layers
NETWORKS = {
    "linen": lambda: fitted(Cnn()),
    "resnet20": lambda: fitted(resnet20(num_classes=10)),
    "nnx": lambda: fitted(OfNnx(nnx.Rngs(0))),
    "keras": lambda: fitted(
        of_keras(LAYERS.Input((16, 16, 3)), LAYERS.Conv2D(16, 3), LAYERS.BatchNormalization(),
                 LAYERS.ReLU(), LAYERS.GlobalAveragePooling2D(), LAYERS.Dropout(0.2, seed=1))
    ),
    "keras lstm": lambda: fitted(
        of_keras(LAYERS.Input((32,)), LAYERS.Embedding(256, 16), LAYERS.LSTM(32)), TOKENS
    ),
    "keras gru": lambda: fitted(
        of_keras(LAYERS.Input((32,)), LAYERS.Embedding(256, 16, mask_zero=True), LAYERS.GRU(32)),
        TOKENS,
    ),
    "decoder": decoder,
    "accumulated": lambda: fitted(
        Cnn(), optimizer=tnt.optimizers.SGD(0.05, gradient_accumulation_steps=2)
    ),
    "as many rows as fit": lambda: fitted(Cnn(), fit={"tnt_micro_batch_size": "auto"}),
    "several steps": lambda: fitted(Cnn(), steps_per_execution=3),
    "adam": lambda: fitted(Cnn(), optimizer="adam"),
    "skip": lambda: fitted(Cnn(), on_nan="skip"),
    "reproducible": lambda: fitted(Cnn(), reproducible=True, virtual_ranks=4),
    "resumed": resumed,
    "own loop": own_loop,
    "local steps": lambda: fitted(Cnn(), sync=tnt.LocalSteps(every=2)),
    "mesh": lambda: fitted(Cnn(), mesh={"data": 1, "fsdp": 1}),
    "bfloat16": lambda: in_half_precision("mixed_bfloat16"),
}  # fmt: skip


def result_of(network):
    keras.utils.set_random_seed(0)  # Layers draw their seeds where they are made.
    try:
        return [float(x) for x in network()]
    except Exception:
        return traceback.format_exc()


if __name__ == "__main__":
    wanted = sys.argv[1:] or NETWORKS
    found = {name: result_of(NETWORKS[name]) for name in wanted}
    platform = jax.default_backend()
    assert jnp.zeros(1).devices() == {jax.devices()[0]}
    print("RESULT " + json.dumps({"platform": platform, "found": found}))
