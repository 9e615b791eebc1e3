"""Pipelines over blocks of a list, against the same models on one device."""

import math

import jax
import numpy as np
import pytest
from listed_models import WIDE_RULES, OfLinen, OfNnx, OfWideBlocks, of_keras
from sharded_kinds import CLASSES, KINDS
from training import assert_close

import tnt_jax as tnt
from tnt_jax import models
from tnt_jax.train.state import state_arrays

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 11, (14, 6))
TARGETS = (TOKENS + 1) % 11

MAKE = {"linen": OfLinen, "nnx": OfNnx, "keras": of_keras, "wide": OfWideBlocks}
PATHS = {"linen": "layers", "nnx": "layers", "keras": "block", "wide": "layers"}


def momentum():
    return tnt.optimizers.SGD(0.01, momentum=0.9)


def made(kind, rate, num_devices, mesh=None, **pipeline):
    tnt.shutdown()
    tnt.init(devices=range(num_devices))
    options = {}
    if mesh is not None:
        options = {"mesh": mesh, "pipeline": tnt.Pipeline(PATHS[kind], **pipeline)}
    if "tensor" in (mesh or {}):
        options["sharding_rules"] = WIDE_RULES
    return tnt.Model(MAKE[kind](rate), seed=0, **options)


def train(kind, num_devices, mesh=None, *, rate=0.0, optimizer=momentum, model=None, **pipeline):
    """Returns history, weights, evaluation and predictions, of batches of 7 rows."""
    if model is None:
        model = made(kind, rate, num_devices, mesh, **pipeline)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer(), loss=loss, metrics=["accuracy"])
    history = model.fit(TOKENS, TARGETS, batch_size=7, epochs=1, verbose=0, shuffle=False)
    evaluated = model.evaluate(TOKENS, TARGETS, batch_size=7, verbose=0, return_dict=True)
    predicted = model.predict(TOKENS, batch_size=7, verbose=0)
    return history.history, list(map(np.asarray, model.get_weights())), evaluated, predicted


@pytest.fixture(scope="module")
def one_device():
    known = {}

    def trained(kind, rate):
        if (kind, rate) not in known:
            known[kind, rate] = train(kind, 1, rate=rate)
        return known[kind, rate]

    yield trained
    tnt.shutdown()


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("kind", "mesh", "schedule", "rate"),
    [
        # One rank has 7 rows, in micro-batches of 3, and each of two has 4, one of them padded.
        long("nnx", {"data": 2, "stage": 2}, "1f1b", 0.3),
        long("linen", {"data": 2, "stage": 2}, "1f1b", 0.3),
        long("linen", {"stage": 2}, "1f1b", 0.3),
        ("wide", {"stage": 2}, "1f1b", 0.3),
        long("linen", {"data": 2, "stage": 4}, "gpipe", 0.3),
        long("linen", {"stage": 2}, "gpipe", 0.0),
        long("wide", {"data": 2, "stage": 2, "fsdp": 2}, "1f1b", 0.3),
        long("wide", {"stage": 2, "fsdp": 2}, "gpipe", 0.3),
        long("wide", {"data": 2, "stage": 2, "tensor": 2}, "gpipe", 0.0),
        long("wide", {"stage": 2, "fsdp": 2, "tensor": 2}, "1f1b", 0.3),
        long("nnx", {"stage": 2}, "gpipe", 0.3),
        long("nnx", {"data": 2, "stage": 4}, "1f1b", 0.3),
        long("nnx", {"data": 2, "stage": 2}, "gpipe", 0.0),
        long("keras", {"data": 2, "stage": 2}, "gpipe", 0.3),
        long("keras", {"data": 2, "stage": 4}, "1f1b", 0.0),
        long("keras", {"stage": 2}, "gpipe", 0.0),
    ],
)
def test_training_equals_one_device(one_device, kind, mesh, schedule, rate):
    num_devices = math.prod(mesh.values())
    pipeline = {"microbatches": 3, "schedule": schedule}
    assert_close(train(kind, num_devices, mesh, rate=rate, **pipeline), one_device(kind, rate))


@pytest.mark.long  # A larger model; its blocks get what other parameters compute beside activations.
@pytest.mark.parametrize(("path", "schedule"), [("encoder", "gpipe"), ("decoder", "1f1b")])
def test_either_list_of_a_transformer_equals_one_device(path, schedule):
    kind = KINDS["transformer"]
    x, y = kind.data(np.random.default_rng(0))

    def run(num_devices, **options):
        tnt.shutdown()
        tnt.init(devices=range(num_devices))
        sizes = {"vocab_size": CLASSES, "width": 16, "num_heads": 2, "filter_dim": 64}
        model = tnt.Model(models.Transformer(**sizes, num_layers=2), seed=0, **options)
        loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(momentum(), loss=loss)
        history = model.fit(x, y, batch_size=8, epochs=1, verbose=0).history
        return history, model.get_weights()

    pipeline = tnt.Pipeline(path, microbatches=2, schedule=schedule)
    mesh = {"data": 2, "stage": 2}
    assert_close(run(4, mesh=mesh, pipeline=pipeline, remat={f"{path}_*": "full"}), run(1))


@pytest.mark.long  # Four programs; that parts lie as the layout says is tested beside.
def test_training_goes_on_on_another_mesh_and_without_one(tmp_path):
    def epochs(number, mesh, directory=tmp_path):
        model = made("linen", 0.3, 8 if mesh else 1, mesh, microbatches=2)
        loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(tnt.optimizers.Adam(1e-3), loss=loss)
        history = model.fit(
            TOKENS, TARGETS, batch_size=8, epochs=number, verbose=0, resume=directory
        )
        return history.history, model.get_weights()

    epochs(1, {"data": 4, "stage": 2})
    epochs(2, {"data": 2, "stage": 4})
    expected = epochs(3, None, tmp_path / "whole")
    assert_close(epochs(3, None), expected)


@pytest.mark.long  # Where arrays lie is tested in test_layout, and for stacked layers in fit.
@pytest.mark.parametrize("kind", ["linen", "nnx", "keras"])
def test_each_stage_keeps_its_part_of_the_state(kind):
    model = made(kind, 0.0, 4, {"stage": 4}, microbatches=2)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss=loss)
    model.train_on_batch(TOKENS[:8], TARGETS[:8])
    state = model.state
    leaves = [
        x
        for path, x in state_arrays((state.params, state.opt_state)).items()
        if f"{PATHS[kind]}" in path.lower()
    ]
    whole = sum(x.nbytes for x in leaves)
    assert len(leaves) > 3 * 4 * 2
    for device in jax.devices()[:4]:
        held = sum(
            shard.data.nbytes
            for x in leaves
            for shard in x.addressable_shards
            if shard.device == device
        )
        assert math.isclose(held, whole / 4, rel_tol=0.05)
