"""Trains reproducibly on several numbers of virtual devices, and takes digests of all that a
run produces.
"""

import hashlib
from contextlib import contextmanager

import flax.linen as nn
import jax
import numpy as np

import tnt_jax as tnt


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.relu(nn.Dense(16)(x.reshape(x.shape[0], -1))))


class ConvNet(nn.Module):
    """A convolution, a batch normalisation and a dropout."""

    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Conv(4, (3, 3))(x)))
        x = nn.Dropout(0.3, deterministic=not train)(x.reshape(x.shape[0], -1))
        return nn.Dense(3)(x)


def images(rows, size=5):
    generator = np.random.default_rng(0)
    return generator.normal(size=(rows, size, size, 2)).astype(np.float32), generator.integers(
        0, 3, rows
    )


@contextmanager
def devices(number):
    """Makes the first devices the job's."""
    tnt.shutdown()
    tnt.init(devices=range(number))
    try:
        yield
    finally:
        tnt.shutdown()


def compiled(module, optimizer, *, reproducible=True, seed=3, **options):
    model = tnt.Model(module, reproducible=reproducible, seed=seed, **options)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    return model


def digest(tree):
    return [hashlib.md5(np.asarray(leaf).tobytes()).hexdigest() for leaf in jax.tree.leaves(tree)]


def digests(state):
    """Returns digests of a training state by the names of its parts; its key is a constant."""
    names = ("step", "params", "model_state", "opt_state", "accumulated")
    return {name: digest(getattr(state, name)) for name in names}


def fit_and_digest(model, data, *, predict_on=None, epochs=2, **arguments):
    """Trains, evaluates and predicts; returns the state's digests, the history, the evaluation
    and the predictions.
    """
    batched = data if isinstance(data, tuple) else (data,)
    history = model.fit(*batched, epochs=epochs, verbose=0, **arguments).history
    size = {name: arguments[name] for name in ("batch_size",) if name in arguments}
    outputs = model.predict(batched[0] if predict_on is None else predict_on, verbose=0, **size)
    evaluation = model.evaluate(*batched, verbose=0, **size)
    return digests(model.state) | {
        "history": history,
        "evaluate": evaluation,
        "predict": digest(outputs),
    }


def assert_equal_on(counts, run):
    """Checks that `run()` gives the same on each number of devices."""
    results = []
    for count in counts:
        with devices(count):
            results.append(run())
    for count, result in zip(counts[1:], results[1:], strict=True):
        different = [name for name in result if result[name] != results[0][name]]
        assert not different, f"{different} on {count} devices differ from those on {counts[0]}"
