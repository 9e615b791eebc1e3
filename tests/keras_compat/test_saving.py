"""Saving and loading: what comes back is what was saved, training goes on as if never interrupted,
and a crash loses nothing.
"""

import json
import subprocess
import sys
import textwrap
import time
from functools import cache
from types import SimpleNamespace

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from flax import nnx
from keras_beside import Net, compile_linen, data
from long_params import long_but_last
from saved_runs import WithState, assert_equal_weights, fit, make_model

import tnt_jax as tnt
from tnt_jax.adapters.base import Variables

PATHS = ["run", "run.keras", "run.weights.h5"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model after two epochs, what it saved to `folder`, and its next two epochs."""
    folder, model = tmp_path_factory.mktemp("trained"), make_model()
    fit(model, epochs=2)
    for name, all_devices in zip(PATHS, (True, False, True), strict=True):
        save = model.save_weights if name.endswith("weights.h5") else model.save
        save(folder / name, tnt_save_all_devices=all_devices)
    weights, outputs = model.get_weights(), model.predict(data()[0], verbose=0)
    history = fit(model, initial_epoch=2, epochs=4).history
    return SimpleNamespace(
        folder=folder, weights=weights, outputs=outputs, history=history, model=model
    )


@pytest.fixture(scope="module")
def uncompiled(tmp_path_factory):
    """A model that was not compiled, and what it saved to `folder`."""
    folder, model = tmp_path_factory.mktemp("uncompiled"), tnt.Model(WithState())
    model.build((None, 4))
    for name in ("run", "run.keras"):
        model.save(folder / name)
    outputs = model.predict(data()[0], verbose=0)
    return SimpleNamespace(folder=folder, weights=model.get_weights(), outputs=outputs)


@pytest.mark.parametrize("name", PATHS)
def test_resumed_training_equals_continued_training(trained, name):
    other = make_model()
    other.build(data()[0])
    other.load_weights(trained.folder / name)
    assert other.optimizer.iterations == 10
    assert fit(other, initial_epoch=2, epochs=4).history == trained.history
    assert_equal_weights(other.get_weights(), trained.model.get_weights())


@pytest.mark.parametrize("name", ["run", "run.keras"])
@pytest.mark.parametrize("saved", ["trained", "uncompiled"])
@pytest.mark.parametrize("compile_again", [False, True])
def test_load_model(request, saved, compile_again, name):
    saved = request.getfixturevalue(saved)
    path = saved.folder / name
    assert path.is_file() == (name != "run")
    loaded = tnt.models.load_model(
        path, compile=compile_again, custom_objects={"WithState": WithState}
    )
    assert_equal_weights(loaded.get_weights(), saved.weights)
    np.testing.assert_array_equal(loaded.predict(data()[0], verbose=0), saved.outputs)
    if hasattr(saved, "history") and compile_again:
        assert fit(loaded, initial_epoch=2, epochs=4).history == saved.history
        return
    with pytest.raises(RuntimeError, match=r"compiled first"):
        fit(loaded)


def test_load_model_compiles_with_the_same_arguments(tmp_path):
    schedule = tnt.schedules.ExponentialDecay(0.1, 10, 0.9)
    model = make_model(optimizer=tnt.optimizers.AdamW(schedule, weight_decay=0.01, clipnorm=1.0))
    fit(model)
    model.save(tmp_path / "run")
    loaded = tnt.models.load_model(tmp_path / "run", custom_objects={"WithState": WithState})
    assert loaded.optimizer.learning_rate == model.optimizer.learning_rate
    expected = fit(model, initial_epoch=2, epochs=4).history
    assert fit(loaded, initial_epoch=2, epochs=4).history == expected


def test_what_cannot_be_described_is_passed_again(tmp_path):
    def loss(y_true, y_pred):
        return jnp.mean((y_pred - jax.nn.one_hot(y_true, 3)) ** 2, axis=-1)

    class Local(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(3)(x)

    model = tnt.Model(Local())
    arguments = {
        "optimizer": optax.inject_hyperparams(optax.adam)(learning_rate=0.01),
        "loss": loss,
    }
    model.compile(**arguments)
    fit(model)
    model.save(tmp_path / "run")
    with pytest.raises(ValueError, match=r"module=.*Local.*defined inside a function"):
        tnt.models.load_model(tmp_path / "run")
    loaded = tnt.models.load_model(tmp_path / "run", module=Local())
    with pytest.raises(RuntimeError, match=r"compiled first"):
        fit(loaded)
    loaded.compile(**arguments)
    loaded.load_weights(tmp_path / "run")
    expected = fit(model, initial_epoch=2, epochs=3).history
    assert fit(loaded, initial_epoch=2, epochs=3).history == expected


def test_nnx_models_are_saved_and_loaded_into_a_module(tmp_path):
    class Mlp(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            return self.second(nnx.relu(self.first(x)))

    model = tnt.Model(Mlp(nnx.Rngs(0)))
    compile_linen(model, momentum=0.9)
    fit(model)
    model.save(tmp_path / "run")
    with pytest.raises(ValueError, match=r"module="):
        tnt.models.load_model(tmp_path / "run")
    loaded = tnt.models.load_model(tmp_path / "run", module=Mlp(nnx.Rngs(5)))
    assert_equal_weights(loaded.get_weights(), model.get_weights())
    expected = fit(model, initial_epoch=2, epochs=3).history
    assert fit(loaded, initial_epoch=2, epochs=3).history == expected


def test_safetensors_hold_the_variables_under_dotted_names(tmp_path, trained):
    from safetensors.numpy import load_file

    model = trained.model
    model.save_weights(tmp_path / "x.safetensors")
    tensors = load_file(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(
        tensors["params.Dense_0.kernel"], model.variables["params"]["Dense_0"]["kernel"]
    )
    assert "model_state.batch_stats.BatchNorm_0.mean" in tensors
    assert not any(name.startswith("opt_state") for name in tensors)
    other = make_model(seed=5)
    other.build(data()[0])
    other.load_weights(tmp_path / "x.safetensors")
    assert_equal_weights(other.get_weights(), model.get_weights())
    assert other.optimizer.iterations == 0


def test_half_precision_survives_every_format(tmp_path):
    for name in ("d", "x.weights.h5", "x.safetensors"):
        weights = []
        for seed in (0, 1):
            model = tnt.Model(nn.Dense(3, param_dtype=jnp.bfloat16), seed=seed)
            model.build((None, 4))
            (model.save_weights if seed == 0 else model.load_weights)(tmp_path / name)
            weights.append(model.get_weights())
        assert weights[1][1].dtype == jnp.bfloat16
        assert_equal_weights(*weights)


@cache
def built(module, **options):
    model = tnt.Model(module, **options)
    compile_linen(model)
    model.build((None, 4))
    return model


@pytest.mark.parametrize("name", PATHS)
def test_a_mismatch_names_the_leaves(tmp_path, name):
    built(nn.Dense(5)).save_weights(tmp_path / name)
    narrow = built(nn.Dense(3))
    before = narrow.get_weights()
    with pytest.raises(
        ValueError, match=r"params/kernel \(file: float32\[4, 5\], model: float32\[4, 3\]\)"
    ):
        narrow.load_weights(tmp_path / name)
    assert_equal_weights(narrow.get_weights(), before)
    with pytest.raises(
        ValueError, match=r"not in the file: params/Dense_0/bias.*not in the model: params/bias"
    ):
        built(Net()).load_weights(tmp_path / name)


@pytest.mark.parametrize("name", [*PATHS, "run.safetensors"])
def test_what_does_not_fit_is_skipped_if_asked(tmp_path, name, caplog):
    wide = built(nn.Sequential((nn.Dense(8), nn.Dense(5))), seed=1)
    wide.save_weights(tmp_path / name)
    narrow = tnt.Model(nn.Sequential([nn.Dense(8), nn.Dense(3), nn.Dense(2)]), seed=2)
    narrow.compile("adam", loss="mse")
    narrow.build((None, 4))
    before = narrow.variables["params"]
    logger = __import__("logging").getLogger("tnt_jax")
    logger.addHandler(caplog.handler)
    try:
        narrow.load_weights(tmp_path / name, skip_mismatch=True)
    finally:
        logger.removeHandler(caplog.handler)
    assert "keep their values. " in caplog.text
    assert "params/layers_1/kernel (file: float32[8, 5], model: float32[8, 3])" in caplog.text
    assert "not in the file: params/layers_2/bias" in caplog.text
    after = narrow.variables["params"]
    np.testing.assert_array_equal(
        after["layers_0"]["kernel"], wide.variables["params"]["layers_0"]["kernel"]
    )
    for layer in ("layers_1", "layers_2"):
        np.testing.assert_array_equal(after[layer]["kernel"], before[layer]["kernel"])


def test_the_state_of_another_optimizer_is_left_out(trained, caplog):
    other = make_model(optimizer="adam")
    other.build(data()[0])
    logger = __import__("logging").getLogger("tnt_jax")
    logger.addHandler(caplog.handler)
    try:
        other.load_weights(trained.folder / "run")
    finally:
        logger.removeHandler(caplog.handler)
    assert "The optimizer keeps its state" in caplog.text
    assert_equal_weights(other.get_weights(), trained.weights)
    assert other.optimizer.iterations == 0


def test_errors_say_what_to_do(tmp_path):
    model = make_model()
    for call in (
        model.get_weights,
        lambda: model.set_weights([]),
        lambda: model.save(tmp_path / "a"),
    ):
        with pytest.raises(RuntimeError, match=r"no variables yet. Call build"):
            call()
    model.build((None, 4))
    with pytest.raises(FileNotFoundError, match=r"does not find .*missing"):
        model.load_weights(tmp_path / "missing")
    with pytest.raises(ValueError, match=r"set_weights needs 8 arrays .* but got 1"):
        model.set_weights([np.zeros(3)])
    model.save(tmp_path / "a")
    model.save(tmp_path / "a")
    with pytest.raises(FileExistsError, match=r"pass overwrite=True"):
        model.save(tmp_path / "a", overwrite=False)
    with pytest.raises(ValueError, match=r"save_model needs a tnt_jax.Model"):
        tnt.models.save_model("model", tmp_path / "b")


@pytest.mark.parametrize("name", ["x.h5", "x.npz", "x.pkl", "runs/x.NPZ", "x.png"])
def test_names_of_files_in_other_forms_are_refused(tmp_path, name):
    model = built(nn.Dense(3))
    calls = [
        model.save,
        model.save_weights,
        lambda path: fit(model, callbacks=tnt.callbacks.ModelCheckpoint(path)),
    ]
    if not name.endswith(".h5"):  # Keras models have such files.
        calls += [model.load_weights, tnt.models.load_model]
    for call in calls:
        with pytest.raises(
            ValueError,
            match=r"has an unsupported file extension. A whole model is a directory",
        ):
            call(tmp_path / name)
    assert list(tmp_path.iterdir()) == []
    model.save(tmp_path / "0.93")
    assert (tmp_path / "0.93").is_dir()


def test_set_weights_changes_the_model_and_keeps_the_optimizer():
    model = tnt.Model(nn.Dense(3))
    compile_linen(model, momentum=0.9)
    fit(model)
    weights = [w + 1 for w in model.get_weights()]
    model.set_weights(weights)
    assert_equal_weights(model.get_weights(), weights)
    assert model.optimizer.iterations == 10


def test_clone_and_json():
    model = tnt.Model(tnt.models.CNN(), seed=4)
    model.build((None, 28, 28, 1))
    for other in (
        tnt.models.clone_model(model),
        tnt.models.model_from_json(model.to_json()),
        tnt.Model.from_config(model.get_config()),
    ):
        assert other.module == model.module
        assert not other.built
        other.build((None, 28, 28, 1))
        assert_equal_weights(other.get_weights(), model.get_weights())
    assert json.loads(model.to_json())["module"]["linen"][0] == "tnt_jax.models:CNN"


class Named(tnt.Model):
    pass


class Forwarding(tnt.Model):
    def __init__(self, module, **options):
        super().__init__(module, **options)


@pytest.mark.parametrize("kind", [Named, Forwarding])
def test_the_configuration_of_a_derived_class_gives_a_model_of_that_class(kind):
    config = kind(tnt.models.CNN(), seed=4, frozen=["Conv_0"]).get_config()
    model = kind.from_config(config)
    assert type(model) is kind
    assert (model.options["seed"], list(model.options["frozen"])) == (4, ["Conv_0"])
    config["options"]["dict"].append(["variables", None])
    with pytest.raises(ValueError, match="A saved model has these arguments"):
        kind.from_config(config)


def test_a_saved_model_sums_as_before(tmp_path):
    model = tnt.Model(nn.Dense(3), seed=1, fusion_threshold=64, shard_optimizer_state=True)
    model.compile("adam", loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
    fit(model)
    model.save(tmp_path / "run")
    loaded = tnt.models.load_model(tmp_path / "run")
    assert loaded.options == model.options
    assert loaded._trainer.steps.reduction == model._trainer.steps.reduction
    assert loaded._trainer.steps.reduction.shard_optimizer_state
    assert (
        tnt.models.clone_model(tnt.Model(nn.Dense(3), reproducible=True, virtual_ranks=4)).options[
            "virtual_ranks"
        ]
        == 4
    )
    assert (
        fit(loaded, initial_epoch=2, epochs=3).history
        == fit(model, initial_epoch=2, epochs=3).history
    )


WRITER = """
    import sys, numpy as np, flax.linen as nn, tnt_jax as tnt
    model = tnt.Model(nn.Dense(512))
    model.build((None, 512))
    kernel = np.zeros((512, 512), np.float32)
    for number in range(10_000):
        model.set_weights([np.full(512, number, np.float32), np.full((512, 512), number, np.float32)])
        model.save_weights(sys.argv[1])
        print(number, flush=True)
"""


@pytest.mark.parametrize("name", ["run", "run.weights.h5", "run.safetensors"])
@pytest.mark.parametrize("wait_s", long_but_last(0.0, 0.007))
def test_a_crash_in_the_middle_of_a_save_leaves_the_previous_copy(tmp_path, name, wait_s):
    path = tmp_path / name
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), path], stdout=subprocess.PIPE, text=True
    )
    complete = -1
    for line in process.stdout:
        complete = int(line)
        if complete == 3:
            break
    time.sleep(wait_s)
    process.kill()
    process.wait()

    model = tnt.Model(nn.Dense(512))
    model.build((None, 512))
    model.load_weights(path)
    bias, kernel = model.get_weights()
    assert bias[0] >= complete
    np.testing.assert_array_equal(bias, np.full(512, bias[0], np.float32))
    np.testing.assert_array_equal(kernel, np.full((512, 512), bias[0], np.float32))


def test_variables_are_still_in_the_librarys_form():
    model = make_model()
    model.build((None, 4))
    assert set(model.variables) == {"params", "batch_stats"}
    assert isinstance(model._trainer.variables(), Variables)


def dense():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize(
    ("module", "num_steps", "compression"),
    [(Net, 4, None), (Net, None, "bfloat16"), (dense, 4, None)],
)
def test_what_ranks_have_accumulated_is_saved(
    use_ranks, tmp_path, module, num_steps, compression, name
):
    use_ranks(2)
    x, y = data()

    def make():
        model = tnt.Model(module(), gradient_compression=compression)
        optimizer = tnt.optimizers.SGD(0.05, gradient_accumulation_steps=num_steps)
        model.compile(optimizer, tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.build(x)
        return model

    model = make()
    model.fit(x, y, batch_size=8, epochs=2, verbose=0)  # 10 steps: 2 of 4 wait for the others.
    model.save_weights(tmp_path / name)
    model.fit(x, y, batch_size=8, initial_epoch=2, epochs=3, verbose=0)
    expected = model.get_weights()
    for other in (model, make()):
        other.load_weights(tmp_path / name)
        other.fit(x, y, batch_size=8, initial_epoch=2, epochs=3, verbose=0)
        assert_equal_weights(other.get_weights(), expected)


@pytest.mark.parametrize("name", ["m.safetensors", "m.weights.h5"])
def test_files_of_weights_do_not_take_a_whole_model(tmp_path, name):
    with pytest.raises(ValueError, match=r"unsupported file extension.*weights \(save_weights\)"):
        make_model().save(tmp_path / name)
