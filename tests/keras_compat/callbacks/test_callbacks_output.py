"""What callbacks write: profiles, event files, pictures; and real Keras callbacks on a Linen
model.
"""

import contextlib
import re

import flax.linen as nn
import keras
import numpy as np
import pytest
from crashes import Crash, CrashAt
from event_files import events
from keras_beside import (
    Net,
    compile_linen,
    data,
    fit,
    keras_model,
    linen_model,
    skip_on_oldest_keras,
)

import tnt_jax as tnt
from tnt_jax import callbacks
from tnt_jax.keras_compat.callbacks.tensorboard import as_images
from tnt_jax.log import logger
from tnt_jax.train.checkpoints.checkpoint import Checkpoints

LOSS = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)


def small_model(**sgd):
    model = tnt.Model(Net())
    compile_linen(model, **sgd)
    return model


@pytest.fixture(scope="module")
def any_model():
    """A model for callbacks that do not ask what it was trained on before."""
    return small_model()


# Profiles, pictures, programs


def test_runtime_profiler(tmp_path, capsys, any_model):
    model = any_model
    profiler = callbacks.RuntimeProfiler(8, logging_freq=2, print_freq=4)
    fit(model, profiler, epochs=2)
    assert [(r["epoch"], r["iteration"]) for r in profiler.records] == [
        (0, 2),
        (0, 4),
        (1, 2),
        (1, 4),
    ]
    assert all(r["iter_runtime_s"] > 0 and {"loss", "accuracy"} <= set(r) for r in profiler.records)
    assert [(e["epoch"], e["size"], e["niterations"]) for e in profiler.epochs] == [
        (0, 40, 5),
        (1, 40, 5),
    ]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ")[0] for line in lines] == ["Iteration", "Epoch"] * 2
    to_file = callbacks.RuntimeProfiler(
        log_file_path=tmp_path / "log", logging_freq=1, print_freq=5
    )
    fit(model, to_file, epochs=1)
    assert [line.split(" ")[0] for line in (tmp_path / "log").read_text().splitlines()] == [
        "Iteration",
        "Epoch",
    ]
    assert to_file.epochs[0]["size"] == 40
    with pytest.raises(
        ValueError, match=r"logging_freq \(0\) and print_freq \(30\) must be at least 1"
    ):
        callbacks.RuntimeProfiler(logging_freq=0)


def test_runtime_profiler_leaves_validation_out(any_model):
    slow = callbacks.LambdaCallback(on_test_begin=lambda logs: __import__("time").sleep(0.5))
    profiler = callbacks.RuntimeProfiler()
    fit(any_model, None, epochs=1)
    fit(any_model, [profiler, slow], epochs=1)
    assert profiler.epochs[0]["epoch_runtime_s"] < 0.5


@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_tensorboard_of_a_resumed_run_numbers_its_steps_as_one_run(tmp_path, steps_per_execution):
    def train(label, *extra):
        model = tnt.Model(nn.Dense(3))
        model.compile("sgd", LOSS, steps_per_execution=steps_per_execution)
        board = callbacks.TensorBoard(tmp_path / label, update_freq=1)
        fit(model, [board, *extra], epochs=3)

    def steps_of(label):
        return [step for tag, step, *_ in events(tmp_path / label / "train") if tag == "batch_loss"]

    train("whole")
    # Within the second epoch of five steps. The backup is read after TensorBoard has begun.
    for label, num_calls in (("interrupted", {1: 9, 2: 5}[steps_per_execution]), ("rest", -1)):
        crash = CrashAt(num_calls)
        backup = callbacks.BackupAndRestore(tmp_path / "backup", 2, delete_checkpoint=False)
        with contextlib.suppress(Crash):
            train(label, backup, crash)
    first = steps_of("rest")[0]
    assert 6 < first < 10
    assert steps_of("rest") == [step for step in steps_of("whole") if step >= first]


@pytest.mark.parametrize("update_freq", ["epoch", 2])
def test_tensorboard_writes_keras_tags_at_keras_steps(tmp_path, update_freq):
    pytest.importorskip(
        "tensorboard", reason="Keras writes its event files through TensorFlow and TensorBoard."
    )
    if update_freq != "epoch":
        skip_on_oldest_keras("numbers the batches of TensorBoard otherwise")
    theirs = keras_model()
    runs = {
        "ours": (linen_model(theirs), callbacks),
        "mixed": (linen_model(theirs), keras.callbacks),
        "keras": (theirs, keras.callbacks),
    }
    for label, (model, module) in runs.items():
        # Keras calls a callback that is not in a list in a thread, where its buffers may be gone.
        fit(model, [module.TensorBoard(str(tmp_path / label), update_freq=update_freq)], epochs=2)
    for folder in ("train", "validation"):
        found = {
            label: {
                event[:2]: event[2]
                for event in events(tmp_path / label / folder)
                if len(event) == 3
            }
            for label in runs
        }
        # Inside fit, Keras drops an epoch's values where the epoch's last step is no multiple of
        # update_freq.
        dropped = (
            {key for key in found["ours"] if key[0].startswith("epoch_") and key[1] == 0}
            if update_freq == 2
            else set()
        )
        for label in ("ours", "mixed"):
            assert set(found[label]) - dropped == set(found["keras"]) - dropped, (label, folder)
            for key in set(found[label]) & set(found["keras"]):
                assert found[label][key] == pytest.approx(
                    found["keras"][key], abs=1e-6, rel=1e-5
                ), (label, key)


def test_tensorboard_histograms_and_profile(tmp_path, any_model):
    fit(
        any_model,
        callbacks.TensorBoard(
            tmp_path, histogram_freq=2, write_steps_per_second=True, profile_batch=(2, 3)
        ),
        epochs=3,
    )
    train = events(tmp_path / "train")
    histograms = {(tag, step) for tag, step, *value in train if not value}
    assert histograms == {
        (f"Dense_{i}/{part}/histogram", epoch)
        for i in (0, 1)
        for part in ("kernel", "bias")
        for epoch in (0, 2)
    }
    assert len([e for e in train if e[0] == "epoch_steps_per_second"]) == 3
    assert list((tmp_path / "train").glob("plugins/profile/*/*.xplane.pb"))
    for wrong in (-1, (3, 2)):
        with pytest.raises(ValueError, match="profile_batch must be a step from 1"):
            callbacks.TensorBoard(tmp_path, profile_batch=wrong)
    with pytest.raises(ValueError, match="update_freq must be"):
        callbacks.TensorBoard(tmp_path, update_freq=0)


class Embedded(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(nn.Embed(7, 2)(x.astype(int) % 7).reshape(len(x), -1))


def test_tensorboard_writes_images_and_embeddings(tmp_path):
    model = tnt.Model(Embedded())
    compile_linen(model)
    callback = callbacks.TensorBoard(
        tmp_path, histogram_freq=1, write_images=True, embeddings_freq=2,
        embeddings_metadata={"Embed_0": "words.tsv"},
        update_freq=2, write_steps_per_second=True,
    )  # fmt: skip
    fit(model, callback, epochs=3)
    train = events(tmp_path / "train")
    pictures = {(tag, step) for tag, step, *_ in train if tag.endswith("/image")}
    assert pictures == {
        (f"{path}/image", epoch)
        for path in ("Dense_0/kernel", "Dense_0/bias", "Embed_0/embedding")
        for epoch in range(3)
    }
    assert [step for tag, step, *_ in train if tag == "batch_steps_per_second"] == [
        2,
        4,
        6,
        8,
        10,
        12,
        14,
    ]
    table = np.loadtxt(tmp_path / "train" / "Embed_0.embeddings-2.tsv", delimiter="\t")
    np.testing.assert_allclose(table, model.weights_by_path()["Embed_0/embedding"], rtol=1e-5)
    config = (tmp_path / "projector_config.pbtxt").read_text()
    projector = pytest.importorskip("tensorboard.plugins.projector")
    parsed = pytest.importorskip("google.protobuf.text_format").Parse(
        config, projector.ProjectorConfig()
    )
    assert [(e.tensor_name, e.tensor_path, e.metadata_path) for e in parsed.embeddings] == [
        ("Embed_0", "train/Embed_0.embeddings-2.tsv", "words.tsv")
    ]
    with pytest.raises(
        ValueError,
        match="embeddings_metadata names Nope, but the layers with embeddings are: Embed_0",
    ):
        fit(
            model,
            callbacks.TensorBoard(tmp_path, embeddings_freq=1, embeddings_metadata={"Nope": "x"}),
            epochs=1,
        )


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((5,), (1, 5, 1, 1)), ((7, 2), (1, 2, 7, 1)), ((2, 7), (1, 2, 7, 1)),
        ((3, 3, 1, 4), (4, 3, 3, 1)), ((3, 3, 2, 5), None),
        ((1, 4), (1, 4, 1, 1)), ((3, 3, 2, 4), (3, 3, 2, 4)),
    ],
)  # fmt: skip
def test_weights_become_images_of_the_shapes_of_keras(shape, expected):
    image = as_images(np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    assert (image if image is None else image.shape) == expected
    assert image is None or (image.dtype, image.min(), image.max()) == (np.uint8, 0, 255)


@pytest.mark.parametrize("scaled", [False, True])
def test_keras_tensorboard_writes_the_rate_of_any_optimizer(tmp_path, scaled):
    pytest.importorskip("tensorboard")
    model = small_model()
    rate = tnt.optimizers.SGD(tnt.schedules.ExponentialDecay(0.1, 5, 0.5))
    model.compile(tnt.optimizers.LossScaleOptimizer(rate) if scaled else rate, loss=LOSS)
    fit(model, [keras.callbacks.TensorBoard(str(tmp_path))], epochs=2)
    written = [event[2] for event in events(tmp_path / "train") if "learning_rate" in event[0]]
    np.testing.assert_allclose(written, [0.05, 0.025], rtol=1e-6)


def test_tensorboard_shows_the_finite_values_of_weights(tmp_path, caplog):
    model = small_model()
    fit(model, None, epochs=1)
    weights = model.get_weights()
    weights[1][0, :3], weights[2][:] = [np.nan, np.inf, 1e30], np.nan
    model.set_weights(weights)
    callback = callbacks.TensorBoard(tmp_path, histogram_freq=1, write_images=True)
    callback.set_model(model)
    logger.addHandler(caplog.handler)
    try:
        callback.on_epoch_end(0, {"loss": np.nan})
    finally:
        logger.removeHandler(caplog.handler)
    callback.on_train_end()
    assert "Dense_0/kernel: 2 of 32 values are NaN or infinite" in caplog.text
    tags = {event[0] for event in events(tmp_path / "train")}
    assert {"Dense_0/kernel/histogram", "Dense_0/kernel/image", "Dense_1/bias/image"} <= tags
    assert "Dense_1/bias/histogram" not in tags
    image = as_images(np.array([[1, 3, np.nan, np.inf, -np.inf]], np.float32))
    assert image.ravel().tolist() == [0, 255, 0, 255, 0]


def test_tensorboard_writes_the_layers_of_a_keras_model_as_keras_does(tmp_path):
    pytest.importorskip("tensorboard")
    theirs = keras_model()
    model = tnt.Model(theirs)
    compile_linen(model)
    for label, trained, module in (("ours", model, callbacks), ("keras", theirs, keras.callbacks)):
        fit(trained, [module.TensorBoard(str(tmp_path / label))], epochs=1)
    layers = [
        event[:2]
        for label in ("ours", "keras")
        for event in events(tmp_path / label / "train")
        if event[0] == "keras"
    ]
    assert layers == [("keras", 0)] * 2


def test_keras_tensorboard_draws_histograms_of_a_linen_model(tmp_path, any_model):
    pytest.importorskip("tensorboard")
    fit(any_model, [keras.callbacks.TensorBoard(str(tmp_path), histogram_freq=1)], epochs=1)
    tags = {event[0] for event in events(tmp_path / "train")}
    assert "Dense_0/kernel/histogram" in tags


def test_curves_are_drawn(tmp_path):
    from matplotlib.image import imread

    model = small_model()
    with pytest.raises(RuntimeError, match="no history to draw"):
        model.plot_history(tmp_path / "early.png")
    fit(model, callbacks.PlotHistory(tmp_path / "sub" / "live.png"), epochs=3, validation_freq=2)
    model.plot_history(tmp_path / "end.png")
    for file in (tmp_path / "sub" / "live.png", tmp_path / "end.png"):
        picture = imread(file)
        assert picture.shape[0] > 200
        assert picture.std() > 0.01
    with pytest.raises(ValueError, match="no logs to draw"):
        model.plot_history(tmp_path / "none.png", {})


def test_lowered_text_shows_the_reductions():
    model = small_model()
    text = model.lowered_text(*data(), batch_size=8)
    assert "stablehlo" in text
    assert "all_reduce" in text
    assert "all-reduce" in model.lowered_text(*data(), batch_size=8, optimized=True)
    assert model.optimizer.iterations == 0
    with pytest.raises(RuntimeError, match="compiled first"):
        tnt.Model(nn.Dense(1)).lowered_text(*data())


# Real Keras callbacks on a Linen model, beyond those beside Keras


def test_keras_model_checkpoint_saves_whole_linen_models(tmp_path):
    model = small_model(momentum=0.9)
    fit(model, keras.callbacks.ModelCheckpoint(str(tmp_path / "{epoch}.keras")), epochs=2)
    loaded = tnt.models.load_model(tmp_path / "2.keras", module=Net())
    for mine, theirs in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert loaded.optimizer.iterations == 10


@pytest.mark.parametrize(
    ("options", "numbers"),
    [
        ({}, [20]),
        ({"max_to_keep": 3}, [10, 15, 20]),
        ({"max_to_keep": None}, [5, 10, 15, 20]),
    ],
)
def test_orbax_checkpoints_stay_as_many_as_asked_for(tmp_path, options, numbers):
    model = small_model()
    fit(model, callbacks.OrbaxCheckpoint(tmp_path / "all", save_on_background=False, **options))
    assert [
        Checkpoints(tmp_path / "all").newest(before=number + 1) for number in numbers
    ] == numbers
    assert Checkpoints(tmp_path / "all").newest(before=numbers[0]) is None
    loaded = tnt.models.load_model(tmp_path / "all", custom_objects={"Net": Net})
    for mine, theirs in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: callbacks.OrbaxCheckpoint("x.keras"),
            r"saves to a directory, but x.keras has the name of a file",
        ),
        (
            lambda: callbacks.OrbaxCheckpoint("x", max_to_keep=0),
            "max_to_keep must be at least 1 or None, but is 0",
        ),
    ],
)
def test_orbax_checkpoint_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("save_freq", ["epoch", 3])
def test_keras_backup_and_restore_goes_on_at_its_epoch(tmp_path, save_freq):
    class Stop(Exception):
        pass

    def stop(epoch, logs):
        if epoch == 1:
            raise Stop

    def backup():
        return keras.callbacks.BackupAndRestore(str(tmp_path / "backup"), save_freq=save_freq)

    first = small_model(momentum=0.9)
    first.build((None, 4))
    weights = first.get_weights()
    with pytest.raises(Stop):
        fit(first, [backup(), callbacks.LambdaCallback(on_epoch_begin=stop)], epochs=3)
    second = small_model(momentum=0.9)
    second.build((None, 4))
    second.set_weights([w + 1 for w in weights])
    history = fit(second, backup(), epochs=3)
    # Keras begins the epoch again in which it was interrupted.
    assert history.epoch == ([1, 2] if save_freq == "epoch" else [0, 1, 2])
    assert not (tmp_path / "backup").exists()
    if save_freq == "epoch":
        expected = fit(linen_like(weights), None, epochs=3)
        np.testing.assert_allclose(history.history["loss"], expected.history["loss"][1:], rtol=1e-6)


def linen_like(weights):
    model = small_model(momentum=0.9)
    model.build((None, 4))
    model.set_weights(weights)
    return model


def test_keras_progress_bar_and_history_are_not_doubled(capsys, any_model):
    history = keras.callbacks.History()
    result = fit(any_model, [history, keras.callbacks.ProgbarLogger()], epochs=2, verbose=1)
    assert result.history == history.history
    out = capsys.readouterr().out
    assert out.count("Epoch 1/2") == 1
    assert re.search(r"5/5.*loss", out)


def test_metrics_with_several_results_are_written_and_not_monitored(tmp_path):
    model = tnt.Model(nn.Dense(3))
    model.compile("sgd", "mse", metrics=[tnt.metrics.F1Score(name="f1")])
    x, labels = data(24)
    one_hot = np.eye(3, dtype=np.float32)[labels % 3]
    board = callbacks.TensorBoard(tmp_path / "board", update_freq=1)
    best = callbacks.ModelCheckpoint(
        tmp_path / "{epoch}.weights.h5", monitor="f1", save_best_only=True, save_weights_only=True
    )
    with pytest.warns(UserWarning, match=r"watches 'f1', but its metric has 3 results\. Watch a"):
        history = model.fit(
            x, one_hot, batch_size=8, epochs=2, verbose=0, callbacks=[board, best]
        ).history["f1"]
    assert sorted(file.name for file in tmp_path.glob("*.h5")) == ["1.weights.h5", "2.weights.h5"]
    found = {event[:2]: event[2] for event in events(tmp_path / "board" / "train")}
    for epoch, values in enumerate(history):
        written = [found[f"epoch_f1_{number}", epoch] for number in range(3)]
        np.testing.assert_allclose(written, values, rtol=1e-6)


def test_csv_logger_writes_several_results_as_keras_does(tmp_path):
    logs = {"f1": np.array([0.1, 1 / 3, 0], np.float32), "loss": 0.5, "at": [1, 2.5]}
    for module in (callbacks, keras.callbacks):
        writer = module.CSVLogger(str(tmp_path / module.__name__))
        writer.on_train_begin()
        writer.on_epoch_end(0, dict(logs))
        writer.on_train_end()
    ours, theirs = (tmp_path / module.__name__ for module in (callbacks, keras.callbacks))
    assert ours.read_bytes() == theirs.read_bytes()
