"""Groups that are lost in an elastic job, and come back; the truth is one process."""

import runpy

import numpy as np
import pytest
from processes import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

# The first part has an update by the mean after each step, and so the weights of one device.
SCRIPT = '''
import os, signal, sys, time
import flax.linen as nn, numpy as np, optax
rank, joins = int(os.environ.get("TNT_PROCESS_ID", 0)), "TNT_ELASTIC_JOINS" in os.environ
planned = int(os.environ.get("TNT_NUM_PROCESSES", 1))
import tnt_jax as tnt
from tnt_jax.distributed.elastic import link

PARTS = [
    {"every": 1, "outer": optax.sgd(1.0)},
    {"every": 4, "fragments": 2, "delay": 1, "compress": "int8"},
]
# The rank that is lost in each.
LOST = [2, 0]

class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        return nn.Dense(4)(nn.relu(nn.Dense(16)(x)))

class Fate(tnt.callbacks.Callback):
    """Kills one process after step 7, and lets the others wait after step 12 for its successor."""
    def __init__(self, lost):
        super().__init__()
        self.steps, self.lost = 0, lost
    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        if self.steps == 7 and rank == self.lost and not joins and planned > 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.steps == 12 and tnt.get_process_count() < planned:
            while not link().ends_after_step:  # The launcher ends a job that is stuck.
                time.sleep(0.05)

rng = np.random.default_rng(0)
x = rng.normal(size=(81, 8)).astype(np.float32)
y = np.argmax(x @ rng.normal(size=(8, 4)), 1)

part = int(sys.argv[2])
sync = tnt.LocalSteps(groups="process", **PARTS[part]) if planned > 1 else None
model = tnt.Model(Net(), seed=4, sync=sync)
loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optax.sgd(0.1), loss=loss, metrics=["accuracy"])
history = model.fit(x, y, batch_size=9, epochs=4, verbose=0, callbacks=[Fate(LOST[part])])
weights = {f"weight {i}": value for i, value in enumerate(model.get_weights())}
file = f"{sys.argv[1]}/{rank}-{joins}"
np.savez(file, step=int(model.state.step), **history.history, **weights)
'''


@pytest.fixture
def train(tmp_path):
    """Returns a function that trains a part in three processes.

    It returns what each process wrote, by rank and whether it came back, and the launcher's text.
    """

    def train(part):
        script = tmp_path / "train.py"
        script.write_text(SCRIPT)
        result = launch(3, script, tmp_path, part, flags=["--elastic"])
        text = result.stdout + result.stderr
        assert result.returncode == 0, text
        return {file.stem: dict(np.load(file)) for file in sorted(tmp_path.glob("*.npz"))}, text

    return train


def check_return(files, text, lost):
    """Checks that one process was lost and came back, and all have trained to the end."""
    assert sorted(files) == sorted(f"{rank}-{rank == lost}" for rank in range(3))
    assert f"process {lost} on localhost was ended by signal 9 (SIGKILL)" in text
    assert f"process {lost} joins on localhost" in text
    assert all(found["step"] == 36 for found in files.values())


def test_updates_by_the_mean_after_every_step_keep_the_weights_of_one_device(
    train, tmp_path, monkeypatch, use_ranks
):
    files, text = train(0)
    check_return(files, text, 2)
    (folder := tmp_path / "alone").mkdir()
    use_ranks(1)
    monkeypatch.setattr("sys.argv", ["", str(folder), "0"])
    runpy.run_path(str(tmp_path / "train.py"))
    alone = dict(np.load(folder / "0-False.npz"))
    for found in files.values():
        for name, expected in alone.items():
            # The rows that the lost group has had are missing in the logs of an epoch.
            last = slice(-2, None) if name in ("loss", "accuracy") else ...
            np.testing.assert_allclose(
                found[name][last], expected[last], rtol=1e-5, atol=1e-5, err_msg=name
            )


@pytest.mark.long
def test_all_groups_end_with_the_same_outer_weights_when_the_master_was_lost(train):
    files, text = train(1)
    check_return(files, text, 0)
    first, *others = files.values()
    for other in others:
        for name, value in first.items():
            np.testing.assert_array_equal(other[name], value, err_msg=name)
    assert first["loss"][-1] < first["loss"][0]
