"""An interrupted run goes on and gives the numbers of one that was never interrupted."""

import shutil

import flax.linen as nn
import numpy as np
import pytest
from crashes import Crash, CrashAt
from keras_beside import data

import tnt_jax as tnt
from tnt_jax import callbacks
from tnt_jax.data.streams import EpochStream
from tnt_jax.train.checkpoints.checkpoint import Checkpoints


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(8)(x))
        return nn.Dense(3)(nn.Dropout(0.3, deterministic=not train)(nn.relu(x)))


def make_model(optimizer=None, **options):
    model = tnt.Model(nn.Dense(3), seed=2)
    optimizer = optimizer or tnt.optimizers.SGD(0.1, momentum=0.9)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss=loss, **options)
    return model


def make_noisy_model():
    """Makes a model whose state has every part: random numbers, statistics, and the metrics of an
    epoch.
    """
    model = tnt.Model(Noisy(), seed=2)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tnt.optimizers.Adam(0.01), loss=loss, metrics=["accuracy"])
    return model


def fit(model, epochs, **options):
    return model.fit(*data(44), batch_size=8, epochs=epochs, verbose=0, **options)


@pytest.fixture(scope="module")
def whole():
    """Returns model and history of a run of four epochs that was never interrupted."""
    model = make_model()
    return model, fit(model, epochs=4)


@pytest.fixture(scope="module")
def backups(tmp_path_factory):
    """Returns the folder of a run that made three backups, of which two stay."""
    folder = tmp_path_factory.mktemp("backups")
    backup = callbacks.BackupAndRestore(folder, "epoch", True, False)
    fit(make_model(), epochs=3, callbacks=[backup, CrashAt(-1)])
    return folder


def interrupted(folder, save_freq, crash_after, extra=lambda: [], make_model=make_model, **options):
    """Returns model and history of a run that crashed once, or several times, and of one that did
    not.
    """
    x, y = data(44)
    arguments = {"batch_size": 8, "epochs": 4, "verbose": 0} | options
    arguments |= {} if "x" in options else {"x": x, "y": y}
    whole = make_model()
    expected = whole.fit(**arguments, callbacks=extra())
    for steps in crash_after:
        with pytest.raises(Crash):
            make_model().fit(
                **arguments,
                callbacks=[callbacks.BackupAndRestore(folder, save_freq), CrashAt(steps), *extra()],
            )
    model = make_model()
    history = model.fit(
        **arguments,
        callbacks=[callbacks.BackupAndRestore(folder, save_freq), *([CrashAt(-1)]), *extra()],
    )
    return model, history, whole, expected


def assert_same(model, history, whole, expected):
    assert history.epoch == expected.epoch
    assert history.history == expected.history
    assert model.optimizer.iterations == whole.optimizer.iterations
    for mine, theirs in zip(model.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("save_freq", "crash_after"),
    [
        pytest.param("epoch", [8], marks=pytest.mark.long),
        (4, [11, 7]),
        pytest.param(6, [13], marks=pytest.mark.long),
        pytest.param(3, [2], marks=pytest.mark.long),
    ],
    # Six batches an epoch: within an epoch, twice, at the end of an epoch, before any backup.
)
def test_the_interrupted_run_equals_the_whole_one(tmp_path, save_freq, crash_after):
    validation = {"validation_data": data(16, seed=1)}
    assert_same(
        *interrupted(
            tmp_path / "backup", save_freq, crash_after, make_model=make_noisy_model, **validation
        )
    )
    assert not (tmp_path / "backup").exists()


def test_other_callbacks_remember(tmp_path):
    def extra():
        return [
            callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.8),
            callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=10.0),
            callbacks.EarlyStopping(
                "val_loss", patience=2, min_delta=10.0, restore_best_weights=True
            ),
        ]

    validation = {"validation_data": data(16, seed=1)}
    result = interrupted(tmp_path / "backup", 2, [9, 6], extra, epochs=9, **validation)
    assert_same(*result)
    assert len(result[1].epoch) < 9, "The case must stop early to show anything."


@pytest.mark.long
def test_batches_of_an_iterable(tmp_path):
    x, y = data(44)
    batches = [(x[i : i + 8], y[i : i + 8]) for i in range(0, 44, 8)]
    assert_same(*interrupted(tmp_path / "backup", 4, [9], x=batches, batch_size=None))


@pytest.mark.parametrize("steps_per_epoch", [pytest.param(4, marks=pytest.mark.long), 7])
def test_steps_per_epoch_over_passes(tmp_path, steps_per_epoch):
    x, y = data(44)
    assert_same(
        *interrupted(tmp_path / "backup", 3, [10], x=x, y=y, steps_per_epoch=steps_per_epoch)
    )


def test_a_backup_holds_what_callbacks_remember_at_its_time(tmp_path, monkeypatch):
    saved = []
    monkeypatch.setattr(
        Checkpoints, "save", lambda self, state, **parts: saved.append(parts["notes"]["callbacks"])
    )
    x, y = data(16)
    make_model().fit(
        x,
        y,
        batch_size=8,
        epochs=3,
        verbose=0,
        callbacks=[callbacks.BackupAndRestore(tmp_path / "backup")],
    )
    remembered = [
        [state["epoch"] for name, state in states if name == "History"] for states in saved
    ]
    assert remembered == [[[0]], [[0, 1]], [[0, 1, 2]]]


@pytest.mark.long
def test_steps_of_one_program(tmp_path):
    x, y = data(44)

    def run(crash=None):
        model = make_model(steps_per_execution=2)
        watch = (
            []
            if crash is None
            else [callbacks.BackupAndRestore(tmp_path / "backup", 2), CrashAt(crash)]
        )
        return model, model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=watch)

    whole, expected = run()
    with pytest.raises(Crash):
        run(5)
    model, history = run(-1)
    assert history.history == expected.history
    for mine, theirs in zip(model.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_accumulated_gradients_come_back(tmp_path):
    def make():
        return make_model(tnt.optimizers.SGD(0.1, gradient_accumulation_steps=4))

    assert_same(*interrupted(tmp_path / "backup", 3, [5], make_model=make))


@pytest.mark.parametrize(
    ("save_freq", "crash_after"),
    [
        pytest.param("epoch", [8], marks=pytest.mark.long),
        pytest.param(4, [13], marks=pytest.mark.long),
        pytest.param(5, [13, 9], marks=pytest.mark.long),
    ],
)
def test_a_csv_file_of_a_resumed_run_has_each_epoch_once(tmp_path, save_freq, crash_after):
    # Rows of an earlier run stay, whatever epochs they name.
    files = [tmp_path / "whole.csv", tmp_path / "resumed.csv"]
    for file in files:
        make_model().fit(
            *data(44), batch_size=8, epochs=1, verbose=0, callbacks=callbacks.CSVLogger(file)
        )
    logs = iter([files[0], *[files[1]] * (len(crash_after) + 1)])
    interrupted(
        tmp_path / "backup",
        save_freq,
        crash_after,
        lambda: [callbacks.CSVLogger(next(logs), append=True)],
    )
    assert files[1].read_text() == files[0].read_text()
    assert [line.split(",")[0] for line in files[0].read_text().splitlines()] == [
        "epoch",
        "0",
        "0",
        "1",
        "2",
        "3",
    ]


class StopAfter(callbacks.Callback):
    """Ends training after a number of batches, as no later run must put off."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def on_train_batch_end(self, batch, logs=None):
        self.batches -= 1
        if self.batches == 0:
            self.model.stop_training = True


class CrashInEpochEnd(callbacks.Callback):
    """Ends the run once the backup at the end of an epoch is made."""

    runs_last = True

    def on_epoch_end(self, epoch, logs=None):
        if self.model.stop_training:
            raise Crash


@pytest.fixture(scope="module")
def stopped():
    model = make_model()
    return model, fit(model, epochs=4, callbacks=StopAfter(9))


@pytest.mark.parametrize("save_freq", ["epoch", 1])
def test_a_run_that_was_asked_to_end_does_not_go_on(tmp_path, stopped, save_freq):
    backup = callbacks.BackupAndRestore(tmp_path / "backup", save_freq)
    with pytest.raises(Crash):
        fit(make_model(), epochs=4, callbacks=[backup, CrashInEpochEnd(), StopAfter(9)])
    model = make_model()
    history = fit(model, epochs=4, callbacks=[backup, CrashAt(-1)])
    assert_same(model, history, *stopped)


def test_a_csv_file_that_replaces_another_has_each_epoch_once_as_well(tmp_path):
    files = [tmp_path / "whole.csv", tmp_path / "resumed.csv"]
    logs = iter([files[0], files[1], files[1]])
    interrupted(tmp_path / "backup", 4, [13], lambda: [callbacks.CSVLogger(next(logs))])
    assert files[1].read_bytes() == files[0].read_bytes()
    assert len(files[0].read_text().splitlines()) == 5


@pytest.mark.long
def test_a_csv_file_of_another_name_is_not_looked_into(tmp_path):
    files = iter([tmp_path / f"{name}.csv" for name in ("whole", "first", "second")])
    (tmp_path / "second.csv").write_text("x" * 10_000 + "\n2,2\n")
    interrupted(
        tmp_path / "backup", "epoch", [8], lambda: [callbacks.CSVLogger(next(files), append=True)]
    )
    text = (tmp_path / "second.csv").read_text()
    assert text.startswith("x" * 10_000 + "\n2,2\n")
    assert [line.split(",")[0] for line in text.splitlines()[2:]] == ["1", "2", "3"]


@pytest.mark.parametrize("verbose", [pytest.param(0, marks=pytest.mark.long), 2])
def test_a_resumed_run_says_where_it_goes_on(tmp_path, capsys, verbose):
    with pytest.raises(Crash):
        make_model().fit(
            *data(44),
            batch_size=8,
            epochs=2,
            verbose=0,
            callbacks=[callbacks.BackupAndRestore(tmp_path / "b", 4), CrashAt(9)],
        )
    make_model().fit(
        *data(44),
        batch_size=8,
        epochs=2,
        verbose=verbose,
        callbacks=[callbacks.BackupAndRestore(tmp_path / "b", 4), CrashAt(-1)],
    )
    said = (
        f"Training resumes from {tmp_path / 'b'}, after batch 2 of epoch 2; delete {tmp_path / 'b'} "
        "to start over." in capsys.readouterr().out.splitlines()
    )
    assert said is bool(verbose)


def test_the_backup_stays_if_asked_to(tmp_path):
    x, y = data()
    model = make_model()
    keep = callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
    model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=keep)
    again = make_model()
    history = again.fit(
        x,
        y,
        batch_size=8,
        epochs=3,
        verbose=0,
        callbacks=callbacks.BackupAndRestore(tmp_path / "backup"),
    )
    assert history.epoch == [0, 1, 2], "The record of the first two epochs comes back."
    assert again.optimizer.iterations == 15


def test_another_model_is_an_error_that_names_the_leaves(tmp_path):
    x, y = data()
    keep = callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)
    make_model("adam").fit(x, y, batch_size=8, verbose=0, callbacks=keep)
    with pytest.raises(ValueError, match=r"not in the model: opt_state/.*velocity"):
        make_model().fit(
            x, y, batch_size=8, verbose=0, callbacks=callbacks.BackupAndRestore(tmp_path / "backup"),
            tnt_ignore_changes=["optimizer", "learning_rate"],
        )  # fmt: skip


class Counting:
    """A source whose batches say which pass and batch they are."""

    global_batch_size = num_examples = None
    in_memory = True

    def __init__(self, num_batches, known):
        self.length, self.num_batches, self.opened = num_batches, num_batches if known else None, []

    def batches(self, epoch, start_batch=0):
        self.opened.append((epoch, start_batch))
        return iter([(epoch, batch) for batch in range(start_batch, self.length)])


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("steps_per_epoch", [None, 2, 3, 5, 8])
@pytest.mark.parametrize("first_epoch", [0, 2])
@pytest.mark.parametrize("peeked", [True, False])
def test_a_sought_stream_equals_one_that_was_read(known, steps_per_epoch, first_epoch, peeked):
    def stream():
        return EpochStream(Counting(3, known), steps_per_epoch=steps_per_epoch)

    whole = [
        list(stream_epoch)
        for read in [stream()]
        for stream_epoch in map(read.epoch, range(first_epoch, first_epoch + 5))
    ]
    for done in range(3):
        for batch in range(len(whole[done]) + 1):
            seeked = stream()
            if peeked:
                seeked.peek(first_epoch)
            seeked.seek(first_epoch + done, batch, first_epoch=first_epoch)
            rest = [
                list(seeked.epoch(number)) for number in range(first_epoch + done, first_epoch + 5)
            ]
            assert rest == [whole[done][batch:], *whole[done + 1 :]]


def test_a_generator_goes_on_where_it_was():
    class Once(Counting):
        def __init__(self):
            super().__init__(20, known=False)
            self.running = iter(range(20))

        def batches(self, epoch, start_batch=0):
            for index, batch in enumerate(self.running):
                if index >= start_batch:
                    yield batch

    stream = EpochStream(Once(), steps_per_epoch=4)
    stream.peek(0)
    stream.seek(2, 1, first_epoch=0)
    assert list(stream.epoch(2)) == [9, 10, 11]


@pytest.mark.parametrize(
    "damage",
    [lambda file: file.write_bytes(b"broken"), lambda file: file.unlink()],
    ids=["broken", "lost"],
)
def test_the_backup_before_the_last_is_used_where_that_cannot_be_read(
    tmp_path, whole, backups, damage
):
    folder = tmp_path / "backup"
    shutil.copytree(backups, folder)
    numbers = sorted(state.parent for state in folder.glob("*/state"))
    assert len(numbers) == 2
    for file in (numbers[-1] / "state").rglob("*"):
        if file.is_file():
            damage(file)
    model = make_model()
    backup = callbacks.BackupAndRestore(folder, double_checkpoint=True)
    history = fit(model, epochs=4, callbacks=[backup, steps := CrashAt(-1)])
    assert -1 - steps.steps == 6, "The backup before the last is that of the third epoch."
    assert not folder.exists()
    assert_same(model, history, *whole)


def test_a_backup_needs_a_directory():
    with pytest.raises(ValueError, match="backup_dir must name a directory"):
        callbacks.BackupAndRestore("")


def test_a_start_that_fails_leaves_the_csv_file_of_the_interrupted_run(tmp_path):
    file = tmp_path / "log.csv"

    def fit(model, *extra):
        logger = callbacks.CSVLogger(file)
        backup = callbacks.BackupAndRestore(tmp_path / "backup")
        model.fit(*data(44), batch_size=8, epochs=4, verbose=0, callbacks=[logger, backup, *extra])

    with pytest.raises(Crash):
        fit(make_model(), CrashAt(13))
    rows = file.read_bytes()
    assert len(rows.splitlines()) == 3
    with pytest.raises(ValueError, match="optimizer"):
        fit(make_model(tnt.optimizers.SGD(0.01)))
    assert file.read_bytes() == rows
    fit(make_model())
    assert file.read_bytes().startswith(rows)
    assert len(file.read_text().splitlines()) == 5


@pytest.mark.parametrize("append", [False, True])
def test_rows_after_a_resume_fit_the_columns_of_the_first_epoch(tmp_path, append):
    files = [tmp_path / "whole.csv", tmp_path / "resumed.csv"]
    paths = iter([files[0], files[1], files[1]])

    def logged():
        schedule = callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1))
        return [schedule, callbacks.CSVLogger(next(paths), append=append)]

    # The first epoch has no validation; that in which the run goes on has.
    validation = {"validation_data": data(8), "validation_freq": 2}
    interrupted(tmp_path / "backup", "epoch", [8], logged, **validation)
    assert "val_loss" in files[0].read_text()
    assert files[1].read_bytes() == files[0].read_bytes()


def test_fingerprints_of_an_interrupted_run_stay_and_those_of_its_rest_follow(tmp_path):
    files = [tmp_path / "whole", tmp_path / "resumed"]
    paths = iter([files[0], files[1], files[1]])
    # It goes on from step 8, within an epoch of 6.
    interrupted(tmp_path / "backup", 4, [11], lambda: [callbacks.Fingerprint(next(paths), every=3)])
    whole, resumed = (dict.fromkeys(file.read_text().splitlines()) for file in files)
    assert list(resumed) == list(whole)
    assert len(whole) == 8
