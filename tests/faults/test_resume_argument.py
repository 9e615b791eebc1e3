"""The argument `resume` of `fit`: where it saves, what it adds, and what it refuses."""

from pathlib import Path

import flax.linen as nn
import numpy as np
import pytest
from crashes import Crash, CrashAt
from keras_beside import data

import tnt_jax as tnt
from tnt_jax import callbacks
from tnt_jax.keras_compat.resume_argument import choose_directory
from tnt_jax.train.checkpoint import Checkpoints


@pytest.fixture(autouse=True)
def a_job_of_its_own(use_ranks, tmp_path, monkeypatch):
    use_ranks(2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TNT_CHECKPOINT_EVERY", "4")


def fit(seed=0, **arguments):
    model = tnt.Model(nn.Dense(3), seed=seed)
    model.compile("adam", loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
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


def test_what_would_lose_rows_is_refused_with_both_values_and_what_to_do(use_ranks):
    crash(5, resume="runs")
    texts = {
        "in global batches of 8 rows, but the global batch has 12 rows, and": {"batch_size": 12},
        "by the seed 0, but the seed is 1": {"seed": 1},
        "another batches of an epoch: 6, and 5 now": dict(zip("xy", data(40), strict=True)),
    }
    for text, change in texts.items():
        start_again(use_ranks)
        with pytest.raises(ValueError, match=f"(?s){text}.*delete .*runs/fit-1 to start over"):
            fit(resume="runs", **change)


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
def test_it_is_said_how_to_start_over(use_ranks, tmp_path, monkeypatch, capsys, caplog, verbose):
    monkeypatch.setenv("TNT_LOG_LEVEL", "INFO")
    place = tmp_path / "runs" / "fit-1"
    for arguments in ({"epochs": 1}, {"epochs": 1}, {"epochs": 2}):
        start_again(use_ranks)
        fit(resume="runs", verbose=verbose, **arguments)
    ended = f"Training had ended, as {place} says; delete {place} to start over."
    resumed = f"Training resumes from {place}, after batch 4 of epoch 1; delete {place} to start"
    screen = capsys.readouterr().out
    for text in (ended, resumed):
        assert text in caplog.text
        assert (text in screen) == bool(verbose)


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
