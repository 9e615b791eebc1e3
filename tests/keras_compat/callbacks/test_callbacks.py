"""Where callbacks run, what their logs cost, and those that Keras has no counterpart of."""

import copy
import json
import pickle
import types

import keras
import numpy as np
import pytest
from keras_beside import Net, Recorder, compile_linen, data, fit

import tnt_jax as tnt
from tnt_jax import callbacks
from tnt_jax.keras_compat.callbacks import base
from tnt_jax.keras_compat.callbacks.callback_list import overrides
from tnt_jax.keras_compat.callbacks.monitor import Monitor, SavingTimes, direction


def small_model(**sgd):
    model = tnt.Model(Net())
    compile_linen(model, **sgd)
    return model


# Logs


def test_lazy_logs_wait_only_when_read():
    reads = []

    def read():
        reads.append(1)
        return {"loss": 0.5, "accuracy": 0.25}

    logs = callbacks.LazyLogs(read)
    assert isinstance(logs, dict)
    assert (logs or {}) is logs
    assert not reads
    assert logs["accuracy"] == 0.25
    assert dict(logs) == {"loss": 0.5, "accuracy": 0.25}
    assert reads == [1]


@pytest.mark.parametrize(
    "look",
    [
        dict, lambda x: {**x}, lambda x: json.loads(json.dumps(x)), lambda x: x.copy(), copy.copy,
        copy.deepcopy, lambda x: x | {},
        lambda x: pickle.loads(pickle.dumps(x)), lambda x: dict(x.items()),
        lambda x: dict(zip(x.keys(), x.values(), strict=True)),
        lambda x: {name: x[name] for name in x},
        lambda x: {name: x.get(name) for name in ("loss", "accuracy")},
        lambda x: eval(repr(x)), lambda x: (lambda **kw: kw)(**x),
        lambda x: x if x == {"loss": 0.5, "accuracy": 0.25} else None,
        lambda x: {name: x.pop(name) for name in ("loss", "accuracy")},
    ],
)  # fmt: skip
def test_lazy_logs_are_filled_however_they_are_read(look):
    assert look(callbacks.LazyLogs(lambda: {"loss": 0.5, "accuracy": 0.25})) == {
        "loss": 0.5,
        "accuracy": 0.25,
    }


def test_callbacks_that_read_nothing_wait_for_nothing(monkeypatch):
    model = small_model()
    reads = []
    fit(model, None, epochs=1)
    logs_of = model._core.logs
    monkeypatch.setattr(model._core, "logs", lambda sums: reads.append(1) or logs_of(sums))
    seen = []
    fit(
        model,
        [callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))],
        epochs=1,
        validation_data=None,
    )
    assert (seen, len(reads)) == ([0, 1, 2, 3, 4], 1)
    fit(
        model,
        [callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: logs["loss"])],
        epochs=1,
        validation_data=None,
    )
    assert len(reads) == 1 + 6


def test_history_records_what_other_callbacks_add():
    class Adds(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["added"] = float(epoch)

    assert fit(small_model(), Adds(), epochs=2).history["added"] == [0.0, 1.0]


# Placement


def scoped(given, *, is_master, processes=2, prints=None):
    return base.callback_scope(
        given,
        num_processes=processes,
        is_master=is_master,
        prints=is_master if prints is None else prints,
    )


def test_every_callback_runs_everywhere_and_prints_on_the_master():
    for is_master in (True, False):
        result = scoped(callbacks.EarlyStopping(), is_master=is_master)
        assert (result.scope, result.runs, result.is_silent) == (
            "all_processes",
            True,
            not is_master,
        )
    assert not scoped(callbacks.EarlyStopping(), is_master=False, prints=True).is_silent


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.callbacks.ModelCheckpoint("x.keras"), lambda: keras.callbacks.CSVLogger("x"),
        lambda: keras.callbacks.BackupAndRestore("x"), lambda: keras.callbacks.RemoteMonitor(),
        lambda: keras.callbacks.TensorBoard("x"),
        lambda: type("Mine", (keras.callbacks.CSVLogger,), {})("x"),
        lambda: callbacks.OnMaster(callbacks.CSVLogger("x")),
    ],
)  # fmt: skip
def test_keras_callbacks_that_write_files_run_on_the_master(make):
    assert scoped(make(), is_master=True).runs
    assert not scoped(make(), is_master=False).runs
    assert scoped(make(), is_master=True).scope == "main_process"
    assert scoped(make(), is_master=True, processes=1).scope == "all_processes"


def test_on_all_ranks_lets_every_process_write():
    result = scoped(callbacks.OnAllRanks(keras.callbacks.CSVLogger("x")), is_master=False)
    assert (result.scope, result.runs, result.is_silent) == ("per_process", True, False)


@pytest.mark.parametrize("module", [keras.callbacks, callbacks])
@pytest.mark.parametrize(
    "name", ["EarlyStopping", "LearningRateScheduler", "ReduceLROnPlateau", "TerminateOnNaN"]
)
def test_what_steers_training_must_run_everywhere(module, name):
    callback = getattr(module, name)(
        **({"schedule": lambda epoch: 0.1} if name == "LearningRateScheduler" else {})
    )
    with pytest.raises(ValueError, match=f"{name} must run on every process"):
        callbacks.OnMaster(callback)


def test_base_logger_and_orbax_checkpoint_are_refused():
    class BaseLogger(keras.callbacks.Callback):
        """The name that Keras 2 had."""

    with pytest.raises(
        ValueError, match=r"BaseLogger is not supported.*averages over all ranks already"
    ):
        fit(small_model(), [BaseLogger()], epochs=1)
    orbax = type("OrbaxCheckpoint", (keras.callbacks.Callback,), {})
    with pytest.raises(ValueError, match=r"use tnt_jax.callbacks.OrbaxCheckpoint"):
        callbacks.OnAllRanks(orbax())


def test_only_callbacks_are_taken():
    with pytest.raises(TypeError, match=r"Create one: EarlyStopping\("):
        fit(small_model(), [callbacks.EarlyStopping])
    for other, text in ((3, "3"), ("history", "'history'")):
        with pytest.raises(TypeError, match=f"or Keras callback objects, but got {text}"):
            fit(small_model(), [other])
    with pytest.raises(TypeError, match="takes one unwrapped callback"):
        callbacks.OnMaster(callbacks.OnAllRanks(callbacks.History()))


def test_the_master_alone_cannot_change_the_model():
    model = small_model()
    model.build((None, 4))
    master = base.CallbackScope(callbacks.Callback(), "main_process", runs=True, is_silent=False)
    with master.entered():
        model.get_weights()
        for change in (
            lambda: model.set_weights(model.get_weights()),
            lambda: setattr(model.optimizer, "learning_rate", 0.1),
            lambda: model.load_weights("x"),
        ):
            with pytest.raises(
                RuntimeError, match="on the master alone would make its model differ"
            ):
                change()
    model.set_weights(model.get_weights())


def test_silence_drops_what_is_printed_and_nothing_else(capsys):
    ran = []
    quiet = base.CallbackScope(
        callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: (print("seen"), ran.append(epoch))),
        "all_processes", runs=True, is_silent=True,
    )  # fmt: skip
    quiet.bind("on_epoch_end")(3, {})
    assert (ran, capsys.readouterr().out) == ([3], "")


def test_overridden_batch_hooks_are_found_under_their_old_names():
    class Old(keras.callbacks.Callback):
        def on_batch_end(self, batch, logs=None):
            pass

    assert overrides(Old(), "on_train_batch_end")
    assert not overrides(Old(), "on_test_batch_end")
    assert not overrides(keras.callbacks.History(), "on_train_batch_end")
    seen = []
    old = Old()
    old.on_batch_end = lambda batch, logs: seen.append(batch)
    fit(small_model(), old, epochs=1)
    assert seen == [0, 1, 2, 3, 4]


def test_nested_lists_and_tuples_of_callbacks_are_taken():
    recorder, other = Recorder(), Recorder()
    fit(small_model(), (recorder, [[other]]), epochs=1)
    assert recorder.calls == other.calls


# Monitors


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("loss", "min"), ("val_loss", "min"), ("head_loss", "min"), ("accuracy", "max"),
        ("val_acc", "max"), ("mse", "min"),
        ("val_auc", "max"), ("top_k_categorical_accuracy", "max"), ("mean_absolute_error", "min"),
        ("perplexity", "auto"),
    ],
)  # fmt: skip
def test_direction_by_name(log, expected):
    assert direction(log, types.SimpleNamespace(metrics_by_log={})) == expected


def test_direction_by_metric_whatever_its_name():
    model = tnt.Model(Net())
    model.compile("sgd", loss="mse", metrics=[tnt.metrics.MeanAbsoluteError(name="miss")])
    x, _ = data()
    stopping = [
        module.EarlyStopping(monitor="val_miss", patience=1)
        for module in (callbacks, keras.callbacks)
    ]
    model.fit(x, x[:, :3], epochs=2, verbose=0, callbacks=stopping, validation_data=(x, x[:, :3]))
    assert stopping[0].best == stopping[1].best < 10
    with pytest.raises(
        ValueError, match=r"'val_gap' is better is unknown. Pass mode='max' or mode='min'"
    ):
        model.fit(x, x[:, :3], verbose=0, callbacks=callbacks.EarlyStopping("val_gap"))
    with pytest.warns(
        UserWarning,
        match="mode must be 'auto', 'min' or 'max', but is 'best': it is treated as 'auto'",
    ):
        Monitor("loss", mode="best")


# Times of saving


@pytest.mark.parametrize(("every", "batches"), [(3, 5), (7, 5), (1, 2), (4, 4)])
def test_saving_times_count_over_epochs(every, batches):
    times = SavingTimes(every)
    due = [
        epoch * batches + batch
        for epoch in range(4)
        for batch in range(batches)
        if times.is_due_after_batch(batch)
    ]
    assert due == [n for n in range(4 * batches) if (n + 1) % every == 0]


def test_saving_times_with_several_steps_at_once():
    times = SavingTimes(3)
    assert [times.is_due_after_batch(batch) for batch in (3, 7, 8, 9)] == [True, True, False, False]
    with pytest.raises(
        ValueError, match="save_freq must be 'epoch' or a number of batches from 1, but is 'batch'"
    ):
        SavingTimes("batch")


# Learning rate


@pytest.mark.parametrize(("epochs", "num_steps"), [(2, 10), (1.5, 8), (0.1, 1)])
def test_warmup_follows_its_formula(epochs, num_steps):
    rates = []
    model = small_model(learning_rate=7.0)
    warmup = callbacks.LearningRateWarmup(0.4, initial_learning_rate=0.1, epochs=epochs)
    watch = callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: rates.append(model.optimizer.learning_rate)
    )
    history = fit(model, [warmup, watch], epochs=3)
    expected = [0.1 + (0.4 - 0.1) * min(step + 1, num_steps) / num_steps for step in range(15)]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)
    np.testing.assert_allclose(history.history["learning_rate"], expected[4::5], rtol=1e-6)
    with pytest.raises(ValueError, match="longer than 0 epochs"):
        callbacks.LearningRateWarmup(0.1, epochs=0)


def test_warmup_needs_the_number_of_steps():
    batches = ((x[None], y[None]) for x, y in zip(*data(8), strict=True))
    with pytest.raises(ValueError, match="pass steps_per_epoch"):
        small_model().fit(
            ((np.repeat(x, 8, 0), np.repeat(y, 8, 0)) for x, y in batches),
            callbacks=callbacks.LearningRateWarmup(0.1),
        )


def test_scheduler_wants_a_number():
    with pytest.raises(TypeError, match="must return a number, but returned 'fast' for epoch 0"):
        fit(small_model(), callbacks.LearningRateScheduler(lambda epoch, lr: "fast"))


@pytest.mark.parametrize(
    ("log", "expected"),
    [
        ("iou_loss", "min"), ("accuracy_head_loss", "min"), ("val_previous_loss", "min"),
        ("sauce", "auto"), ("previous", "auto"), ("loss_head_accuracy_1", "max"),
        ("MeanIoU", "max"), ("top-1 accuracy", "max"), ("r2_score", "max"),
    ],
)  # fmt: skip
def test_direction_by_whole_words_of_which_the_last_decides(log, expected):
    assert direction(log, types.SimpleNamespace(metrics_by_log={})) == expected


@pytest.mark.parametrize(
    "name",
    [
        "Precision", "MeanSquaredError", "BinaryAccuracy", "AUC", "FBetaScore", "LogCoshError",
        "CosineSimilarity", "KLDivergence", "Hinge", "R2Score",
    ],
)  # fmt: skip
def test_direction_of_a_metric_of_keras_whatever_its_name(name):
    theirs = getattr(keras.metrics, name)(name="p")
    model = types.SimpleNamespace(metrics_by_log={"p": tnt.metrics.get(theirs, (4, 1), (4, 1))})
    assert direction("p", model) == {"up": "max", "down": "min"}[theirs._direction]


def test_warmup_reaches_its_target_with_several_steps_in_a_program():
    model = small_model(learning_rate=7.0)
    model.compile("sgd", loss="mse", steps_per_execution=2)
    warmup = callbacks.LearningRateWarmup(0.4, initial_learning_rate=0.1, epochs=2)
    x, _ = data(32)
    rates = []
    watch = callbacks.LambdaCallback(
        on_train_batch_begin=lambda batch, logs: rates.append(model.optimizer.learning_rate)
    )
    model.fit(x, x[:, :3], batch_size=8, epochs=3, verbose=0, callbacks=[warmup, watch])
    expected = [0.1 + (0.4 - 0.1) * min(step, 8) / 8 for step in (1, 3, 5, 7, 8, 8)]
    np.testing.assert_allclose(rates, expected, rtol=1e-6)


def test_training_that_ends_early_leaves_the_averages_in_the_model():
    class StopAfter(callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.averages = self.model.get_weights()
            self.model.stop_training = epoch == 1

    stop = StopAfter()
    whole, stopped = (small_model(use_ema=True, ema_momentum=0.8) for _ in range(2))
    fit(whole, callbacks.SwapEMAWeights(swap_on_epoch=True), epochs=2)
    fit(stopped, [callbacks.SwapEMAWeights(swap_on_epoch=True), stop], epochs=5)
    for ours, average, expected in zip(
        stopped.get_weights(), stop.averages, whole.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(ours, expected)
        np.testing.assert_array_equal(average, expected)


@pytest.mark.parametrize("base", [callbacks.Callback, keras.callbacks.Callback])
def test_batch_hooks_of_a_class_that_is_named_like_the_base_run(base):
    seen = []

    class Callback(base):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(batch)

    fit(small_model(), Callback(), epochs=1)
    assert seen == [0, 1, 2, 3, 4]
