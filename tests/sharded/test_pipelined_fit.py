"""`fit`, `evaluate` and `predict` in a pipeline and with rematerialization, against one device."""

import jax
import numpy as np
import pytest

import tnt_jax as tnt
from tnt_jax import models
from tnt_jax.train.state_arrays import state_arrays

RNG = np.random.default_rng(0)
TOKENS = RNG.integers(0, 11, (22, 6))
TARGETS = (TOKENS + 1) % 11
TINY = {**models.DECODER_SIZES["tiny"], "vocab_size": 11}


def train(num_devices, **options):
    """Returns history, parameters, evaluation and predictions; the last batch of 8 has 6 rows."""
    tnt.shutdown()
    tnt.init(devices=range(num_devices))
    model = tnt.Model(models.Decoder(**TINY), **options)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=tnt.optimizers.SGD(0.05, momentum=0.9), loss=loss, metrics=["accuracy"])
    history = model.fit(TOKENS, TARGETS, batch_size=8, epochs=1, verbose=0, shuffle=False)
    evaluated = model.evaluate(TOKENS, TARGETS, batch_size=8, verbose=0, return_dict=True)
    predicted = model.predict(TOKENS[:9], batch_size=8, verbose=0)
    params = jax.tree.map(np.array, model.variables["params"])
    return history.history, params, evaluated, predicted


@pytest.fixture(scope="module")
def one_device():
    yield train(1)
    tnt.shutdown()


@pytest.mark.parametrize(
    ("num_devices", "options"),
    [
        # A rank has 4 rows of a batch, in 3 micro-batches of 2, and 3 of the last one.
        (4, {"mesh": {"data": 2, "stage": 2}, "remat": "full"}),
        pytest.param(8, {"mesh": {"data": 2, "stage": 4}}, marks=pytest.mark.long),
        pytest.param(4, {"mesh": {"stage": -1}, "remat": "dots"}, marks=pytest.mark.long),
        # Blocks that are rematerialized are compared with plain ones in test_remat.
        pytest.param(2, {"remat": "full", "pipeline": None}, marks=pytest.mark.long),
    ],
)
def test_training_equals_one_device(one_device, num_devices, options):
    options = {"pipeline": tnt.Pipeline("layers", microbatches=3), **options}
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        train(num_devices, **options),
        one_device,
    )


def test_each_stage_holds_its_layers_alone(use_ranks):
    use_ranks(4)
    pipeline = tnt.Pipeline("layers", microbatches=2)
    model = tnt.Model(models.Decoder(**TINY), mesh={"stage": 4}, pipeline=pipeline)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="adam", loss=loss)
    model.fit(TOKENS[:4], TARGETS[:4], batch_size=4, verbose=0)
    state = model._core.trainer.require_state()
    down = state.params["layers"]["feed_forward"]["down"]["kernel"]
    moments = [
        x
        for path, x in state_arrays(state.opt_state).items()
        if "layers/feed_forward/down/kernel" in path
    ]
    assert len(moments) == 2
    for x in (down, *moments):
        assert {shard.data.shape for shard in x.addressable_shards} == {(1, 64, 32)}
        assert len({shard.index[0].start for shard in x.addressable_shards}) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline": tnt.Pipeline("layers", microbatches=2)}, "needs a mesh with an axis 'stage'"),
        ({"mesh": {"stage": 4}}, "needs a pipeline: pipeline=tnt_jax.Pipeline"),
        (
            {
                "mesh": {"stage": 2, "fsdp": 2},
                "pipeline": tnt.Pipeline("layers", microbatches=2),
            },
            "with the axis 'data' alone, but mesh has fsdp 2 and tensor 1",
        ),
        ({"remat": "half"}, "remat must be 'none', 'dots' or 'full'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tnt.Model(models.Decoder(**TINY), **options)


@pytest.mark.parametrize(
    ("path", "stages", "message"),
    [
        ("layers", 3, r"of 3 devices: its first dimension, the layers, must be a multiple"),
        ("blocks", 4, "needs stacked layers of this path.*Parameters lie in embedding"),
    ],
)
def test_layers_that_cannot_be_divided_are_refused(use_ranks, path, stages, message):
    use_ranks(stages)
    pipeline = tnt.Pipeline(path, microbatches=2)
    model = tnt.Model(models.Decoder(**TINY), mesh={"stage": stages}, pipeline=pipeline)
    model.compile(optimizer="sgd", loss="mean_squared_error")
    with pytest.raises(ValueError, match=message):
        model.build(TOKENS[:6])


def test_on_nan_is_refused_in_a_pipeline(two_ranks):
    pipeline = tnt.Pipeline("layers", microbatches=2)
    model = tnt.Model(models.Decoder(**TINY), mesh={"stage": 2}, pipeline=pipeline)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="sgd", loss=loss, on_nan="skip")
    with pytest.raises(ValueError, match="cannot be combined with a pipeline"):
        model.fit(TOKENS, TARGETS, batch_size=8, verbose=0)


def test_a_pipeline_that_is_none_is_refused():
    with pytest.raises(TypeError, match=r"pipeline must be a tnt_jax\.Pipeline"):
        tnt.Model(models.Decoder(**TINY), mesh={"stage": 2}, pipeline="layers")
