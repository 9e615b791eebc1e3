"""Elastic jobs: processes are lost and join, and training ends as if nothing had been.

The truth is one process without losses.
"""

import json

import numpy as np
import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def long(value):
    return pytest.param(value, marks=pytest.mark.long)


SCRIPT = '''
import json, os, signal, sys, time
import numpy as np
rank, joins = int(os.environ.get("TNT_PROCESS_ID", 0)), "TNT_ELASTIC_JOINS" in os.environ
options = json.loads(sys.argv[1])
import flax.linen as nn
import tnt_jax as tnt

rng = np.random.default_rng(0)
x = rng.normal(size=(480, 16)).astype(np.float32)
y = np.argmax(x @ rng.normal(size=(16, 4)), 1)
planned = int(os.environ.get("TNT_NUM_PROCESSES", 1))
is_first = not joins and os.environ.get("TNT_RESTART_COUNT", "0") == "0"

class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Dense(32)(x))
        return nn.Dense(4)(nn.Dropout(0.2, deterministic=not train)(x))

class Fate(tnt.callbacks.Callback):
    """Notes the hooks, and lets this process meet its fate at a moment, if it was started first."""
    def __init__(self, part):
        super().__init__()
        self.hooks, self.steps, self.part = [], 0, part
    def meet(self, moment):
        fate = options.get("fates", {}).get(str(rank))
        if fate == f"{moment} of fit {self.part}" and is_first:
            if options.get("signal") == "hang":
                time.sleep(1000)
            os.kill(os.getpid(), getattr(signal, options.get("signal", "SIGKILL")))
    def on_train_begin(self, logs=None):
        self.meet("begin")
    def on_epoch_begin(self, epoch, logs=None):
        self.hooks.append(["epoch begins", epoch])
    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        self.hooks.append(["step", batch])
        self.meet(f"step {self.steps}")
        # A process that is to join finds the others in the middle.
        if options.get("waits") and self.steps > 12 and tnt.get_process_count() < planned:
            time.sleep(options["waits"])
    def on_test_batch_end(self, batch, logs=None):
        self.meet(f"validation after {self.steps}")
    def on_epoch_end(self, epoch, logs=None):
        self.hooks.append(["epoch ends", epoch])
        self.meet(f"epoch {epoch}")

model = tnt.Model(Net(), seed=1, reproducible=options.get("reproducible", False))
rate = options["rate_of_joining"] if joins and "rate_of_joining" in options else 0.1
model.compile(
    tnt.optimizers.SGD(
        rate, momentum=0.9, gradient_accumulation_steps=options.get("accumulation")
    ),
    loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
results = []
for part in range(options.get("fits", 1)):
    fate = Fate(part)
    callbacks = [fate]
    if "checkpoint" in options:
        callbacks.append(
            tnt.callbacks.ModelCheckpoint(options["checkpoint"], save_weights_only=True)
        )
    history = model.fit(
        x, y, batch_size=48, epochs=options.get("epochs", 4), verbose=0, callbacks=callbacks,
        validation_split=0.1,
    )
    logs = model.evaluate(x[:60], y[:60], verbose=0, return_dict=True)
    results.append({"history": history.history, "hooks": fate.hooks, "evaluated": logs})
out = f"{options['out']}/{rank}"
np.savez(out, *map(np.asarray, model.get_weights()))
found = {"fits": results, "size": tnt.get_process_count(), "joins": joins}
open(f"{out}.json", "w").write(json.dumps(found, default=float))
'''

# What one process gives, by the options of the script.
_alone = {}


@pytest.fixture
def train(run, script, tmp_path):
    """Trains in a job; returns its exit code, the launcher's text and what each process got."""

    def train(*arguments, environ=None, **options):
        folder = tmp_path / "out"
        folder.mkdir(exist_ok=True)
        given = json.dumps({"out": str(folder), **options})
        words = ["--no-gpu", *arguments, "--", script(SCRIPT, "train.py"), given]
        code, _, err = run(*words, timeout=200, environ=environ)
        found = {}
        for file in folder.glob("*.npz"):
            weights = np.load(file)
            results = json.loads(file.with_suffix(".json").read_text())
            found[int(file.stem)] = ([weights[name] for name in weights.files], results)
            file.unlink()
        return code, err, found

    return train


@pytest.fixture
def alone(train):
    """Returns weights and results of one process, which meets no fate."""

    def alone(**options):
        key = json.dumps(options, sort_keys=True)
        if key not in _alone:
            code, err, found = train("-n", 1, **options)
            assert code == 0, err
            _alone[key] = found[0]
        return _alone[key]

    return alone


def check_alike(found, expected, *, exactly=False):
    """Checks weights, histories and hooks of processes that were there from the start."""
    weights, results = expected
    bounds = {"rtol": 0, "atol": 0} if exactly else {"rtol": 1e-4, "atol": 1e-5}
    for other_weights, other in found.values():
        for one, another in zip(weights, other_weights, strict=True):
            np.testing.assert_allclose(another, one, **bounds)
        for one, another in zip(results["fits"], other["fits"], strict=True):
            for name, values in one["history"].items():
                np.testing.assert_allclose(another["history"][name], values, **bounds)
            if not other["joins"]:
                assert another["hooks"] == one["hooks"]
                for name, value in one["evaluated"].items():
                    np.testing.assert_allclose(another["evaluated"][name], value, **bounds)


@pytest.mark.parametrize(
    "fates",
    [
        {"2": "step 13 of fit 0"},
        {"0": "step 13 of fit 0"},
        {"1": "step 13 of fit 0", "2": "step 13 of fit 0"},
        long({"0": "step 9 of fit 0"}),
        long({"2": "validation after 18 of fit 0"}),
        long({"0": "epoch 1 of fit 0"}),
        long({"0": "step 1 of fit 0", "2": "epoch 1 of fit 0"}),
    ],
    ids=str,
)
def test_survivors_end_with_the_result_of_one_process(train, alone, fates):
    code, err, found = train("-n", 3, "--elastic", fates=fates)
    assert code == 0, err
    left = {rank: found[rank] for rank in range(3) if str(rank) not in fates}
    check_alike(left, alone())
    assert "was ended by signal 9 (SIGKILL)" in err
    assert "goes on at step" in err


@pytest.mark.parametrize("rank", [0, long(1)])
def test_a_replacement_joins_with_the_state_of_the_others(train, alone, rank):
    fates = {str(rank): "step 11 of fit 0"}
    code, err, found = train("-n", 2, "--elastic", "--min-processes", 1, fates=fates, waits=3)
    assert code == 0, err
    assert f"process {rank} joins on" in err
    assert sorted(found) == [0, 1]
    assert found[rank][1]["joins"]
    assert all(results["size"] == 2 for _, results in found.values())
    check_alike(found, alone())


def test_reproducible_training_keeps_its_bits_when_a_process_is_lost(train, alone):
    fates = {"0": "step 13 of fit 0"}
    code, err, found = train("-n", 2, "--elastic", fates=fates, reproducible=True)
    assert code == 0, err
    check_alike({1: found[1]}, alone(reproducible=True), exactly=True)


def test_a_stopped_process_is_lost_after_the_heartbeat(train, alone):
    options = {"fates": {"1": "step 13 of fit 0"}, "signal": "SIGSTOP"}
    code, err, found = train(
        "-n", 2, "--elastic", environ={"TNT_HEARTBEAT_TIMEOUT_S": "4"}, **options
    )
    assert code == 0, err
    assert "Process 1 on localhost has been silent for 4 s" in err
    check_alike({0: found[0]}, alone())


def test_a_process_that_is_stuck_is_lost_after_the_stall_timeout(train, alone):
    options = {"fates": {"1": "epoch 1 of fit 0"}, "signal": "hang"}
    code, err, found = train("-n", 2, "--elastic", environ={"TNT_STALL_TIMEOUT": "5"}, **options)
    assert code == 0, err
    assert "Process 1 has made no progress for" in err
    check_alike({0: found[0]}, alone())


@pytest.mark.long
def test_losses_in_two_fits_are_survived_and_a_replacement_skips_the_first(train, alone):
    options = {"fits": 2, "fates": {"1": "step 30 of fit 0", "0": "step 13 of fit 1"}}
    code, err, found = train("-n", 3, "--elastic", waits=3, **options)
    assert code == 0, err
    check_alike(found, alone(fits=2))


@pytest.mark.long
def test_a_replacement_that_would_train_otherwise_is_refused_by_name(train, alone):
    options = {"fates": {"1": "step 11 of fit 0"}, "rate_of_joining": 0.2, "epochs": 12}
    code, err, found = train("-n", 2, "--elastic", waits=1, **options)
    assert code == 0, err
    assert "Process 1 does not join: it would train otherwise than the others" in err
    assert "learning_rate" in err
    check_alike({0: found[0]}, alone(epochs=12))


@pytest.mark.long
def test_without_survivors_the_job_starts_again_from_its_checkpoint(train, alone, tmp_path):
    fates = {"0": "step 13 of fit 0", "1": "step 13 of fit 0"}
    options = ["--max-restarts", 1, "--checkpoint-dir", tmp_path / "run", "--checkpoint-every", 3]
    code, err, found = train("-n", 2, "--elastic", *options, fates=fates)
    assert "no process is left that has the state of training" in err
    assert "Restart 1" in err
    assert code == 0, err
    for weights, _ in found.values():
        for one, another in zip(alone()[0], weights, strict=True):
            np.testing.assert_allclose(another, one, rtol=1e-4, atol=1e-5)


def test_the_file_of_a_master_that_is_lost_is_complete(train, alone, tmp_path):
    path = tmp_path / "saved.weights.h5"
    fates = {"0": "step 20 of fit 0"}
    code, err, found = train("-n", 2, "--elastic", fates=fates, checkpoint=str(path))
    assert code == 0, err
    check_alike({1: found[1]}, alone())
    import h5py

    with h5py.File(path) as file:
        assert list(file)


def test_a_fit_whose_state_is_sharded_says_that_it_is_not_elastic(train):
    fates = {"1": "step 13 of fit 0"}
    code, err, _ = train("-n", 2, "--elastic", fates=fates, accumulation=2)
    assert code == 128 + 9
    assert "fit cannot go on in place, because accumulated gradients are sharded" in err


@pytest.mark.long
def test_with_too_few_processes_training_waits_for_a_replacement(train, alone):
    fates = {"1": "step 11 of fit 0"}
    code, err, found = train("-n", 2, "--elastic", "--min-processes", 2, fates=fates)
    assert code == 0, err
    assert "Generation 1 of 2 process(es)" in err
    check_alike(found, alone())
