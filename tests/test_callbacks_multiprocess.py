"""Files and prints of callbacks in two real processes: one copy, by the master, that every process can read."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.multiprocess

SCRIPT = """
import sys
import flax.linen as nn, keras, numpy as np
import tnt_jax as tnt
from tnt_jax import callbacks
folder = sys.argv[1]
tnt.init()
x = np.random.default_rng(0).normal(size=(24, 4)).astype(np.float32)
model = tnt.Model(nn.Dense(3))
model.compile(tnt.optimizers.SGD(0.05, momentum=0.9), loss="mse")
model.build((None, 4))
rank = tnt.get_rank()
model.fit(x, x[:, :3], batch_size=8, epochs=3, verbose=0, callbacks=[
    callbacks.CSVLogger(f"{folder}/ours-{rank}.csv"),
    keras.callbacks.CSVLogger(f"{folder}/keras-{rank}.csv"),
    callbacks.OnAllRanks(callbacks.CSVLogger(f"{folder}/all-{rank}.csv")),
    callbacks.ModelCheckpoint(f"{folder}/orbax"),
    keras.callbacks.ModelCheckpoint(f"{folder}/keras-{rank}.weights.h5", save_weights_only=True),
    keras.callbacks.BackupAndRestore(f"{folder}/keras-backup-{rank}"),
    callbacks.BackupAndRestore(f"{folder}/backup", delete_checkpoint=False),
    callbacks.EarlyStopping("loss", patience=1, min_delta=10.0, verbose=1),
    callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print(f"epoch {epoch} on rank {rank}", flush=True)),
])
model.save_weights(f"{folder}/own.weights.h5")
other = tnt.models.load_model(f"{folder}/orbax")
other.load_weights(f"{folder}/own.weights.h5")
for a, b in zip(other.get_weights(), model.get_weights()):
    np.testing.assert_array_equal(a, b)
assert other.optimizer.iterations == model.optimizer.iterations == 6
"""


def test_files_and_prints_of_two_processes(tmp_path):
    script, folder = tmp_path / "script.py", tmp_path / "out"
    script.write_text(SCRIPT)
    folder.mkdir()
    kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "PJRT_NPROC") and not k.startswith("TNT_")}
    result = subprocess.run(
        [sys.executable, "-m", "tnt_jax.launch", "-n", "2", "--no-gpu", "--", str(script), str(folder)],
        capture_output=True, text=True, timeout=240, env=kept | {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"},
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert sorted(path.name for path in folder.iterdir()) == [
        "all-0.csv", "all-1.csv", "backup", "keras-0.csv", "keras-0.weights.h5", "orbax", "ours-0.csv", "own.weights.h5",
    ]  # fmt: skip
    assert (folder / "all-0.csv").read_bytes() == (folder / "all-1.csv").read_bytes() == (folder / "ours-0.csv").read_bytes()
    assert result.stdout.count("on rank") == 2, "Two epochs ran, and the master alone prints."
    assert "on rank 1" not in result.stdout
    assert result.stdout.count("early stopping") == 1
