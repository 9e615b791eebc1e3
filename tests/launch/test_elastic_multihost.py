"""Elastic jobs over several hosts: one is cut off and comes back, a process is killed."""

import json
import time

import numpy as np
import pytest
from hosts import HOSTS, cut, finish, mend, needs_cuts, needs_hosts

pytestmark = [pytest.mark.multihost, needs_hosts]
SCRIPT = """
import json, os, pathlib, signal, sys, time
import numpy as np
rank, joins = int(os.environ["TNT_PROCESS_ID"]), "TNT_ELASTIC_JOINS" in os.environ
out, fate = sys.argv[1:]
import flax.linen as nn
import tnt_jax as tnt

rng = np.random.default_rng(0)
x = rng.normal(size=(480, 16)).astype(np.float32)
y = np.argmax(x @ rng.normal(size=(16, 4)), 1)
planned = int(os.environ["TNT_NUM_PROCESSES"])

class Fate(tnt.callbacks.Callback):
    steps, was_cut, is_back = 0, joins, joins
    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        # A host that comes back finds the others in the middle.
        waits = fate in ("cut", "back") and self.steps > 13 and not self.is_back
        time.sleep({"cut": 0.2, "back": 0.8}[fate] if waits else 0.05)
        self.was_cut = self.was_cut or tnt.get_process_count() < planned
        self.is_back = self.was_cut and tnt.get_process_count() == planned
        if self.steps == 13 and fate in ("cut", "back"):
            pathlib.Path(out, f"trains-{rank}").touch()
        if self.steps == 13 and fate == str(rank) and not joins:
            os.kill(os.getpid(), signal.SIGKILL)

model = tnt.Model(nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(4)]), seed=1)
loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(tnt.optimizers.SGD(0.1, momentum=0.9), loss=loss)
history = model.fit(x, y, batch_size=48, epochs=8, verbose=0, callbacks=[Fate()])
np.savez(f"{out}/{fate}-{rank}", *map(np.asarray, model.get_weights()))
pathlib.Path(f"{out}/{fate}-{rank}.json").write_text(json.dumps(history.history["loss"]))
"""


@pytest.fixture
def train(multihost, script, tmp_path):
    """Starts an elastic job, and returns its launcher."""

    def train(fate):
        return multihost("--elastic", script(SCRIPT, "train.py"), tmp_path, fate)

    return train


# Weights and losses of a job that loses nothing.
_undisturbed = []


@pytest.fixture
def check_alike(train, tmp_path):
    """Returns a check of weights and losses of some ranks against those of an undisturbed job."""
    if not _undisturbed:
        code, _, err = finish(train("none"), timeout=120)
        assert code == 0, err
        _undisturbed.extend(results_of(tmp_path, "none", 0))

    def check(fate, ranks):
        weights, losses = _undisturbed
        for rank in ranks:
            found, own_losses = results_of(tmp_path, fate, rank)
            for name in weights:
                np.testing.assert_allclose(found[name], weights[name], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(own_losses, losses, rtol=1e-4)

    return check


def results_of(folder, fate, rank):
    with np.load(folder / f"{fate}-{rank}.npz") as weights:
        return dict(weights), json.loads((folder / f"{fate}-{rank}.json").read_text())


def test_training_goes_on_without_the_killed_coordinator(train, check_alike):
    code, _, err = finish(train("0"), timeout=120)
    assert code == 0, err
    assert f"process 0 on {HOSTS[0]} was ended by signal 9 (SIGKILL)" in err
    check_alike("0", range(1, len(HOSTS)))


@pytest.fixture
def train_with_cut(train, tmp_path, wait_until):
    """Trains while the last host is cut off, for so many seconds or to the end."""

    def train_with_cut(name, for_s=None):
        launcher = train(name)
        lost = len(HOSTS) - 1
        wait_until(lambda: (tmp_path / f"trains-{lost}").exists(), timeout_s=90)
        cut(HOSTS[lost])
        try:
            ended = finish(launcher, timeout=120) if for_s is None else time.sleep(for_s)
        finally:
            mend(HOSTS[lost])
        code, _, err = ended or finish(launcher, timeout=180)
        assert code == 0, err
        assert f"process {lost} on {HOSTS[lost]} is out of reach" in err
        return lost, err

    return train_with_cut


@needs_cuts
def test_training_goes_on_without_a_host_that_is_cut_off(train_with_cut, check_alike, tmp_path):
    lost, _ = train_with_cut("cut")
    check_alike("cut", range(lost))
    assert not (tmp_path / f"cut-{lost}.npz").exists()


@needs_cuts
def test_a_host_that_was_cut_off_joins_again(train_with_cut, check_alike):
    lost, err = train_with_cut("back", for_s=14)  # It is lost after eight seconds of silence.
    assert f"{HOSTS[lost]} can be reached again" in err
    assert f"process {lost} joins on {HOSTS[lost]}" in err
    check_alike("back", range(len(HOSTS)))
