"""Trains a small network on rows that three hosts cannot share evenly, and prints what came out."""

import json

import flax.linen as nn
import numpy as np
import optax

import tnt_jax as tnt


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dropout(0.2, deterministic=not train)(nn.relu(nn.Dense(16)(x)))
        return nn.Dense(3)(x)


random = np.random.default_rng(0)
x, y = random.normal(size=(50, 8)).astype(np.float32), random.integers(0, 3, 50)
model = tnt.Model(Net(), seed=1)
loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer=optax.sgd(0.1, momentum=0.9), loss=loss, metrics=["accuracy"])
# 50 rows in batches of 12: an uneven division among three hosts, and a last batch of 2.
history = model.fit(x, y, batch_size=12, epochs=3, verbose=0)
predictions = model.predict(x, batch_size=12, verbose=0)
if tnt.is_master_rank():
    print(json.dumps([tnt.get_size(), history.history, np.asarray(predictions).tolist()]))
