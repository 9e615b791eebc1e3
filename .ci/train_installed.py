"""Trains with the installed package alone, in two processes; `.ci/release` starts it."""

import sys
import tempfile
from pathlib import Path

import flax.linen as nn
import numpy as np

import tnt_jax as tnt

rng = np.random.default_rng(0)
x = rng.normal(size=(1000, 8)).astype(np.float32)
y = (x[:, 0] * x[:, 1] > 0).astype(np.int32)

model = tnt.Model(nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(2)]))
loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(tnt.optimizers.Adam(0.01), loss=loss, metrics=["accuracy"])
model.fit(x, y, batch_size=64, epochs=20, verbose=0)
accuracy = model.evaluate(x, y, verbose=0)[1]

folder = tnt.broadcast_object(tempfile.mkdtemp())
model.save(f"{folder}/model")
again = tnt.models.load_model(f"{folder}/model").evaluate(x, y, verbose=0)[1]

assert Path(tnt.__file__).is_relative_to(sys.prefix), f"{tnt.__file__} is not the installed one."
assert tnt.get_size() == 2, tnt.get_size()
assert accuracy == again > 0.9, (accuracy, again)
if tnt.is_master_rank():
    print(f"Python {sys.version.split()[0]}, tnt_jax {tnt.__version__}: accuracy {accuracy:.2f}")
