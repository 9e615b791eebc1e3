"""Writes a file of each kind that the package writes, `tests/files/VERSION`, to be kept for good.

`python tests/helpers/release_files.py` is run once for each release; `test_release_files.py` reads
the files of all of them. `expected.npz` has the weights, and those after one more epoch.
"""

import os
import shutil
import tempfile
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import flax.linen as nn
import keras
import numpy as np

import tnt_jax as tnt
from tnt_jax import callbacks
from tnt_jax.distributed.goodput import Account, AccountFile
from tnt_jax.launch.scale.scaling import Run, Scaling, Shares

FOLDER = Path(__file__).parents[1] / "files"
ENDINGS = {
    "flax": ["", ".keras", ".weights.h5", ".safetensors"],
    "keras": ["", ".keras", ".h5", ".weights.h5", ".safetensors"],
}
HAS_MODEL = ("", ".keras", ".h5")
X = np.sin(np.arange(20 * 4, dtype=np.float32)).reshape(20, 4)
Y = np.arange(20) % 3
LOOP_STATE = {"params": {"w": np.arange(3.0, dtype=np.float32)}, "count": np.int32(7)}


def make_model(kind):
    if kind == "flax":
        module = nn.Sequential([nn.Dense(8), nn.relu, nn.Dense(3)])
    else:
        layers = keras.layers
        module = keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(8),
                layers.BatchNormalization(),
                layers.Dense(3),
            ]
        )
    model = tnt.Model(module, seed=0, synchronize_batch_norm=kind == "keras")
    model.compile(
        tnt.optimizers.SGD(0.05, momentum=0.9),
        loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def fit(model, epochs, initial_epoch=0, **options):
    options = {"batch_size": 8, "shuffle": False, "verbose": 0} | options
    return model.fit(X, Y, epochs=epochs, initial_epoch=initial_epoch, **options)


def flat(name, model):
    return {f"{name}/{n}": w for n, w in enumerate(model.get_weights())}


def scaling():
    shares = Shares(0.5, 0.25, 0.125, 0.125)
    runs = [
        Run(
            ranks=ranks,
            round=0,
            rows=1000,
            seconds=seconds,
            hosts=1,
            processes=ranks,
            device="cpu",
            global_batch=100,
            steps=10,
            shares=shares,
            compile_s=1.5,
            memory_bytes=3 * 2**20,
            memory_of="process",
            gradient_bytes=4096,
            versions={"jax": "0.12.0"},
        )
        for ranks, seconds in [(1, 1.0), (2, 0.625)]
    ]
    return Scaling("train.py", False, runs)


def write(folder):
    tnt.init(devices=range(1))
    expected = {}
    for kind, endings in ENDINGS.items():
        model = make_model(kind)
        fit(model, 2)
        expected |= flat(kind, model)
        for ending in endings:
            path = folder / f"{kind}{ending}"
            model.save(path) if ending in HAS_MODEL else model.save_weights(path)
        fit(model, 3, initial_epoch=2)
        expected |= flat(f"{kind}_after", model)
    backup = callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)
    log, digests = (
        callbacks.CSVLogger(folder / "log.csv"),
        callbacks.Fingerprint(folder / "digests"),
    )
    fit(make_model("flax"), 2, callbacks=[backup, log, digests])
    dataset = tnt.distribute(X, batch_size=8)
    next(iter(dataset))
    checkpoints = tnt.LoopCheckpoints(folder / "loop")
    checkpoints.save(LOOP_STATE, dataset, notes={"best": 0.25})
    checkpoints.close()
    account = Account()
    account.add_steps(6)
    AccountFile(folder / "goodput.jsonl").write(account.notes(is_finished=False))
    (folder / "scaling.json").write_text(scaling().to_json())
    np.savez(folder / "expected.npz", **expected)


if __name__ == "__main__":
    target = FOLDER / tnt.__version__
    if target.exists():
        raise SystemExit(f"{target} is there: files of a release are never changed.")
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        shutil.copytree(folder, target)
