"""A model in parts computes whole batches, which the compiler divides, where rows depend on one
another or are less than the parameters; results are those of one device.
"""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from batch_models import MODELS, compiled, make_rows, plain_evaluation, plain_loop
from flax import linen as nn
from flax import nnx
from long_params import long_but_last
from training import assert_close

import tnt_jax as tnt
from tnt_jax.sharded import ShardedGlobalSteps, ShardedSteps

MESHES = [{"data": 2, "fsdp": 2}, {"data": 2, "tensor": 2}, {"fsdp": 4}]


@pytest.fixture
def what_moves():
    """Leaves the choice to the library."""


def steps_of(model):
    return type(model._core.trainer.steps)


# Those whose variables differ in kind; all are in `tests/train/test_global_step.py`, without a mesh.
MESH_OF = {"clip": MESHES[0], "experts": MESHES[1], "own norm": MESHES[0]}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=() if mesh == MESH_OF.get(name) else pytest.mark.long)
        for name in MODELS
        for mesh in MESHES
    ],
    ids=str,
)
def test_models_that_compare_rows_equal_a_plain_loop(name, mesh, use_ranks):
    use_ranks(4)
    # A remainder of the examples, and batches that not all devices can share.
    x, y = make_rows(22)
    model, _ = compiled(name, model_options={"mesh": mesh})
    history = model.fit(x, y, batch_size=9, epochs=2, shuffle=False, verbose=0).history
    losses, expected = plain_loop(name, 22, 9)
    assert steps_of(model) is ShardedGlobalSteps
    assert_close(history["loss"], losses)
    assert_close(model.variables, expected)
    loss, outputs = plain_evaluation(name, expected, x, y, 22)
    assert_close(model.evaluate(x, y, batch_size=22, verbose=0), loss)
    assert_close(model.predict(x, batch_size=22, verbose=0), outputs)


WIDTH = 64


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dropout(0.3, deterministic=not train)(nn.relu(nn.Dense(WIDTH)(x)))
        return nn.Dense(WIDTH)(nn.BatchNorm(use_running_average=not train)(x))


def make_nnx():
    rngs = nnx.Rngs(0, dropout=1)
    layers = nnx.Linear(WIDTH, WIDTH, rngs=rngs), nnx.Linear(WIDTH, WIDTH, rngs=rngs)
    return nnx.Sequential(layers[0], nnx.relu, nnx.Dropout(0.3, rngs=rngs), layers[1])


def make_keras():
    keras = pytest.importorskip("keras")
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(WIDTH, "relu"), keras.layers.BatchNormalization()]
    return keras.Sequential([keras.Input((WIDTH,)), *layers, keras.layers.Dense(WIDTH)])


def make_data(num_rows=16):
    x = np.random.default_rng(0).normal(size=(num_rows, WIDTH)).astype(np.float32)
    return x, np.roll(x, 1, axis=1)


def fit(
    make, mesh=None, *, optimizer=None, batch_size=8, rows=16, epochs=2, callbacks=None, **more
):
    tnt.shutdown()
    tnt.init(devices=range(math.prod((mesh or {}).values())))
    x, y = make_data(rows)
    model = tnt.Model(make(), seed=0, **({"mesh": mesh} if mesh else {}))
    model.compile(optimizer or optax.sgd(0.1, momentum=0.9), "mse", metrics=["mae"], **more)
    history = model.fit(
        x, y, batch_size=batch_size, epochs=epochs, shuffle=False, verbose=0,
        validation_data=(x[:5], y[:5]), callbacks=callbacks,
    ).history  # fmt: skip
    return model, (history, model.get_weights(), model.predict(x, batch_size=8, verbose=0))


@cache
def fit_on_one_device(make):
    """Returns what every mesh must give."""
    return fit(make)[1]


@pytest.mark.parametrize("mesh", long_but_last({"fsdp": 4}, {"data": 2, "fsdp": 2}), ids=str)
@pytest.mark.parametrize("make", [Linen, make_nnx, make_keras])
def test_small_batches_move_and_results_are_those_of_one_device(make, mesh):
    model, found = fit(make, mesh)
    assert steps_of(model) is ShardedGlobalSteps
    assert_close(found, fit_on_one_device(make), 2e-5)
    for tree in (model.state.params, model.state.opt_state):
        matrices = [x for x in jax.tree.leaves(tree) if np.ndim(x) == 2]
        assert matrices
        for x in matrices:
            assert x.nbytes == mesh["fsdp"] * x.addressable_shards[0].data.nbytes


@pytest.mark.parametrize(
    "more",
    long_but_last(
        {"steps_per_execution": 2},
        {"on_nan": "skip"},
        {"optimizer": tnt.optimizers.SGD(0.1, gradient_accumulation_steps=2)},
    ),
    ids=lambda more: next(iter(more)),
)
def test_options_of_compile_change_nothing(more):
    _, expected = fit(Linen, **more)
    model, found = fit(Linen, {"fsdp": 4}, **more)
    assert steps_of(model) is ShardedGlobalSteps
    assert_close(found, expected, 2e-5)


def test_large_batches_stay_and_parameters_move():
    model, found = fit(make_nnx, {"fsdp": 4}, batch_size=256, rows=512)
    assert steps_of(model) is ShardedSteps
    assert_close(found, fit(make_nnx, batch_size=256, rows=512)[1], 2e-5)


def test_half_precision_gathers_parameters_and_sums_gradients_in_float32(use_ranks):
    use_ranks(4)
    model = tnt.Model(make_nnx(), mesh={"fsdp": 4}, precision="mixed_bfloat16")
    model.compile(optax.sgd(0.1), "mse")
    model.fit(*make_data(), batch_size=8, verbose=0)
    assert steps_of(model) is ShardedSteps


def contrastive(params, batch, rngs, apply):
    """Compares the rows of all ranks, which it gathers itself."""
    z = apply(params, batch.inputs)
    every = jax.lax.all_gather(z, "data", axis=0, tiled=True)
    own = jax.lax.axis_index("data") * len(z) + jnp.arange(len(z))
    return optax.softmax_cross_entropy_with_integer_labels(z @ every.T, own)


@cache
def contrastive_losses(**mesh):
    """Returns the losses and the steps of two fits, each after `compile`."""
    tnt.shutdown()
    tnt.init(devices=range(math.prod(mesh.values())))
    model = tnt.Model(nn.Dense(WIDTH), mesh=mesh)
    losses, steps = [], []
    for _ in range(2):
        model.compile(optax.sgd(0.1), objective=contrastive)
        fitted = model.fit(make_data()[0], batch_size=8, shuffle=False, verbose=0)
        losses.append(fitted.history["loss"])
        steps.append(steps_of(model))
    return losses, steps


@pytest.mark.parametrize("mesh", [{"fsdp": 4}, {"data": 2, "fsdp": 2}, {"tensor": 4}], ids=str)
def test_an_objective_may_name_the_axis_of_the_rows_however_often_it_is_compiled(mesh):
    losses, steps = contrastive_losses(**mesh)
    assert steps == 2 * [ShardedSteps if "tensor" in mesh else ShardedGlobalSteps]
    assert_close(losses, contrastive_losses(data=1)[0])


def test_training_is_resumed_on_another_mesh(tmp_path):
    def saving():
        return [tnt.callbacks.BackupAndRestore(str(tmp_path), delete_checkpoint=False)]

    fit(make_nnx, {"fsdp": 4}, epochs=1, callbacks=saving())
    model, found = fit(make_nnx, {"fsdp": 2}, callbacks=saving())
    assert steps_of(model) is ShardedGlobalSteps
    assert_close(found[1:], fit_on_one_device(make_nnx)[1:], 2e-5)


def test_the_choice_is_told(capsys, monkeypatch):
    monkeypatch.setenv("TNT_LOG_LEVEL", "INFO")
    model, _ = fit(make_nnx, {"fsdp": 4})
    said = "The products of a global batch (0.00391 MiB) are smaller than the sharded parameters"
    assert said in capsys.readouterr().err
    assert said in str(model.describe_collectives(*make_data(), 8))


def test_a_pipeline_is_refused_with_the_reason(use_ranks):
    use_ranks(4)
    x, y = make_data(16)

    class Blocks(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            for number in range(2):
                x = nn.Dense(WIDTH, name=f"blocks_{number}")(x)
            return x - x.mean(0)

    pipeline = tnt.Pipeline("blocks", microbatches=2)
    model = tnt.Model(Blocks(), mesh={"data": 2, "stage": 2}, pipeline=pipeline)
    model.compile(optax.sgd(0.1), "mse")
    with pytest.raises(ValueError, match=r"compares rows of a batch.*A pipeline computes parts"):
        model.fit(x, y, batch_size=16, verbose=0)
