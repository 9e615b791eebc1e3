"""Each callback beside the real Keras callback on the same model and data: same calls, logs, files
and epochs.
"""

import csv
import math
import pickle
import types

import keras
import numpy as np
import pytest
from keras_beside import (
    Recorder,
    assert_same_calls,
    by_dense,
    data,
    fit,
    keras_model,
    linen_model,
    skip_on_oldest_keras,
)
from long_params import long_but_last

import tnt_jax as tnt
from tnt_jax import callbacks

# Training with Keras, with our callback, and with Keras's callback in our `fit`.
RUNS = {"keras": keras.callbacks, "ours": callbacks, "mixed": keras.callbacks}


def with_labels(*several):
    """Returns arguments of a callback, of which the first are run with Keras's in our `fit`, too."""
    return [(arguments, tuple(RUNS)[: 2 if i else 3]) for i, arguments in enumerate(several)]


def run_both(make, *, labels=tuple(RUNS), sgd=None, prepare=lambda model: None, **options):
    """Trains in the runs of these labels.

    Args:
        make: From the module of callbacks and a label to the callbacks to use.
        labels: Of `RUNS`.
    """
    results = []
    for label in labels:
        module = RUNS[label]
        theirs = keras_model(**(sgd or {}))
        model = theirs if label == "keras" else linen_model(theirs, **(sgd or {}))
        prepare(model)
        recorder, made = Recorder(), make(module, label)
        history = fit(model, [*made, recorder], **options)
        weights = model.get_weights()
        results.append(
            (
                recorder.calls,
                history,
                by_dense(weights) if label == "keras" else weights,
                made,
                model,
            )
        )
    return results


def assert_same_runs(runs, *, atol=1e-6):
    (calls, history, weights, _, _), *others = runs
    for other_calls, other_history, other_weights, _, _ in others:
        assert_same_calls(other_calls, calls, atol=atol)
        assert other_history.epoch == history.epoch
        assert set(other_history.history) == set(history.history)
        for name, values in history.history.items():
            np.testing.assert_allclose(
                other_history.history[name], values, atol=atol, rtol=1e-5, err_msg=name
            )
        for mine, theirs in zip(other_weights, weights, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-5)


def test_a_run_without_callbacks_calls_the_same_hooks():
    assert_same_runs(run_both(lambda module, label: [], validation_freq=2))


@pytest.mark.parametrize(
    ("options", "labels"),
    with_labels(
        {"monitor": "val_loss", "min_delta": 0.1, "patience": 1},
        {"monitor": "val_accuracy", "patience": 2, "mode": "auto"},
        {"monitor": "loss", "patience": 1, "baseline": 0.5},
        {"monitor": "val_loss", "patience": 0, "mode": "max", "restore_best_weights": True},
        {
            "monitor": "loss",
            "patience": 1,
            "mode": "max",
            "start_from_epoch": 2,
            "restore_best_weights": True,
        },
    ),
)
def test_early_stopping(options, labels):
    runs = run_both(lambda module, _: [module.EarlyStopping(**options)], labels=labels, epochs=8)
    assert_same_runs(runs)
    assert len({made[0].stopped_epoch for *_, made, _ in runs}) == 1
    assert len({made[0].best_epoch for *_, made, _ in runs}) == 1


def test_early_stopping_restores_the_best_weights_after_a_bad_rate():
    options = {"monitor": "val_loss", "patience": 2, "restore_best_weights": True}
    runs = run_both(
        lambda module, label: [
            module.LearningRateScheduler(lambda e, lr: 0.1 if e < 3 else -0.1),
            module.EarlyStopping(**options),
        ],
        epochs=9,
    )
    assert_same_runs(runs, atol=1e-4)
    assert runs[0][3][1].stopped_epoch > 0, "The case must stop early to show anything."


@pytest.mark.parametrize(
    ("schedule", "labels"),
    with_labels(lambda epoch, lr: lr * 0.5, lambda epoch: 0.3 / (epoch + 1)),
)
def test_learning_rate_scheduler(schedule, labels):
    runs = run_both(lambda module, _: [module.LearningRateScheduler(schedule)], labels=labels)
    assert_same_runs(runs)
    assert "learning_rate" in runs[1][1].history


@pytest.mark.parametrize(
    ("options", "labels"),
    with_labels(
        {"monitor": "val_loss", "factor": 0.8, "patience": 1, "min_delta": 10.0},
        {
            "monitor": "loss",
            "factor": 0.5,
            "patience": 1,
            "min_delta": 10.0,
            "cooldown": 2,
            "min_lr": 0.03,
        },
    ),
)
def test_reduce_lr_on_plateau(options, labels):
    runs = run_both(
        lambda module, _: [module.ReduceLROnPlateau(**options)], labels=labels, epochs=7
    )
    assert_same_runs(runs)
    assert len(set(np.round(runs[0][1].history["learning_rate"], 7))) > 1, (
        "The rate must fall to show anything."
    )


@pytest.mark.parametrize("raise_error", [False, True])
def test_terminate_on_nan(raise_error, capsys):
    skip_on_oldest_keras("has no raise_error in TerminateOnNaN")

    def make(module, label):
        return [module.TerminateOnNaN(raise_error=raise_error)]

    options = {"sgd": {"learning_rate": 1e30}, "epochs": 3, "validation_data": None}
    if raise_error:
        for label, module in (("ours", callbacks), ("mixed", keras.callbacks)):
            model = linen_model(keras_model(), learning_rate=1e30)
            with pytest.raises(RuntimeError, match=r"loss"):
                fit(model, make(module, label), epochs=3)
        return
    runs = run_both(make, **options)
    assert (
        [call[:-1] for call in runs[1][0]]
        == [call[:-1] for call in runs[0][0]]
        == [call[:-1] for call in runs[2][0]]
    )
    assert runs[0][1].epoch == runs[1][1].epoch == [0]
    assert capsys.readouterr().out.count("Invalid loss, terminating training") == 3


def test_csv_logger(tmp_path):
    separator = ";"  # The next test has the default.
    runs = run_both(
        lambda module, label: [module.CSVLogger(tmp_path / label, separator=separator)],
        epochs=3,
        validation_freq=2,
    )
    assert_same_runs(runs)
    texts = {
        label: (tmp_path / label).read_text().splitlines() for label in ("keras", "ours", "mixed")
    }
    tables = {label: list(csv.reader(lines, delimiter=separator)) for label, lines in texts.items()}
    for label in ("ours", "mixed"):
        assert tables[label][0] == tables["keras"][0]
        for row, expected in zip(tables[label][1:], tables["keras"][1:], strict=True):
            numbers = [(a, b) for a, b in zip(row, expected, strict=True) if b != "NA"]
            assert [a == "NA" for a in row] == [b == "NA" for b in expected]
            np.testing.assert_allclose(
                [float(a) for a, _ in numbers], [float(b) for _, b in numbers], atol=1e-6, rtol=1e-5
            )


def test_csv_logger_writes_the_same_bytes_for_the_same_logs(tmp_path):
    rows = [{"loss": 0.1 + 0.2, "a": 1.0}, {"loss": 1e-9, "a": float("nan"), "late": 3.0}]
    for label, module in (("keras", keras.callbacks), ("ours", callbacks)):
        for append in (False, True):
            logger = module.CSVLogger(str(tmp_path / label), append=append)
            logger.on_train_begin()
            for epoch, logs in enumerate(rows):
                logger.on_epoch_end(epoch, dict(logs))
            logger.on_train_end()
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "keras").read_bytes()


def test_lambda_callback():
    seen = {"keras": [], "ours": [], "mixed": []}

    def make(module, label):
        return [
            module.LambdaCallback(
                on_epoch_end=lambda epoch, logs: seen[label].append((epoch, sorted(logs))),
                on_train_batch_end=lambda batch, logs: seen[label].append((batch, sorted(logs))),
                on_train_end=lambda logs: seen[label].append(sorted(logs)),
            )
        ]

    assert_same_runs(run_both(make))
    assert seen["ours"] == seen["keras"] == seen["mixed"]
    with pytest.raises(TypeError, match=r"has no hook on_epoch_start.*on_epoch_begin"):
        callbacks.LambdaCallback(on_epoch_start=print)


@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"save_freq": "epoch"}, "{epoch:02d}-{val_loss:.1f}"),
        ({"save_freq": 3}, "{epoch:02d}-{batch:02d}"),
        ({"save_best_only": True, "monitor": "val_loss", "mode": "max"}, "best-{epoch}"),
        ({"save_best_only": True, "monitor": "val_accuracy"}, "best-{epoch}"),
        (
            {"save_best_only": True, "monitor": "val_loss", "initial_value_threshold": 0.0},
            "none-{epoch}",
        ),
    ],
)
def test_model_checkpoint_writes_the_same_files(tmp_path, options, pattern):
    def make(module, label):
        return [
            module.ModelCheckpoint(
                str(tmp_path / label / f"{pattern}.weights.h5"), save_weights_only=True, **options
            )
        ]

    (tmp_path / "keras").mkdir()
    runs = run_both(make)
    assert_same_runs(runs)
    names = {
        label: sorted(p.name for p in (tmp_path / label).glob("*"))
        for label in ("keras", "ours", "mixed")
    }
    assert names["ours"] == names["keras"] == names["mixed"]
    for name in names["ours"]:
        theirs, mine = keras_model(), linen_model(keras_model())
        theirs.load_weights(tmp_path / "keras" / name)
        mine.build((None, 4))
        mine.load_weights(tmp_path / "mixed" / name)
        for a, b in zip(mine.get_weights(), by_dense(theirs.get_weights()), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-5, err_msg=name)
        assert mine.optimizer.iterations == int(theirs.optimizer.iterations)


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda: callbacks.EarlyStopping("loss", patience=9), lambda c: c.best),
        (lambda: callbacks.ReduceLROnPlateau("loss", patience=9), lambda c: c.best),
    ],
)
def test_a_number_is_better_than_a_first_nan(make, read):
    callback = make()
    callback.set_model(
        types.SimpleNamespace(metrics_by_log={}, optimizer=types.SimpleNamespace(learning_rate=0.1))
    )
    callback.on_train_begin({})
    seen = []
    for epoch, loss in enumerate([math.nan, math.nan, 3.0, math.nan, 4.0, 2.0]):
        callback.on_epoch_end(epoch, {"loss": loss})
        seen.append(read(callback))
    np.testing.assert_equal(seen, [math.nan, math.nan, 3.0, 3.0, 3.0, 2.0])


@pytest.mark.parametrize("swap_on_epoch", long_but_last(False, True))
def test_swap_ema_weights(swap_on_epoch):
    runs = run_both(
        lambda module, label: [module.SwapEMAWeights(swap_on_epoch=swap_on_epoch)],
        sgd={"use_ema": True, "ema_momentum": 0.8},
    )
    assert_same_runs(runs)
    plain = run_both(lambda module, label: [], sgd={"use_ema": True, "ema_momentum": 0.8})
    assert_same_runs(plain)
    assert abs(plain[0][1].history["val_loss"][0] - runs[0][1].history["val_loss"][0]) > 1e-4


def test_swap_ema_weights_inside_loss_scaling():
    for module in (keras.callbacks, callbacks):
        theirs, runs = keras_model(use_ema=True, ema_momentum=0.8), []
        mine = linen_model(theirs, use_ema=True, ema_momentum=0.8)
        for model, package in ((theirs, keras), (mine, tnt)):
            inner = package.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8)
            model.compile(
                package.optimizers.LossScaleOptimizer(inner),
                package.losses.SparseCategoricalCrossentropy(from_logits=True),
            )
            swap = keras.callbacks if model is theirs else module
            runs.append(fit(model, [swap.SwapEMAWeights(swap_on_epoch=True)]).history)
        np.testing.assert_allclose(runs[1]["val_loss"], runs[0]["val_loss"], atol=1e-6)
    assert mine.optimizer.inner_optimizer.learning_rate == np.float32(0.1)


@pytest.mark.parametrize("first", [0, 2])
def test_a_second_fit_goes_on_as_keras_does(first):
    theirs = keras_model(momentum=0.9)
    mine = linen_model(theirs, momentum=0.9)
    for initial_epoch, epochs in ((0, 2), (first, first + 2)):
        a, b = (
            fit(model, None, epochs=epochs, initial_epoch=initial_epoch) for model in (theirs, mine)
        )
        assert a.epoch == b.epoch
        np.testing.assert_allclose(b.history["loss"], a.history["loss"], atol=1e-6)
    assert mine.optimizer.iterations == int(theirs.optimizer.iterations) == 20


def test_the_rate_is_set_as_keras_callbacks_set_it():
    class Assign(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.optimizer.learning_rate.assign(0.3)

    theirs = keras_model()
    for model in (theirs, linen_model(theirs)):
        fit(model, [Assign()], epochs=1)
        assert float(keras.ops.convert_to_numpy(model.optimizer.learning_rate)) == pytest.approx(
            0.3
        )
        assert model.optimizer.learning_rate.numpy() == np.float32(0.3)
    assert pickle.loads(pickle.dumps(model.optimizer.learning_rate)) == float(
        model.optimizer.learning_rate
    )


def test_evaluate_calls_the_same_hooks():
    theirs = keras_model()
    mine = linen_model(theirs)
    calls = []
    for model in (theirs, mine):
        recorder = Recorder()
        model.evaluate(*data(20), batch_size=8, verbose=0, callbacks=[recorder])
        calls.append(recorder.calls)
    assert_same_calls(calls[1], calls[0])
