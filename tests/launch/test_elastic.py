"""Elastic jobs: processes are lost and join, and training ends as if nothing had been.

The truth is one process without losses.
"""

import json
import os
import re

import h5py
import numpy as np
import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def long(value):
    values = value if isinstance(value, tuple) else (value,)
    return pytest.param(*values, marks=pytest.mark.long)


SCRIPT = '''
import contextlib, json, os, signal, sys, time
import numpy as np
rank, joins = int(os.environ.get("TNT_PROCESS_ID", 0)), "TNT_ELASTIC_JOINS" in os.environ
options = json.loads(sys.argv[1])
if joins:
    options |= options.get("of_joining", {})
import flax.linen as nn
import tnt_jax as tnt

rng = np.random.default_rng(0)
x = rng.normal(size=(480, 16)).astype(np.float32)
y = np.argmax(x @ rng.normal(size=(16, 4)), 1)
x[options.get("bad_rows", [])] = np.nan
planned = int(os.environ.get("TNT_NUM_PROCESSES", 1))
is_first = not joins and os.environ.get("TNT_RESTART_COUNT", "0") == "0"

def meet(moment):
    """Lets this process, if it was started first, meet its fate at a moment."""
    if options.get("fates", {}).get(str(rank)) == moment and is_first:
        if "vanishes" in options:
            with contextlib.suppress(FileNotFoundError):  # Another process has done so.
                os.rename(options["vanishes"], options["vanishes"] + "-gone")
        if options.get("signal") == "host":
            os.kill(os.getppid(), signal.SIGKILL)  # With its supervisor the host is lost.
        if options.get("signal") in ("host", "hang"):
            time.sleep(1000)
        os.kill(os.getpid(), getattr(signal, options.get("signal", "SIGKILL")))

meet("start")

class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.relu(nn.Dense(32)(x))
        return nn.Dense(4)(nn.Dropout(0.2, deterministic=not train)(x))

class Fate(tnt.callbacks.Callback):
    """Notes the hooks of a `fit`, and meets the fate of this process."""
    def __init__(self, part):
        super().__init__()
        self.hooks, self.steps, self.generations, self.part = [], 0, 0, part
    def meet(self, moment):
        meet(f"{moment} of fit {self.part}")
    def on_train_begin(self, logs=None):
        self.meet("begin")
    def on_epoch_begin(self, epoch, logs=None):
        self.hooks.append(["epoch begins", epoch])
    def on_train_batch_end(self, batch, logs=None):
        self.steps += 1
        self.hooks.append(["step", batch])
        if self.steps == 5:
            traced_early.append(len(traced))
        self.meet(f"step {self.steps}")
        # A process that is to join finds the others in the middle.
        if options.get("waits") and self.steps > 12 and tnt.get_process_count() < planned:
            time.sleep(options["waits"])
    def on_test_batch_end(self, batch, logs=None):
        self.meet(f"validation after {self.steps}")
    def on_epoch_end(self, epoch, logs=None):
        self.hooks.append(["epoch ends", epoch])
        self.meet(f"epoch {epoch}")
    def on_generation(self):
        self.generations += 1
        self.meet(f"generation {self.generations}")

class Later(tnt.callbacks.Callback):
    """Meets the fate of this process in the calls after `fit`."""
    def on_test_batch_end(self, batch, logs=None):
        meet(f"batch {batch} of evaluation")
    def on_predict_batch_end(self, batch, logs=None):
        meet(f"batch {batch} of prediction")

sharded = {
    None: {},
    "optimizer": {"shard_optimizer_state": True},
    "variables": {"mesh": {"fsdp": planned} if planned > 1 else None},
}[options.get("sharded")]
loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
plain = tnt.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
if options.get("compares"):
    # The loss of a row depends on the others.
    loss = lambda y, outputs: plain(y, outputs) + 0.1 * (outputs.mean(0) ** 2).sum()
if options.get("own_loss"):
    loss = lambda y, outputs: plain(y, outputs)
model = tnt.Model(Net(), seed=1, reproducible=options.get("reproducible", False), **sharded)
rate = options.get("rate", 0.1)
accumulated = options.get("accumulated")
optimizer = tnt.optimizers.SGD(rate, momentum=0.9, gradient_accumulation_steps=accumulated)
traced, traced_early = [], []
if options.get("counts"):
    import optax
    sgd = optax.sgd(rate, momentum=0.9)
    def update(*args):
        traced.append(1)
        return sgd.update(*args)
    optimizer = optax.GradientTransformation(sgd.init, update)
model.compile(optimizer, loss=loss, metrics=["accuracy"], on_nan=options.get("on_nan"))
results = []
if options.get("own_loss"):
    model.evaluate(x[:48], y[:48].astype(np.float32), batch_size=48, verbose=0)
for part in range(options.get("fits", 1)):
    fate = Fate(part)
    callbacks = [fate]
    if "checkpoint" in options:
        callbacks.append(
            tnt.callbacks.ModelCheckpoint(options["checkpoint"], save_weights_only=True)
        )
    history = model.fit(
        x, y, batch_size=48, epochs=options.get("epochs", 4), verbose=0, callbacks=callbacks,
        validation_split=0.1, tnt_micro_batch_size=options.get("micro"),
    )
    later = {"batch_size": 48, "verbose": 0, "callbacks": [Later()]}
    later["tnt_micro_batch_size"] = options.get("micro")
    logs = model.evaluate(x[:96], y[:96], return_dict=True, **later)
    results.append({"history": history.history, "hooks": fate.hooks, "evaluated": logs})
    if options.get("predicts"):
        outputs = model.predict(x[:100], **later)
        results[-1]["predicted"] = outputs.tolist()
    if options.get("own_loss"):
        model.evaluate(x[:48], y[:48].astype(np.float32), batch_size=48, verbose=0)
out = f"{options['out']}/{rank}"
np.savez(out, *map(np.asarray, model.get_weights()))
found = {
    "fits": results, "size": tnt.get_process_count(), "joins": joins, "traced": len(traced),
    "traced_early": traced_early[:1],
}
open(f"{out}.json", "w").write(json.dumps(found, default=float))
'''

# What one process gives, by the options of the script.
_alone = {}


@pytest.fixture
def train(run, script, tmp_path):
    """Trains in a job; returns its exit code, the launcher's text and what each process got.

    Processes that are lost are not `replaced` where the folder to start others in vanishes.
    """

    def train(*arguments, environ=None, replaced=True, **options):
        folder, cwd = tmp_path / "out", None
        folder.mkdir(exist_ok=True)
        if not replaced:
            (cwd := tmp_path / "cwd").mkdir()
            options["vanishes"] = str(cwd)
        given = json.dumps({"out": str(folder), **options})
        words = ["--no-gpu", *arguments, "--", script(SCRIPT, "train.py"), given]
        code, _, err = run(*words, timeout=200, environ=environ, cwd=cwd)
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

    def alone(*words, **options):
        key = json.dumps([words, options], sort_keys=True)
        if key not in _alone:
            code, err, found = train("-n", 1, *words, **options)
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
                # An epoch of which every step was undone has no loss.
                np.testing.assert_allclose(
                    another["history"][name], values, equal_nan=True, **bounds
                )
            if not other["joins"]:
                assert another["hooks"] == one["hooks"]
                for name, value in one["evaluated"].items():
                    np.testing.assert_allclose(another["evaluated"][name], value, **bounds)


def test_survivors_end_with_the_result_of_one_process_when_others_cannot_be_replaced(train, alone):
    fates = {"1": "step 13 of fit 0", "2": "step 13 of fit 0"}
    code, err, found = train("-n", 3, "--elastic", replaced=False, fates=fates)
    assert code == 0, err
    check_alike({0: found[0]}, alone())
    assert "goes on at step" in err
    why = "cannot be started: [Errno 2] No such file or directory"
    for rank in fates:
        assert f"process {rank} on localhost was ended by signal 9 (SIGKILL)" in err
        assert f"Process {rank} on localhost, which was to join, {why}" in err
        assert f"Process {rank} on localhost is left out from here on." in err


@pytest.mark.long  # The test before shows nearly the same.
@pytest.mark.parametrize(
    "fates",
    [
        {"2": "step 13 of fit 0"},
        {"0": "step 13 of fit 0"},
        {"1": "step 13 of fit 0", "2": "step 13 of fit 0"},
        {"0": "step 9 of fit 0"},
        {"2": "validation after 18 of fit 0"},
        {"0": "epoch 1 of fit 0"},
        {"0": "step 1 of fit 0", "2": "epoch 1 of fit 0"},
        {"1": "begin of fit 0", "0": "epoch 3 of fit 0"},
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


@pytest.mark.long  # Accumulated gradients show nearly the same.
def test_steps_that_are_not_finite_are_skipped_by_other_processes_too(train, alone):
    options = {"on_nan": "skip", "bad_rows": [100, 300]}
    fates = {"0": "step 13 of fit 0"}
    code, err, found = train("-n", 2, "--elastic", fates=fates, **options)
    assert code == 0, err
    assert "cannot go on in place" not in err
    check_alike({1: found[1]}, alone(**options))
    skipped = [part["history"]["skipped_steps"] for part in found[1][1]["fits"]]
    assert min(map(min, skipped)) > 0


@pytest.mark.parametrize(
    "options",
    [
        long({}),
        {"on_nan": "skip", "bad_rows": [100, 300]},
        long({"reproducible": True}),
    ],
    ids=str,
)
def test_accumulated_gradients_outlive_the_rank_that_computed_them(train, alone, options):
    # Every seventh of 36 steps updates the weights.
    options = options | {"accumulated": 7}
    fates = {"1": "step 13 of fit 0"}
    if "reproducible" not in options:  # Its bits are those of 1, 2 or 4 processes.
        fates |= {"2": "epoch 2 of fit 0"}
    words = ["-n", len(fates) + 1, "--elastic"]
    code, err, found = train(*words, replaced=False, fates=fates, **options)
    assert code == 0, err
    assert "cannot go on in place" not in err
    check_alike({0: found[0]}, alone(**options), exactly="reproducible" in options)
    if "bad_rows" in options:
        assert min(found[0][1]["fits"][0]["history"]["skipped_steps"]) > 0


def test_a_step_that_is_not_finite_ends_the_job_before_a_loss_hides_it(train):
    # All steps of an epoch are bad, and a process is lost after the first of them.
    options = {"on_nan": "raise", "bad_rows": [*range(480)], "fates": {"0": "step 1 of fit 0"}}
    code, err, _ = train("-n", 2, "--elastic", replaced=False, **options)
    assert code == 1, err
    assert "FloatingPointError: Step 1 of epoch 1 is not finite" in err


# Of each epoch two steps are not finite: 1 and 8, then 6 and 9, so that the second epoch is lost,
# 5 and 8, 1 and 2.
ROLLBACK = {"on_nan": "rollback", "bad_rows": [100, 300]}


@pytest.mark.long  # The next test shows nearly the same.
@pytest.mark.parametrize(
    ("fates", "options"),
    [
        ({"0": "step 25 of fit 0", "1": "step 26 of fit 0"}, {}),
        ({"2": "step 4 of fit 0", "0": "validation after 18 of fit 0"}, {}),
        ({"1": "epoch 1 of fit 0", "0": "step 24 of fit 0"}, {"accumulated": 7}),
        ({"0": "step 25 of fit 0"}, {"reproducible": True}),
    ],
    ids=str,
)
def test_rollback_returns_to_the_state_before_a_loss(train, alone, fates, options):
    options = ROLLBACK | options
    code, err, found = train("-n", len(fates) + 1, "--elastic", fates=fates, **options)
    assert code == 0, err
    assert "cannot go on in place" not in err
    # Elsewhere, further steps have begun before a step is known not to be finite.
    expected = alone("--elastic", **options)
    check_alike(found, expected, exactly="reproducible" in options)
    assert expected[1]["fits"][0]["history"]["skipped_steps"] == [8, 9, 8, 2]


@pytest.mark.long  # The test of passes shows nearly the same.
@pytest.mark.parametrize("rank", [0, 1])
def test_a_replacement_goes_back_as_the_others_do(train, alone, rank):
    fates = {str(rank): "step 11 of fit 0"}
    code, err, found = train("-n", 2, "--elastic", fates=fates, waits=3, **ROLLBACK)
    assert code == 0, err
    assert found[rank][1]["joins"]
    check_alike(found, alone("--elastic", **ROLLBACK))


@pytest.mark.long
def test_returns_to_one_copy_are_counted_before_and_after_a_loss(train):
    options = {"on_nan": "rollback", "bad_rows": [*range(480)]}
    code, err, _ = train("-n", 2, "--elastic", fates={"0": "step 2 of fit 0"}, **options)
    assert code == 1, err
    assert "Training went back 3 times already. Step 4 of epoch 1 is not finite" in err


def test_evaluation_and_prediction_go_on_when_processes_are_lost(train, alone):
    fates = {"2": "batch 0 of evaluation", "0": "batch 1 of prediction"}
    code, err, found = train("-n", 3, "--elastic", fates=fates, predicts=True)
    assert code == 0, err
    assert sorted(found) == [1]
    check_alike(found, alone())
    assert "2 process(es) goes on at the beginning of Model.evaluate" in err
    assert "1 process(es) goes on at the beginning of Model.predict" in err
    first_bias, first, last_bias, last = alone()[0]
    x = np.random.default_rng(0).normal(size=(480, 16)).astype(np.float32)[:100]
    expected = np.maximum(x @ first + first_bias, 0) @ last + last_bias
    (predicted,) = [part["predicted"] for part in found[1][1]["fits"]]
    np.testing.assert_allclose(predicted, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rank", [long(0), 1])
def test_a_replacement_joins_with_the_state_of_the_others(train, alone, rank):
    # That an own loss compares no rows is found by running it, on all processes, and all check
    # targets of another dtype, before `fit`: a replacement learns of both.
    options = {"fates": {str(rank): "step 11 of fit 0"}, "waits": 3, "own_loss": True}
    words = ["-n", 2, "--elastic", "--min-processes", 1]
    code, err, found = train(*words, counts=True, **options)
    assert code == 0, err
    assert f"process {rank} joins on" in err
    assert sorted(found) == [0, 1]
    assert found[rank][1]["joins"]
    assert all(results["size"] == 2 for _, results in found.values())
    # The other one traced its step for two processes and for one, before it was alone, and this one
    # has it from there.
    assert found[1 - rank][1]["traced_early"] == [2]
    assert {other: results["traced"] for other, (_, results) in found.items()} == {
        rank: 0,
        1 - rank: 2,
    }
    check_alike(found, alone())


# With its copy for rollback, a step of 48 rows needs 30 KiB on each of three ranks, 36 KiB on each of
# two.
@pytest.mark.parametrize(
    ("fates", "options", "memory", "chosen"),
    [
        (
            {"0": "step 11 of fit 0"},
            {"waits": 3, **ROLLBACK},
            "33KB",
            [("2", "passes"), ("3", "one pass")],
        ),
        long(
            (
                {"1": "step 11 of fit 0", "2": "step 11 of fit 0"},
                ROLLBACK,
                "40KB",
                [("1", "passes")],
            )
        ),
        long(({"0": "step 11 of fit 0"}, {"reproducible": True}, "1MB", [("1", "one virtual")])),
    ],
    ids=str,
)
def test_passes_are_chosen_for_the_rows_that_a_loss_leaves_to_each(
    train, alone, fates, options, memory, chosen
):
    num_processes = 2 if "reproducible" in options else 3
    environ = {"TNT_DEVICE_MEMORY": memory, "TNT_LOG_LEVEL": "INFO"}
    code, err, found = train(
        "-n", num_processes, "--elastic", fates=fates, micro="auto", environ=environ, **options
    )
    assert code == 0, err
    assert "cannot go on in place" not in err
    pattern = r'"auto" on (\d) process\(es\) chose [\d ]*(one pass|passes|one virtual)'
    assert set(chosen) <= set(re.findall(pattern, err))
    rest = {name: value for name, value in options.items() if name != "waits"}
    if "waits" in options:  # A replacement goes back as the others do.
        assert found[0][1]["joins"]
    check_alike(found, alone("--elastic", **rest), exactly="reproducible" in options)


@pytest.mark.long
def test_passes_of_evaluation_and_prediction_are_chosen_for_those_that_are_left(train, alone):
    fates = {"2": "batch 0 of evaluation", "0": "batch 1 of prediction"}
    environ = {"TNT_DEVICE_MEMORY": "1MB", "TNT_LOG_LEVEL": "INFO"}
    options = {"fates": fates, "micro": "auto", "predicts": True}
    code, err, found = train("-n", 3, "--elastic", environ=environ, **options)
    assert code == 0, err
    assert err.count("evaluate(tnt_micro_batch_size") == 2
    assert err.count("predict(tnt_micro_batch_size") == 2
    check_alike(found, alone("--elastic", predicts=True))
    (predicted,) = [part["predicted"] for part in found[1][1]["fits"]]
    (expected,) = [part["predicted"] for part in alone("--elastic", predicts=True)[1]["fits"]]
    np.testing.assert_allclose(predicted, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_all_processes_say_that_after_a_loss_no_step_fits(train, tmp_path):
    options = {"fates": {"0": "step 11 of fit 0"}, "micro": "auto"}
    environ = {"TNT_DEVICE_MEMORY": "21KB"}
    words = ["-n", 3, "--elastic", "--log-dir", tmp_path / "logs"]
    code, err, found = train(*words, environ=environ, **options)
    assert (code, found) == (1, {}), err
    logs = [path.read_text() for path in (tmp_path / "logs").rglob("*") if path.is_file()]
    texts = [text for log in logs for text in re.findall("ValueError: (.* no way .*)", log)]
    assert len(texts) == 2, logs
    assert texts[0] == texts[1]
    expected = '"auto" on 2 process(es) found no way to compute a step that fits the 20.5 KiB'
    assert expected in texts[0]


def test_reproducible_training_keeps_its_bits_and_its_file_when_the_master_is_lost(
    train, alone, tmp_path
):
    path = tmp_path / "saved.weights.h5"
    options = {"fates": {"0": "step 20 of fit 0"}, "checkpoint": str(path)}
    words = ["-n", 2, "--elastic"]
    code, err, found = train(*words, replaced=False, reproducible=True, **options)
    assert code == 0, err
    check_alike({1: found[1]}, alone(reproducible=True), exactly=True)
    with h5py.File(path) as file:
        assert list(file)


@pytest.mark.long
def test_reproducible_training_waits_where_it_cannot_use_all_survivors(train, alone):
    fates = {"0": "step 13 of fit 0"}
    code, err, found = train("-n", 4, "--elastic", fates=fates, reproducible=True)
    assert code == 0, err
    assert "Generation 1 of 4 process(es)" in err
    check_alike(found, alone(reproducible=True), exactly=True)


@pytest.mark.long
def test_a_process_that_is_lost_while_another_joins_is_survived(train, alone):
    fates = {"2": "step 11 of fit 0", "0": "generation 2 of fit 0"}
    code, err, found = train("-n", 3, "--elastic", fates=fates, waits=3)
    assert code == 0, err
    assert "process 2 joins on" in err
    assert "process 0 on localhost was ended by signal 9" in err
    check_alike(found, alone())


@pytest.mark.long
def test_a_signal_to_all_processes_at_once_saves_their_state(train, alone, tmp_path):
    fates = {str(rank): "step 13 of fit 0" for rank in range(3)}
    words = ["-n", 3, "--elastic", "--checkpoint-dir", tmp_path / "run"]
    code, err, found = train(*words, fates=fates, signal="SIGTERM")
    assert (code, found) == (75, {}), err
    code, err, found = train(*words)
    assert code == 0, err
    for weights, _ in found.values():
        for one, another in zip(alone()[0], weights, strict=True):
            np.testing.assert_allclose(another, one, rtol=1e-4, atol=1e-5)


@pytest.fixture
def other_host(tmp_path, hostfile):
    """Options and environment for a second host, which is this one behind another `ssh`."""
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\nfor command; do :; done\nexec sh -c "$command"\n')
    program.chmod(0o755)
    path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
    return ["--hostfile", hostfile("localhost slots=2", "other slots=1")], {"PATH": path}


@pytest.mark.long
def test_a_host_that_was_lost_joins_again(train, alone, other_host):
    words, environ = other_host
    options = {"fates": {"2": "step 11 of fit 0"}, "signal": "host", "waits": 3}
    code, err, found = train(*words, "--elastic", environ=environ, **options)
    assert code == 0, err
    assert "Lost other with rank 2" in err
    assert "other can be reached again" in err
    assert "process 2 joins on other" in err
    assert found[2][1]["joins"]
    check_alike(found, alone())


def test_a_process_that_is_lost_before_training_ends_the_job_with_the_reason(train):
    code, err, found = train("-n", 2, "--elastic", fates={"1": "start"})
    assert (code, found) == (128 + 9, {})
    expected = "Training cannot go on in place: no call of fit, evaluate or predict has begun."
    assert f"Process 1 on localhost was ended by signal 9 (SIGKILL). {expected}" in err


@pytest.mark.long  # tests/launch/test_membership.py shows nearly the same.
def test_a_stopped_process_is_lost_after_the_heartbeat(train, alone):
    options = {"fates": {"1": "step 13 of fit 0"}, "signal": "SIGSTOP"}
    code, err, found = train(
        "-n", 2, "--elastic", environ={"TNT_HEARTBEAT_TIMEOUT_S": "4"}, **options
    )
    assert code == 0, err
    assert "Process 1 on localhost has been silent for 4 s" in err
    check_alike({0: found[0]}, alone())


def test_a_process_that_is_stuck_is_lost_after_the_stall_timeout(train, alone):
    options = {"fates": {"1": "epoch 1 of fit 0"}, "signal": "hang", "replaced": False}
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
@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"rate": 0.2}, "learning_rate"),
        ({"epochs": 11}, "epochs: 11 here"),
        ({"on_nan": "skip"}, "on_nan: skip here"),
    ],
)
def test_a_replacement_that_would_train_otherwise_is_refused_by_name(train, alone, other, named):
    options = {"fates": {"1": "step 11 of fit 0"}, "of_joining": other, "epochs": 12}
    code, err, found = train("-n", 2, "--elastic", waits=1, **options)
    assert code == 0, err
    assert "Process 1 does not join: it would train otherwise than the others" in err
    assert named in err
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


@pytest.mark.parametrize(
    ("options", "obstacle"),
    [
        ({"sharded": "optimizer"}, "the optimizer's state is sharded"),
        ({"sharded": "variables"}, "the variables are sharded"),
        ({"compares": True}, "the state of a model that compares rows is sharded"),
    ],
)
@pytest.mark.long
def test_a_fit_whose_state_is_sharded_goes_on_from_its_checkpoint(
    train, alone, tmp_path, options, obstacle
):
    words = ["--max-restarts", 1, "--checkpoint-dir", tmp_path / "run", "--checkpoint-every", 3]
    fates = {"1": "step 13 of fit 0"}
    code, err, found = train("-n", 3, "--elastic", *words, fates=fates, **options)
    assert code == 0, err
    assert f"fit cannot go on in place, because {obstacle}" in err
    assert f"Training cannot go on in place: {obstacle}." in err
    assert "Restart 1 starts on" in err
    expected = alone(compares=True) if "compares" in options else alone()
    for weights, _ in found.values():
        for one, another in zip(expected[0], weights, strict=True):
            np.testing.assert_allclose(another, one, rtol=1e-4, atol=1e-5)


@pytest.mark.long
def test_with_too_few_processes_training_waits_for_a_replacement(train, alone):
    fates = {"1": "step 11 of fit 0"}
    code, err, found = train("-n", 2, "--elastic", "--min-processes", 2, fates=fates)
    assert code == 0, err
    assert "Generation 1 of 2 process(es)" in err
    check_alike(found, alone())
