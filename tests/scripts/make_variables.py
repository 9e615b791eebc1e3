"""Builds models in several processes, and writes what each process compiled, raised and holds."""

import hashlib
import json
import sys
from pathlib import Path

import flax.linen as nn
import numpy as np
import optax

import tnt_jax as tnt
from tnt_jax.train import coming

X = np.random.default_rng(0).normal(size=(12, 5)).astype(np.float32)
Y = X.sum(1).reshape(-1, 1)


def make_model():
    model = tnt.Model(nn.Sequential([nn.Dense(7), nn.relu, nn.Dense(1)]), seed=3)
    model.compile(optax.sgd(0.1), loss="mse")
    return model


def fit(model, rows=slice(None)):
    model.fit(X[rows], Y[rows], batch_size=6, verbose=0, shuffle=False)
    return model


def digest(model):
    return hashlib.md5(b"".join(x.tobytes() for x in model.get_weights())).hexdigest()


def error_of(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def fail(*arguments):
    raise MemoryError("no memory for the variables")


def found_by_process():
    tnt.init()
    process, found, run = tnt.get_process_index(), {}, coming._run
    made = []
    coming._run = lambda *arguments: made.append(process) or run(*arguments)
    built = make_model()
    built.build((None, 5))
    found["built"], found["of build"] = digest(built), len(made)
    found["trained"], found["of fit"] = digest(fit(make_model())), len(made)

    coming._run = fail
    broken = make_model()
    found["error"] = error_of(lambda: fit(broken))
    found["error of build"] = error_of(lambda: broken.build((None, 5)))
    coming._run = run

    # An error between `build` and the first use of the variables; then one process alone asks.
    found["refused"] = error_of(lambda: broken.fit(X, Y[:, [0, 0, 0]], batch_size=6, verbose=0))
    found["is built"] = broken.built if process == 0 else False
    found["after errors"] = digest(fit(broken))

    # Outside of `fit`, an error leaves the variables that were made.
    evaluated = make_model()
    wrong = lambda: evaluated.evaluate(X, Y[:, [0, 0, 0]], batch_size=6, verbose=0)  # noqa: E731
    found["refused by evaluate"] = error_of(wrong)
    if process == 0:
        digest(evaluated)  # The others are elsewhere, and need not be asked.
    tnt.barrier()
    return found


if __name__ == "__main__":
    found = found_by_process()
    Path(sys.argv[1], f"process{tnt.get_process_index()}").write_text(json.dumps(found))
