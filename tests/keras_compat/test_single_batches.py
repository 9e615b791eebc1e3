"""Loops of a user's own beside Keras: train_on_batch and its kin, and what a model and its
optimizer show.
"""

import json
import runpy

import flax.linen as nn
import jax
import keras
import numpy as np
import optax
import pytest
from flax import nnx
from keras_beside import (
    Net,
    Recorder,
    by_dense,
    compile_linen,
    data,
    fit,
    keras_model,
    linen_model,
    skip_on_oldest_keras,
)
from long_params import long_but_last
from processes import SCRIPTS, launch

import tnt_jax as tnt
from tnt_jax import callbacks


def batches(sizes=(8, 8, 5, 3)):
    x, y = data(sum(sizes))
    ends = np.cumsum(sizes)
    return [
        (x[end - size : end], y[end - size : end]) for size, end in zip(sizes, ends, strict=True)
    ]


def close(mine, theirs):
    np.testing.assert_allclose(
        np.asarray(mine, float), np.asarray(theirs, float), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("num_ranks", long_but_last(1, 4))
def test_single_batches_give_the_numbers_of_keras(num_ranks, use_ranks):
    skip_on_oldest_keras("gives another loss with class_weight in train_on_batch")
    use_ranks(num_ranks)
    theirs = keras_model()
    model = linen_model(theirs)
    model.build((None, 4))
    weights = np.linspace(0.5, 2, 8)
    first, second, third, small = batches()
    for step in (
        lambda m: m.train_on_batch(*first),
        lambda m: m.train_on_batch(*second, sample_weight=weights),
        lambda m: m.test_on_batch(*third),
        lambda m: (
            m.reset_metrics() or m.train_on_batch(*third, class_weight={0: 1.0, 1: 3.0, 2: 0.5})
        ),
        lambda m: [
            value for _, value in sorted(m.train_on_batch(*small, return_dict=True).items())
        ],
        lambda m: [value for _, value in sorted(m.get_metrics_result().items())],
        lambda m: m.predict_on_batch(small[0]),
        lambda m: m(first[0]),
        lambda m: m.evaluate(*second, verbose=0),
        lambda m: m.test_on_batch(*first),
        lambda m: m.optimizer.iterations,
    ):
        close(step(model), step(theirs))
    assert set(model.train_on_batch(*first, return_dict=True)) == set(
        theirs.train_on_batch(*first, return_dict=True)
    )
    for mine, expected in zip(model.get_weights(), by_dense(theirs.get_weights()), strict=True):
        close(mine, expected)


def test_training_on_batches_equals_fit():
    model, other = (linen_model(keras_model()) for _ in range(2))
    x, y = data()
    for start in range(0, 40, 8):
        model.train_on_batch(x[start : start + 8], y[start : start + 8])
    fit(other, None, epochs=1)
    for mine, theirs in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_a_loop_of_ones_own_calls_the_hooks_that_fit_calls():
    x, y = data()
    seen = []
    for own in (True, False):
        model, recorder = linen_model(keras_model()), Recorder()
        if not own:
            fit(model, [recorder], epochs=2, validation_data=None)
        else:
            hooks = callbacks.CallbackList(
                [recorder], add_history=True, model=model, epochs=2, steps=5
            )
            hooks.on_train_begin()
            for epoch in range(2):
                hooks.on_epoch_begin(epoch)
                for step, start in enumerate(range(0, 40, 8)):
                    hooks.on_train_batch_begin(step)
                    hooks.on_train_batch_end(
                        step,
                        model.train_on_batch(
                            x[start : start + 8], y[start : start + 8], return_dict=True
                        ),
                    )
                hooks.on_epoch_end(epoch, {"loss": 1.0})
            hooks.on_train_end()
        seen.append([call[:-1] for call in recorder.calls])
        assert (model.history.epoch, len(model.history.history["loss"])) == ([0, 1], 2)
    assert seen[0] == seen[1]
    with pytest.raises(AttributeError, match="CallbackList has no attribute 'on_monday'"):
        hooks.on_monday()


def test_a_loss_alone_is_one_number_and_compile_begins_anew():
    model = tnt.Model(Net())
    x, y = data(8)
    for _ in range(2):
        model.compile("sgd", loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
        assert isinstance(model.train_on_batch(x, y), float)
        assert model.optimizer.iterations == 1


def test_what_is_trained_on_batches_is_in_the_wrapped_object():
    net = nnx.Linear(4, 3, rngs=nnx.Rngs(0))
    model = tnt.Model(net)
    compile_linen(model)
    before = np.array(net.kernel[...])
    model.train_on_batch(*data(8))
    np.testing.assert_array_equal(net.kernel[...], model.weights_by_path()["kernel"])
    assert not np.array_equal(before, net.kernel[...])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.train_on_batch(iter([])), ValueError, r"A single batch must be an array, or "
                                                           r"a list or dict of arrays, but x is a "),
        (lambda m: m(np.ones((2, 4)), training=True), ValueError, r"training=True\) is not possible"),
        (lambda m: jax.jit(m)(np.ones((2, 4))), TypeError, r"distributes its rows by itself and "
                                                           r"cannot be traced"),
        (lambda m: m.view(Net()).train_on_batch(*data(8)), RuntimeError, "must be compiled first"),
        (lambda m: tnt.Model(Net()).train_on_batch(*data(8)), RuntimeError, "must be compiled first"),
        (lambda m: m.get_layer(), ValueError, "takes a name or an index"),
        (lambda m: m.get_layer("Dense_7"), ValueError, "There is no layer 'Dense_7': the layers "
                                                       "with weights are Dense_0, Dense_1"),
        (lambda m: m.get_layer(index=2), ValueError, "There is no layer number 2"),
        (lambda m: m.weights[0].assign(np.ones(3)), ValueError, r"Dense_0/bias has the shape \(8,\), but was assigned one of \(3,\)"),
        (lambda m: setattr(m.optimizer, "momentum", 0.5), AttributeError, "momentum is part of the compiled step"),
        (lambda m: m.compile(None, "mse"), ValueError, "compile.. needs an optimizer"),
    ],
)  # fmt: skip
def test_mistakes_are_said(call, error, message):
    model = tnt.Model(Net())
    compile_linen(model)
    model.build((None, 4))
    with pytest.raises(error, match=message):
        call(model)


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(3, name="head")(nn.BatchNorm(use_running_average=not train)(nn.Dense(5)(x)))


def test_weights_are_variables_that_can_be_assigned():
    model = tnt.Model(Normed())
    compile_linen(model)
    model.build((None, 4))
    paths = [variable.path for variable in model.weights]
    assert paths == [
        *(v.path for v in model.trainable_weights),
        *(v.path for v in model.non_trainable_weights),
    ]
    assert [v.path for v in model.non_trainable_variables] == [
        "batch_stats/BatchNorm_0/mean",
        "batch_stats/BatchNorm_0/var",
    ]
    assert [v.shape for v in model.weights] == [w.shape for w in model.get_weights()]
    assert model.count_params() == sum(w.size for w in model.get_weights())
    mean = model.non_trainable_weights[0]
    mean.assign(np.full(5, 2.0))
    kernel = next(v for v in model.trainable_variables if v.path == "Dense_0/kernel")
    kernel.assign(kernel.numpy() * 0)
    np.testing.assert_array_equal(model.get_weights()[paths.index("Dense_0/kernel")], 0)
    np.testing.assert_array_equal(np.asarray(mean), 2.0)
    assert (kernel.name, kernel.trainable, kernel.dtype, mean.trainable) == (
        "kernel",
        True,
        np.float32,
        False,
    )
    assert [layer.name for layer in model.layers] == [
        model.get_layer(index=i).name for i in range(len(model.layers))
    ]
    assert [w.shape for w in model.get_layer("Dense_0").get_weights()] == [(5,), (4, 5)]


def test_an_assigned_weight_of_a_keras_model_is_in_it():
    theirs = keras_model()
    model = tnt.Model(theirs)
    model.build((None, 4))
    for mine, expected in zip(model.weights, theirs.weights, strict=True):
        assert (mine.path, mine.shape, mine.trainable) == (
            expected.path,
            tuple(expected.shape),
            expected.trainable,
        )
    model.weights[0].assign(np.ones((4, 8)))
    np.testing.assert_array_equal(theirs.weights[0].numpy(), 1)


def test_the_optimizer_shows_its_settings_and_arrays():
    model = tnt.Model(Net())
    model.compile(
        tnt.optimizers.Adam(0.05, beta_1=0.8, clipnorm=0.5),
        loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    assert (model.compiled, model.optimizer.variables) == (True, [])
    model.train_on_batch(*data(8))
    optimizer = model.optimizer
    assert (optimizer.beta_1, optimizer.clipnorm, optimizer.weight_decay, optimizer.iterations) == (
        0.8,
        0.5,
        None,
        1,
    )
    optimizer.learning_rate = 0.25
    assert (optimizer.get_config()["learning_rate"], optimizer.get_config()["beta_1"]) == (
        0.25,
        0.8,
    )
    by_path = {variable.path: variable for variable in optimizer.variables}
    assert int(by_path["iteration"].numpy()) == 1
    moments = [
        variable for path, variable in by_path.items() if path.endswith("Dense_0/kernel/velocity")
    ]
    assert [m.shape for m in moments] == [(4, 8)]
    assert float(moments[0].numpy().max()) > 0


def test_compile_goes_there_and_back():
    model, other = tnt.Model(Net(), seed=1), tnt.Model(Net(), seed=1)
    assert model.get_compile_config() == {}
    model.compile(
        tnt.optimizers.SGD(tnt.schedules.CosineDecay(0.2, 10), momentum=0.5),
        loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy", tnt.metrics.SparseTopKCategoricalAccuracy(k=2)],
    )
    other.compile_from_config(json.loads(json.dumps(model.get_compile_config())))
    assert fit(model, None, epochs=2).history == fit(other, None, epochs=2).history


def test_the_optimizer_of_keras_and_of_optax_show_what_they_know():
    x, y = data(8)
    wrapped, plain = tnt.Model(keras_model()), tnt.Model(Net())
    wrapped.compile(
        keras.optimizers.Adam(0.5, beta_1=0.75),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    wrapped.train_on_batch(x, y)
    wrapped.optimizer.learning_rate = 0.25
    assert (wrapped.optimizer.beta_1, wrapped.optimizer.get_config()["learning_rate"]) == (
        0.75,
        0.25,
    )
    assert wrapped.get_compile_config()["optimizer"]["config"]["beta_1"] == 0.75
    plain.compile(optax.adam(0.1), loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
    for read in (lambda: plain.optimizer.get_config(), plain.get_compile_config):
        with pytest.raises(TypeError, match="An Optax transformation has no configuration"):
            read()


# What Keras's model offers and ours does not, and why.
_LAYER = "belongs to a layer of Keras: look at `model.module`"
_STEP = (
    "a step is one compiled program: pass compile(objective=...), or write a loop on train_on_batch"
)
LEFT_OUT = {
    _LAYER: """add_loss add_metric add_variable add_weight build_from_config call compute_dtype compute_mask compute_output_shape
        compute_output_spec dtype dtype_policy get_build_config input input_dtype input_spec losses output path supports_masking
        symbolic_call variable_dtype export get_quantization_layer_structure quantization_mode quantize quantized_build
        quantized_call rematerialized_call load_own_variables save_own_variables stateless_call""",
    _STEP: """compute_loss compute_loss_and_updates compute_metrics predict_step test_step train_step make_predict_function
        make_test_function make_train_function stateless_compute_loss jit_compile run_eagerly jax_state_sync metrics_variables""",
    "`state`, `set_state` and `tnt_jax.train.checkpoints.checkpoint` hold the whole state": "get_state_tree set_state_tree",
}


def test_every_public_name_of_a_keras_model_is_ours_or_left_out():
    public = {name for name in dir(keras.Model) if not name.startswith("_")}
    missing = {name for name in public if not hasattr(tnt.Model, name)}
    left_out = {name for names in LEFT_OUT.values() for name in names.split()}
    assert missing == left_out & public, missing ^ (left_out & public)


@pytest.mark.multiprocess
@pytest.mark.long
def test_every_process_gets_the_numbers_of_one(tmp_path):
    result = launch(2, SCRIPTS / "train_single_batches.py", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    expected = runpy.run_path(str(SCRIPTS / "train_single_batches.py"))["run"]()
    for form in ("whole", "sharded"):
        for process in range(2):
            found = dict(np.load(tmp_path / f"{form}{process}.npz"))
            assert set(found) == set(expected)
            for name, value in found.items():
                np.testing.assert_allclose(
                    value, expected[name], rtol=1e-5, atol=1e-6, err_msg=f"{form} {name}"
                )
