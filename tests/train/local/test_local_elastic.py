"""Groups that are lost in an elastic job, and come back; the truth is one process."""

import numpy as np
import pytest
from processes import launch

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

# The first `fit` has an update by the mean after each step, and so the weights of one device.
SCRIPT = '''
import os, signal, sys
import flax.linen as nn, numpy as np, optax
rank, joins = int(os.environ.get("TNT_PROCESS_ID", 0)), "TNT_ELASTIC_JOINS" in os.environ
planned = int(os.environ.get("TNT_NUM_PROCESSES", 1))
import tnt_jax as tnt
from tnt_jax.distributed.elastic.link import link

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
            link().await_end(100)

rng = np.random.default_rng(0)
x = rng.normal(size=(86, 8)).astype(np.float32)
y = np.argmax(x @ rng.normal(size=(8, 4)), 1)

def train(part):
    """Trains a model of which nothing is left afterwards: the next could not go on beside it."""
    sync = tnt.LocalSteps(groups="process", **PARTS[part]) if planned > 1 else None
    model = tnt.Model(Net(), seed=4, sync=sync)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optax.sgd(0.1), loss=loss, metrics=["accuracy"])
    history = model.fit(x, y, batch_size=9, epochs=4, verbose=0, callbacks=[Fate(LOST[part])])
    if int(model.state.step):  # It has trained, and not only taken the history of the others.
        logs = {name: np.asarray(values) for name, values in history.history.items()}
        weights = {f"weight {i}": value for i, value in enumerate(model.get_weights())}
        file = f"{sys.argv[1]}/{part}-{rank}-{joins}"
        np.savez(file, step=int(model.state.step), **logs, **weights)

for part in range(2):
    train(part)
'''


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each process wrote, by `fit`, rank and whether it came back; and the launcher's text."""
    folder = tmp_path_factory.mktemp("found")
    script = folder / "train.py"
    script.write_text(SCRIPT)
    flags = ["--elastic"]
    result = launch(3, script, folder, flags=flags, TNT_STALL_TIMEOUT="120")
    assert result.returncode == 0, result.stdout + result.stderr
    files = {file.stem: dict(np.load(file)) for file in sorted(folder.glob("*.npz"))}
    return files, result.stdout + result.stderr


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    script = folder / "train.py"
    script.write_text(SCRIPT)
    result = launch(0, script, folder)
    assert result.returncode == 0, result.stdout + result.stderr
    return dict(np.load(folder / "0-0-False.npz"))


def test_a_lost_group_is_left_out_and_comes_back(found):
    files, text = found
    assert sorted(files) == [
        *("0-0-False", "0-1-False", "0-2-True"),
        *("1-0-True", "1-1-False", "1-2-True"),
    ]
    for rank in (2, 0):
        assert f"process {rank} on localhost was ended by signal 9 (SIGKILL)" in text
        assert f"process {rank} joins on localhost" in text


def test_updates_by_the_mean_after_every_step_keep_the_weights_of_one_device(found, alone):
    files, _ = found
    for name in ("0-0-False", "0-1-False", "0-2-True"):
        for key, value in files[name].items():
            # The rows that the lost group has had are missing in the logs of an epoch.
            key_alone = alone[key][-2:] if key in ("loss", "accuracy") else alone[key]
            value = value[-2:] if key in ("loss", "accuracy") else value
            np.testing.assert_allclose(value, key_alone, rtol=1e-5, atol=1e-5, err_msg=key)


def test_all_groups_end_with_the_same_outer_weights(found):
    files, _ = found
    first, *others = [files[name] for name in ("1-1-False", "1-0-True", "1-2-True")]
    for other in others:
        for key, value in first.items():
            np.testing.assert_array_equal(other[key], value, err_msg=key)
    assert first["step"] == 40
    assert first["loss"][-1] < first["loss"][0]
