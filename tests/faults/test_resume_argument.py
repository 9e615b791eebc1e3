"""The argument `resume` of `fit`: where it saves, what it adds, and what it refuses."""

import re
import threading
from pathlib import Path
from typing import Any

import flax.linen as nn
import numpy as np
import optax
import pytest
from crashes import Crash, CrashAt
from keras_beside import data

import tnt_jax as tnt
from tnt_jax import callbacks
from tnt_jax.keras_compat.fit import resume
from tnt_jax.keras_compat.fit.preparation import Shared
from tnt_jax.keras_compat.fit.resume import choose_directory, count_fit
from tnt_jax.train.checkpoints.checkpoint import Checkpoints


@pytest.fixture(autouse=True)
def a_job_of_its_own(use_ranks, tmp_path, monkeypatch):
    use_ranks(2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TNT_CHECKPOINT_EVERY", "4")


@pytest.fixture
def late(monkeypatch):
    """Has a step compiled when it runs, not ahead: most runs of a test are refused, or have ended."""
    monkeypatch.setattr(Shared, "compile_ahead", lambda self, plan: None)


def cross_entropy(**options):
    return tnt.losses.SparseCategoricalCrossentropy(from_logits=True, **options)


def fit(seed=0, module=None, optimizer="sgd", loss=None, metrics=None, **arguments):
    model = tnt.Model(module or nn.Dense(3), seed=seed)
    model.compile(optimizer, loss=loss or cross_entropy(), metrics=metrics)
    x, y = data(48)
    given = {"x": x, "y": y, "batch_size": 8, "epochs": 2, "verbose": 0} | arguments
    return model, model.fit(**given)


def crash(after, **arguments):
    with pytest.raises(Crash):
        fit(callbacks=[CrashAt(after)], **arguments)


def start_again(use_ranks):
    """Begins another job, as a script that is started again does."""
    use_ranks(2)


def assert_same(resumed, whole):
    (model, history), (other, expected) = resumed, whole
    assert history.history == expected.history
    assert history.epoch == expected.epoch
    for mine, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("given", "variable", "place"),
    [
        ("auto", None, "checkpoints/train"),
        ("auto", "runs/a", "runs/a"),
        (None, "runs/a", "runs/a"),
        ("own", "runs/a", "own"),
        (Path("own"), None, "own"),
    ],
)
def test_the_directory_of_the_argument_and_of_the_variable(
    tmp_path, monkeypatch, given, variable, place
):
    monkeypatch.setattr("sys.argv", ["tools/train.py"])
    if variable is not None:
        monkeypatch.setenv("TNT_CHECKPOINT_DIR", variable)
    assert choose_directory(given, None) == tmp_path / place / "fit-1"
    count_fit(tmp_path / place / "fit-1")
    assert choose_directory(given, CrashAt(1)) == tmp_path / place / "fit-2"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["/a/train.py"], "train"),
        (["-c"], "interactive"),
        ([""], "interactive"),
        (["/a/package/__main__.py"], "package"),
        (["/usr/bin/train"], "train"),
    ],
)
def test_auto_names_the_directory_after_the_script(tmp_path, monkeypatch, words, name):
    monkeypatch.setattr("sys.argv", words)
    assert choose_directory("auto", None) == tmp_path / "checkpoints" / name / "fit-1"


def test_nothing_is_saved_without_the_argument(tmp_path):
    fit()
    assert not list(tmp_path.iterdir())


def test_each_fit_of_a_script_finds_its_own_checkpoints(tmp_path, use_ranks):
    def script(crash_after=None, epochs=(2, 3)):
        first = fit(resume="runs", epochs=epochs[0], callbacks=[counting := CrashAt(-1)])
        second = fit(
            seed=1,
            resume="runs",
            epochs=epochs[1],
            callbacks=[interrupting := CrashAt(crash_after or -1)],
        )
        return first, second, -1 - counting.steps, -1 - interrupting.steps

    with pytest.raises(Crash):
        script(crash_after=9)
    start_again(use_ranks)
    first, second, first_steps, second_steps = script()
    assert first_steps == 0
    assert 18 - 9 <= second_steps < 18
    assert_same(first, fit())
    assert_same(second, fit(seed=1, epochs=3))
    start_again(use_ranks)
    again = script()
    assert again[2:] == (0, 0), "Both have ended."
    assert_same(again[0], first)
    assert_same(again[1], second)
    assert [path.name for path in sorted((tmp_path / "runs").iterdir())] == ["fit-1", "fit-2"]


@pytest.mark.long  # Every run ends so; the averages of its weights make the difference visible.
def test_more_epochs_go_on_from_before_the_end(use_ranks):
    optimizer = {"use_ema": True, "ema_momentum": 0.5}

    def run(**arguments):
        model = tnt.Model(nn.Dense(3))
        loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tnt.optimizers.SGD(0.1, **optimizer), loss=loss)
        x, y = data(48)
        return model, model.fit(x, y, batch_size=8, verbose=0, **arguments)

    run(epochs=2, resume="runs")
    start_again(use_ranks)
    # The averaged weights of the end are not where the third epoch begins.
    assert_same(run(epochs=4, resume="runs"), run(epochs=4))


@pytest.mark.long  # Early or late, the end is noted in the same way.
def test_a_run_that_stopped_early_stays_stopped(use_ranks):
    def early():
        return callbacks.EarlyStopping(
            "loss", min_delta=10.0, patience=2, restore_best_weights=True
        )

    stopped = fit(epochs=20, resume="runs", callbacks=[early()])
    assert len(stopped[1].epoch) < 20
    start_again(use_ranks)
    again = fit(epochs=20, resume="runs", callbacks=[early(), steps := CrashAt(-1)])
    assert steps.steps == -1
    assert_same(again, stopped)


def test_a_backup_of_the_user_s_own_is_used_with_the_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("TNT_CHECKPOINT_DIR", str(tmp_path / "runs"))
    fit(callbacks=[[callbacks.BackupAndRestore("own", delete_checkpoint=False)]])
    assert [path.name for path in tmp_path.iterdir()] == ["own"]


@pytest.mark.parametrize("wrap", [lambda backup: backup, callbacks.OnAllRanks])
def test_a_backup_of_the_user_s_own_beside_the_argument_is_an_error(wrap):
    with pytest.raises(ValueError, match=r"resume='auto' and a BackupAndRestore, .* Leave one"):
        fit(resume="auto", callbacks=wrap(callbacks.BackupAndRestore("own")))


@pytest.mark.parametrize("resume", ["", True, 3, b"runs"])
def test_what_is_no_directory_is_refused(resume):
    with pytest.raises(ValueError, match="resume must be None, 'auto' or a directory, but is"):
        fit(resume=resume)


def test_what_would_lose_rows_is_refused_with_both_values_and_what_to_do(use_ranks, late):
    crash(5, resume="runs")
    texts = {
        "in global batches of 8 rows, but the global batch has 12 rows, and": {"batch_size": 12},
        "Model.seed: 0 in the checkpoint, 1 now. .* The seed of a run cannot change": {"seed": 1},
        "another batches of an epoch: 6, and 5 now": dict(zip("xy", data(40), strict=True))
        | {"tnt_ignore_changes": ["data"]},
    }
    for text, change in texts.items():
        start_again(use_ranks)
        with pytest.raises(ValueError, match=f"(?s){text}.*delete .*runs/fit-1 to start over"):
            fit(resume="runs", **change)


class Net(nn.Module):
    """A network whose layers are written in its method, and follow from fields and functions."""

    activation: Any = nn.relu
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, train):
        x = self.activation(nn.Dense(4)(x))
        return nn.Dense(3)(nn.Dropout(self.rate, deterministic=not train)(x))


class WithTanh(Net):
    @nn.compact
    def __call__(self, x, train):
        x = nn.tanh(nn.Dense(4)(x))
        return nn.Dense(3)(nn.Dropout(self.rate, deterministic=not train)(x))


# Under the same name, as after an edit of the script.
WithTanh.__qualname__ = WithTanh.__name__ = "Net"


def falling(rate):
    return lambda step: rate / (1 + step)


X, Y = data(48)
SGD, decay = tnt.optimizers.SGD, tnt.schedules.ExponentialDecay
# What the first run has, and for each other one what it has, the name of the change, and what the
# error says.
OTHERS = [
    ({"optimizer": SGD(1e-3)}, [({"optimizer": SGD(0.1)}, "learning_rate", "optimizer.learning_rate: 0.001 in the checkpoint, 0.1 now")]),
    ({"optimizer": SGD(decay(0.1, 10, 0.9))}, [({"optimizer": SGD(decay(0.1, 10, 0.5))}, "learning_rate", "decay_rate: 0.9 in the checkpoint, 0.5 now")]),
    ({"optimizer": SGD(falling(0.1))}, [({"optimizer": SGD(falling(0.3))}, "learning_rate", "learning rate at steps 0, 1, 10, 100, 1000, 10000: 0.1, 0.05")]),
    ({"optimizer": SGD(0.1)}, [({"optimizer": SGD(0.1, clipnorm=1.0)}, "optimizer", "optimizer.clipnorm: None in the checkpoint, 1.0 now")]),
    ({"optimizer": optax.sgd(0.1)}, [({"optimizer": optax.sgd(0.2)}, "optimizer", "step_size: -0.1 in the checkpoint, -0.2 now")]),
    (
        {"optimizer": "adam"},
        [
            ({"optimizer": "adamw"}, "optimizer", "optimizer.class: .*Adam in the checkpoint, .*AdamW now"),
            ({"loss": cross_entropy(ignore_class=2)}, "loss", "loss.ignore_class: None in the checkpoint, 2 now"),
            ({"class_weight": {0: 2.0, 1: 1.0, 2: 1.0}}, "loss", "class_weight: None in the checkpoint, nothing now; class_weight.0"),
            ({"metrics": ["accuracy"]}, "metrics", "metrics: None in the checkpoint, "),
            ({"x": X + 1}, "data", "contents of the arrays .checksum."),
            ({"x": X[:40], "y": Y[:40]}, "data", "number of examples: 48 in the checkpoint, 40 now"),
        ],
    ),
    (
        {"module": Net()},
        [
            ({"module": Net(nn.tanh)}, "model", "model.activation: .*relu in the checkpoint, .*tanh now"),
            ({"module": Net(rate=0.5)}, "model", "model.rate: 0.0 in the checkpoint, 0.5 now"),
            ({"module": WithTanh()}, "model", "model.class: .*Net .code"),
        ],
    ),
    ({"module": Net(lambda x: x)}, [({"module": Net(lambda x: x + 1)}, "model", "model.activation: .*lambda")]),
]  # fmt: skip


@pytest.mark.parametrize(("before", "others"), OTHERS)
def test_another_run_is_refused_with_both_values_and_two_ways_out(use_ranks, late, before, others):
    whole = fit(resume="runs", **before)
    for after, name, text in others:
        start_again(use_ranks)
        ways = rf"choose another directory.*tnt_ignore_changes=\['{name}'\] to fit"
        with pytest.raises(ValueError, match=f"(?s)runs/fit-1 holds another run: .*{text}.*{ways}"):
            fit(resume="runs", **before | after)
        start_again(use_ranks)
        assert_same(fit(resume="runs", tnt_ignore_changes=[name], **before | after), whole)
    start_again(use_ranks)
    assert_same(fit(resume="runs", **before), whole)


def test_another_batch_size_of_a_run_that_has_ended_is_refused(use_ranks, late):
    fit(resume="runs")
    start_again(use_ranks)
    with pytest.raises(ValueError, match="global batch: 8 in the checkpoint, 16 now"):
        fit(resume="runs", batch_size=16)


def test_what_does_not_change_the_result_passes(use_ranks, capsys):
    fit(resume="runs", epochs=1, optimizer=SGD(0.1))
    use_ranks(4)
    early = callbacks.EarlyStopping("loss", patience=9)
    _, history = fit(resume="runs", verbose=2, callbacks=[early], optimizer=SGD(0.1))
    assert history.epoch == [0, 1]
    assert "with changes" not in capsys.readouterr().out


class SetRate(callbacks.Callback):
    def __init__(self, rate, after):
        super().__init__()
        self.rate, self.after = rate, after

    def on_train_batch_end(self, batch, logs=None):
        self.after -= 1
        if self.after == 0:
            self.model.optimizer.learning_rate = self.rate


def injected(rate, momentum):
    return optax.inject_hyperparams(optax.sgd)(learning_rate=rate, momentum=momentum)


@pytest.mark.parametrize(
    "make", [lambda rate: SGD(rate, momentum=0.9), lambda rate: injected(rate, 0.9)]
)
def test_a_new_learning_rate_takes_effect_where_training_resumes(use_ranks, capsys, make):
    crash(6, resume="runs", optimizer=make(0.01))
    start_again(use_ranks)
    resumed = fit(resume="runs", optimizer=make(0.1), tnt_ignore_changes="learning_rate")
    told = (
        r"after batch 4 of epoch 1, with changes: .*learning_rate: 0.01 in the checkpoint, 0.1 now"
    )
    assert re.search(told, capsys.readouterr().out)
    start_again(use_ranks)
    assert_same(resumed, fit(optimizer=make(0.01), callbacks=[SetRate(0.1, after=4)]))


def test_other_settings_that_the_state_holds_take_effect_too(use_ranks):
    crash(6, resume="runs", optimizer=injected(0.1, 0.9))
    start_again(use_ranks)
    model, _ = fit(resume="runs", optimizer=injected(0.1, 0.5), tnt_ignore_changes=["optimizer"])
    assert float(model.state.opt_state.hyperparams["momentum"]) == 0.5


def test_metrics_cannot_change_within_an_epoch(use_ranks):
    crash(6, resume="runs")
    start_again(use_ranks)
    with pytest.raises(ValueError, match="metrics cannot change within an epoch"):
        fit(resume="runs", metrics=["accuracy"], tnt_ignore_changes=["metrics"])


def test_what_cannot_be_ignored_is_refused_by_name():
    with pytest.raises(ValueError, match=r"may name model, optimizer, .* but names 'seed'"):
        fit(resume="runs", tnt_ignore_changes=["seed"])


def test_a_checkpoint_that_does_not_say_its_run_resumes_with_a_warning(
    use_ranks, monkeypatch, caplog
):
    with monkeypatch.context() as patch:
        patch.setattr(resume, "describe_run", lambda *arguments: None)
        crash(6, resume="runs")
    start_again(use_ranks)
    fit(resume="runs")
    assert caplog.text.count("does not say which model, optimizer and data it belongs to") == 1


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda x, y: tnt.data.RandomAccess(list(zip(x, y, strict=True)), 8),
            "targets of the first",
        ),
        (lambda x, y: [(x[i : i + 8], y[i : i + 8]) for i in range(0, 48, 8)], None),
    ],
)
def test_other_data_that_is_read_row_by_row(use_ranks, late, caplog, make, text):
    def run(x, y):
        start_again(use_ranks)
        return fit(resume="runs", x=make(x, y), y=None, batch_size=None)

    run(X, Y)
    if text is None:
        # An iterable may be shuffled without a seed.
        run(X, 2 - Y)
    else:
        with pytest.raises(ValueError, match=text):
            run(X, 2 - Y)
        # Inputs may be augmented.
        run(X + 1, Y)
    assert caplog.text.count("The first rows of the data differ from those of the run") == 1


def test_a_generator_loses_no_rows_to_the_comparison(use_ranks):
    def batches():
        return ((X[i : i + 8], Y[i : i + 8]) for _ in range(2) for i in range(0, 48, 8))

    given = {"y": None, "batch_size": None, "steps_per_epoch": 6}
    crash(6, x=batches(), resume="runs", **given)
    start_again(use_ranks)
    resumed = fit(x=batches(), resume="runs", **given)
    assert_same(resumed, fit(x=batches(), **given))


def test_a_batch_size_that_fits_goes_on_at_the_same_row(use_ranks):
    crash(8, resume="runs")
    start_again(use_ranks)
    _, history = fit(resume="runs", batch_size=4, callbacks=[steps := CrashAt(-1)])
    done = 96 - 4 * (-1 - steps.steps)
    assert done in (4 * 8, 8 * 8), "Backups are made after every fourth batch of 8 rows."
    assert history.epoch == [0, 1]


def test_a_generator_is_warned_of_at_the_start(caplog):
    x, y = data(48)
    batches = ((x[i : i + 8], y[i : i + 8]) for _ in range(2) for i in range(0, 48, 8))
    again = {"x": batches, "y": None, "batch_size": None, "steps_per_epoch": 6}
    crash(1, resume="runs", **again)
    assert "The data is a generator, which cannot go back" in caplog.text
    caplog.clear()
    crash(1, resume="runs")
    assert "generator" not in caplog.text


@pytest.mark.parametrize("verbose", [0, 2])
def test_where_training_resumes_is_always_printed_once(use_ranks, late, tmp_path, capsys, verbose):
    place = tmp_path / "runs" / "fit-1"
    for arguments in ({"epochs": 1}, {"epochs": 1}, {"epochs": 2}):
        start_again(use_ranks)
        fit(resume="runs", verbose=verbose, **arguments)
    ended = f"Training had ended, as {place} says; delete {place} to start over."
    resumed = f"Training resumes from {place}, after batch 4 of epoch 1; delete {place} to start"
    screen = capsys.readouterr().out
    for text in (ended, resumed):
        assert screen.count(text) == 1


def test_the_best_epoch_is_kept_besides_the_newest(use_ranks):
    losses = iter([3.0, 1.0, float("nan"), 2.0, 1.5, 1.2])

    class Loss(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["val_loss"] = next(losses)

    backup = callbacks.BackupAndRestore(
        "own", 1000, delete_checkpoint=False, keep_best="val_loss", max_to_keep=2
    )
    fit(epochs=6, callbacks=[Loss(), backup])
    checkpoints = Checkpoints("own", max_to_keep=2, prefix="tnt_jax_backup")
    ended = checkpoints.newest()
    best = checkpoints.newest(before=ended)
    assert checkpoints.read(best).position.epoch == 2
    checkpoints.close()


def test_a_call_that_raises_before_it_trains_is_not_counted(use_ranks, tmp_path):
    with pytest.raises(ValueError, match="same number of rows"):
        fit(resume="runs", y=data(48)[1][:3])
    whole = fit(resume="runs")
    assert [path.name for path in Path("runs").iterdir()] == ["fit-1"]
    start_again(use_ranks)
    with pytest.raises(ValueError, match="holds another run"):
        fit(resume="runs", optimizer="adam")
    assert_same(fit(resume="runs"), whole)


def test_a_fit_that_raises_frees_its_directory():
    crash(5, resume="runs")
    assert list(Path("runs/fit-1").glob("tnt_jax_backup_*"))
    assert not list(Path("runs/fit-1").glob(".*.lock"))
    assert "tnt_jax checkpoint lock" not in {thread.name for thread in threading.enumerate()}
