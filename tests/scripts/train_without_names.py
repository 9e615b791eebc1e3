"""Trains while private names of JAX are missing for tnt_jax alone, and writes losses and warnings."""

import json
import logging
import sys
from pathlib import Path

import flax.linen as nn
import jax
import numpy as np
import optax

sys.path.append(str(Path(__file__).parents[1] / "helpers"))
from missing_names import missing

FOLDER, MISSING = Path(sys.argv[1]), set(sys.argv[2:])
texts = []
handler = logging.Handler()
handler.emit = lambda record: texts.append(record.getMessage())
logging.getLogger("tnt_jax").addHandler(handler)

generator = np.random.default_rng(0)
X = generator.normal(size=(30, 5)).astype(np.float32)
Y = generator.normal(size=(30, 3)).astype(np.float32)


def train(tnt, module, **options):
    model = tnt.Model(module, seed=1, **options)
    model.compile(optax.sgd(0.1, momentum=0.9), loss="mse")
    losses = model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history["loss"]
    return [*losses, model.evaluate(X, Y, batch_size=8, verbose=0)]


class Drops(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=not train)(nn.Dense(16)(x)))


def drops(tnt):
    try:
        return train(tnt, Drops())
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def main():
    import tnt_jax as tnt
    from tnt_jax import _jax

    tnt.init()
    module = nn.Sequential([nn.Dense(16), nn.relu, nn.Dense(3)])
    losses = [*train(tnt, module), *train(tnt, module, mesh={"fsdp": 2})]
    with _jax.profile() as recording:
        jax.block_until_ready(jax.jit(jax.numpy.sin)(1.0))
    _jax.skip_cleanup()
    found = {
        "losses": losses,
        "dropout": drops(tnt),
        "planes": len(list(recording.data.planes)),
        "listens": _jax.coordinator_listens(),
        "warnings": texts,
    }
    (FOLDER / f"rank{tnt.get_process_index()}").write_text(json.dumps(found))


with missing(MISSING):
    main()
