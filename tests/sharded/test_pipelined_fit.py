"""`fit`, `evaluate` and `predict` in a pipeline and with rematerialization, against one device."""

import jax
import numpy as np
import pytest
from flax import linen as nn

import tnt_jax as tnt
from tnt_jax import _jax, models
from tnt_jax.train.contracts import Batch
from tnt_jax.train.state import state_arrays

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


GPIPE, BY_TURNS = (
    tnt.Pipeline("layers", microbatches=3, schedule=schedule) for schedule in ("gpipe", "1f1b")
)
# Megatron's cuts; the first dimension is that of the layers.
RULES = [
    ("layers/attention/output/kernel", (None, "tensor", None, None)),
    ("layers/attention/*/kernel", (None, None, "tensor", None)),
    ("layers/feed_forward/down/kernel", (None, "tensor", None)),
    ("layers/feed_forward/*/kernel", (None, None, "tensor")),
]


def long(*values):
    return pytest.param(*values, marks=pytest.mark.long)


@pytest.mark.parametrize(
    ("num_devices", "options"),
    [
        # A rank has 4 rows of a batch, in 3 micro-batches of 2, and 3 of the last one.
        long(4, {"mesh": {"data": 2, "stage": 2}, "remat": "full", "pipeline": GPIPE}),
        long(8, {"mesh": {"data": 2, "stage": 2, "fsdp": 2}, "pipeline": BY_TURNS}),
        long(8, {"mesh": {"data": 2, "stage": 4}, "pipeline": GPIPE}),
        long(4, {"mesh": {"stage": -1}, "remat": "dots", "pipeline": GPIPE}),
        long(8, {"mesh": {"data": 2, "stage": 4}, "pipeline": BY_TURNS}),
        long(4, {"mesh": {"stage": 4}, "remat": "full", "pipeline": BY_TURNS}),
        long(8, {"mesh": {"data": 2, "stage": 2, "fsdp": 2}, "pipeline": GPIPE}),
        long(4, {"mesh": {"stage": 2, "fsdp": 2}, "remat": "full", "pipeline": BY_TURNS}),
        long(
            8,
            {
                "mesh": {"data": 2, "stage": 2, "tensor": 2},
                "sharding_rules": RULES,
                "pipeline": GPIPE,
            },
        ),
        long(
            8,
            {
                "mesh": {"stage": 2, "fsdp": 2, "tensor": 2},
                "sharding_rules": RULES,
                "pipeline": BY_TURNS,
            },
        ),
        # Blocks that are rematerialized are compared with plain ones in test_remat.
        long(2, {"remat": "full"}),
    ],
)
def test_training_equals_one_device(one_device, num_devices, options):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        train(num_devices, **options),
        one_device,
    )


@pytest.mark.long  # test_listed_blocks has the state of lists.
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
        (
            {"mesh": {"data": 2}, "pipeline": tnt.Pipeline("no/such", microbatches=2)},
            r"over the axis 'stage', which mesh=\{'data': 2\} lacks. Add it",
        ),
        ({"mesh": {"stage": 4}}, "needs a pipeline: pipeline=tnt_jax.Pipeline"),
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
        ("blocks", 1, "needs stacked layers of this path.*Parameters lie in embedding"),
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


def lowered_step(schedule, num_micro_batches):
    """Returns a step on four stages, with rows of which activations take more than parameters."""
    sizes = {**TINY, "num_layers": 8}
    pipeline = tnt.Pipeline("layers", microbatches=num_micro_batches, schedule=schedule)
    model = tnt.Model(models.Decoder(**sizes), mesh={"stage": 4}, pipeline=pipeline)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="sgd", loss=loss)
    tokens = RNG.integers(0, 11, (32, 64))
    model.train_on_batch(tokens, tokens)
    return model._core.trainer.lower_train_step(Batch(tokens, tokens))


@pytest.mark.long
def test_1f1b_needs_less_memory_than_gpipe(use_ranks):
    use_ranks(4)
    by_turns, gpipe = (
        _jax.ProgramMemory.of(lowered_step(s, 16).compile()).most_bytes(0)
        for s in ("1f1b", "gpipe")
    )
    assert by_turns < 0.5 * gpipe


class TwoHeads(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = models.Decoder(**TINY, name="decoder")(tokens)
        return {"a": x, "b": nn.Dense(11)(x)}


def test_several_losses_by_1f1b_are_refused(two_ranks):
    pipeline = tnt.Pipeline("decoder/layers", microbatches=2, schedule="1f1b")
    model = tnt.Model(TwoHeads(), mesh={"stage": 2}, pipeline=pipeline)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="sgd", loss={"a": loss, "b": loss})
    with pytest.raises(ValueError, match=r"one loss, but the model has 2. Use Pipeline\(schedule"):
        model.fit(TOKENS, {"a": TARGETS, "b": TARGETS}, batch_size=8, verbose=0)


def test_a_rule_that_cuts_the_layers_is_refused(use_ranks):
    use_ranks(4)
    rules = [("layers/feed_forward/down/kernel", ("tensor", None, None))]
    mesh = {"stage": 2, "tensor": 2}
    model = tnt.Model(models.Decoder(**TINY), mesh=mesh, pipeline=GPIPE, sharding_rules=rules)
    model.compile(optimizer="sgd", loss="mean_squared_error")
    with pytest.raises(ValueError, match=r"down/kernel \[4, 64, 32\] over the axis 'tensor', but"):
        model.build(TOKENS[:6])
