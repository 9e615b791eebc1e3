"""`mesh="auto"` takes the smallest sharding that fits, by what the compiler states for each mesh."""

import logging

import numpy as np
import pytest
from flax import linen as nn
from training import assert_close, crossentropy

import tnt_jax as tnt
from tnt_jax import _jax
from tnt_jax.distributed.sums.hlo import in_units
from tnt_jax.sharded import ShardedSteps, planning
from tnt_jax.train.contracts import Batch

ROWS, WIDTH = 16, 64


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dropout(0.3, deterministic=not train)(nn.relu(nn.Dense(512)(x)))
        return nn.Dense(8)(nn.relu(nn.Dense(512)(x)))


def data():
    rng = np.random.default_rng(0)
    return rng.normal(size=(ROWS, WIDTH)).astype(np.float32), np.arange(ROWS) % 8


def start(use_ranks, monkeypatch, limit):
    """Begins a job of four devices of so many bytes."""
    monkeypatch.setenv("TNT_DEVICE_MEMORY", f"{limit}B")
    use_ranks(4)
    monkeypatch.setattr(logging.getLogger("tnt_jax"), "propagate", True)


def make_model(optimizer="adam", **options):
    model = tnt.Model(Net(), seed=0, **options)
    model.compile(optimizer, loss=crossentropy(), metrics=["accuracy"])
    return model


def train(model, **arguments):
    x, y = data()
    options = {"batch_size": 8, "epochs": 2, "verbose": 0, **arguments}
    return model.fit(x, y, **options).history


def needed_by(use_ranks, mesh):
    """Returns what the compiler states for a step on a mesh that a user gives."""
    use_ranks(4)
    model = make_model(mesh=mesh)
    x, y = data()
    model.train_on_batch(x[:8], y[:8])
    trainer = model._core.trainer
    lowered = trainer.lower_train_step(Batch(x[:8], y[:8]))
    return _jax.ProgramMemory.of(lowered.compile()).most_bytes(0)


@pytest.fixture(scope="module")
def one_device():
    tnt.shutdown()
    tnt.init(devices=[0])
    model = make_model()
    history = train(model)
    weights = model.get_weights()
    tnt.shutdown()
    return history, weights


@pytest.mark.parametrize(
    "parts", [pytest.param(1, marks=pytest.mark.long), 2, pytest.param(4, marks=pytest.mark.long)]
)
def test_the_smallest_sharding_that_fits_is_taken(
    use_ranks, monkeypatch, caplog, one_device, parts
):
    mesh = {"data": 4 // parts, "fsdp": parts}
    limit = needed_by(use_ranks, mesh if parts > 1 else None)
    start(use_ranks, monkeypatch, limit)
    model = make_model(mesh="auto")
    with caplog.at_level(logging.INFO, "tnt_jax"):
        history = train(model)
    kernel = model.state.params["Dense_2"]["kernel"]
    assert kernel.addressable_shards[0].data.size == kernel.size // parts
    said = [record.message for record in caplog.records if 'mesh="auto"' in record.message]
    assert len(said) == 1
    assert f"of {in_units(limit)} a device" in said[0]
    assert said[0].count("data 4") == 1
    assert ("too much: data 4 needs" in said[0]) == (parts > 1)
    assert_close(history, one_device[0])
    assert_close(model.get_weights(), one_device[1])


def test_the_step_stays_the_one_that_was_measured(use_ranks, monkeypatch):
    start(use_ranks, monkeypatch, needed_by(use_ranks, {"data": 2, "fsdp": 2}))
    monkeypatch.setattr(ShardedSteps, "why_rows_move", lambda *args: "Rows move")
    model = make_model(mesh="auto")
    train(model)
    assert type(model._core.trainer.steps) is ShardedSteps


@pytest.mark.long  # Three programs.
def test_a_choice_keeps_what_training_had_before(use_ranks, monkeypatch):
    start(use_ranks, monkeypatch, 10**9)
    optimizer = tnt.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    model = make_model(optimizer, mesh="auto")
    x, y = data()
    model.build(x[:1])
    before = model.get_weights()
    # Parts over all devices, until training says what it needs.
    kernel = model.state.params["Dense_2"]["kernel"]
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(512, 128)}
    evaluated = model.evaluate(x, y, batch_size=8, verbose=0)
    view = model.view(model.module)
    weights = [2 * w for w in before]
    model.set_weights(weights)
    predicted = model.predict(x, verbose=0)
    history = train(model, epochs=1)
    assert model.state.params["Dense_2"]["kernel"].is_fully_replicated

    use_ranks(1)
    optimizer = tnt.optimizers.Adam(0.01, gradient_accumulation_steps=2)
    whole = make_model(optimizer)
    whole.build(x[:1])
    assert_close(whole.get_weights(), before)
    assert_close(whole.evaluate(x, y, batch_size=8, verbose=0), evaluated)
    whole.set_weights(weights)
    assert_close(whole.predict(x, verbose=0), predicted)
    assert_close(train(whole, epochs=1), history)
    assert_close(model.get_weights(), whole.get_weights())
    assert_close(view.predict(x, verbose=0), whole.predict(x, verbose=0))


def test_a_step_that_fits_nowhere_is_refused(use_ranks, monkeypatch):
    start(use_ranks, monkeypatch, 2 * 10**6)
    with pytest.raises(ValueError, match=r"found no way .* fits the 1\.9 MiB of a device") as error:
        train(make_model(mesh="auto"))
    text = str(error.value)
    # Parameters and both moments of Adam: 12 bytes for each of 300,040.
    assert "data 4 (state and batches alone) needs about 3.4 MiB; data 2, fsdp 2 needs" in text
    assert "; fsdp 4 needs" in text
    assert "Use more devices, a smaller global batch, remat='full'" in text


def test_meshes_are_looked_at_from_the_least_sharding_on():
    found = planning.candidates(12)
    assert [axes.fsdp for axes in found] == [1, 2, 3, 4, 6, 12]
    assert all(axes.data * axes.fsdp == 12 for axes in found)


def test_a_pipeline_needs_a_mesh_that_is_given():
    with pytest.raises(ValueError, match=r"not stages of a pipeline\. Give the mesh"):
        tnt.Model(Net(), mesh="auto", pipeline=tnt.Pipeline("layers", microbatches=2))
