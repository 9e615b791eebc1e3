"""The same bits on any number of devices: weights, optimizer state, history, evaluation and
predictions.
"""

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from reproducible_checks import (
    ConvNet,
    Mlp,
    assert_equal_on,
    compiled,
    devices,
    fit_and_digest,
    images,
)

import tnt_jax as tnt
from tnt_jax.distributed.sums.hlo import split_programs
from tnt_jax.models.transformer import Transformer


class Translator(nn.Module):
    @nn.compact
    def __call__(self, tokens, train):
        model = Transformer(
            vocab_size=20, width=8, num_heads=2, filter_dim=16, num_layers=1, dropout=0.1
        )
        return model(tokens, tokens, train=train)


class SynchronizedNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train, axis_name="data")(x.reshape(x.shape[0], -1))
        return nn.Dense(3)(x)


def sentences(rows):
    tokens = np.random.default_rng(0).integers(1, 20, (rows, 6)).astype(np.int32)
    return tokens, tokens


def weights_of(rows):
    return np.random.default_rng(1).uniform(0.5, 2, rows).astype(np.float32)


CASES = {
    # 30 and 13 rows divide neither by 4 nor by 8: every batch is padded, the last one of each epoch
    # more.
    "mlp, momentum, padded": (Mlp(), optax.sgd(0.1, momentum=0.9), images(43), {"batch_size": 30, "virtual_ranks": 4}, (1, 2)),
    "mlp, momentum, padded, 8": (Mlp(), optax.sgd(0.1, momentum=0.9), images(43), {"batch_size": 30, "virtual_ranks": 8}, (1, 8)),
    "mlp, weighted": (
        Mlp(), optax.adam(0.01), images(32),
        {"batch_size": 16, "virtual_ranks": 4, "sample_weight": weights_of(32)}, (1, 4),
    ),
    # Sums of bfloat16 are rounded after each addition, also where an all-reduce computes in
    # float32.
    "mlp, bfloat16": (Mlp(), optax.sgd(0.1), images(16), {"batch_size": 16, "virtual_ranks": 4, "precision": "bfloat16"}, (1, 2, 4)),
    "conv net, batch norm, dropout, adam": (ConvNet(), optax.adam(0.01), images(22), {"batch_size": 11, "virtual_ranks": 4}, (1, 4)),
    "transformer, dropout": (Translator(), optax.adam(0.01), sentences(16), {"batch_size": 8, "virtual_ranks": 2}, (1, 2)),
}  # fmt: skip


# Those that show least beside the others, or take longest.
LONG = (
    "mlp, momentum, padded, 8",
    "conv net, batch norm, dropout, adam",
    "mlp, weighted",
    "mlp, bfloat16",
    "transformer, dropout",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in CASES]
)
def test_any_number_of_devices_gives_the_same_bits(name):
    module, optimizer, data, options, counts = CASES[name]
    options = dict(options)
    of_model = {
        name: options.pop(name) for name in ("virtual_ranks", "precision") if name in options
    }
    assert_equal_on(
        counts, lambda: fit_and_digest(compiled(module, optimizer, **of_model), data, **options)
    )


@pytest.mark.parametrize(
    ("num_devices", "rows", "names"),
    [
        (1, 8, ["chunk", "sum of chunks", "update"]),
        (
            2,
            7,
            [
                "counts",
                "counts, sum of chunks",
                "counts, sum 1 of ranks",
                "chunk",
                "sum of chunks",
                "sum 1 of ranks",
                "update",
            ],
        ),
        (4, 8, ["chunk", "sum 1 of ranks", "sum 2 of ranks", "update"]),
    ],
)
def test_the_programs_of_a_step_can_be_read(num_devices, rows, names):
    with devices(num_devices):
        model = compiled(Mlp(), optax.adam(0.01), virtual_ranks=4)
        text = model.lowered_text(*images(rows), batch_size=rows)
        assert [
            line.removeprefix("// Program: ")
            for line in text.splitlines()
            if line.startswith("// Program: ")
        ] == names
        assert len(split_programs(text)) == len(names)
        description = model.describe_collectives(*images(rows), batch_size=rows)
    # Two weights and two biases, the loss twice, the accuracy's two sums, and with padding two
    # counts: in pairs of ranks, then in pairs of pairs.
    num_bytes = 4 * (50 * 16 + 16 + 16 * 3 + 3 + 4 + (2 if rows == 7 else 0))
    assert sum(size for _, size in description.planned) == num_bytes * (
        num_devices.bit_length() - 1
    )
    assert sum(found.nbytes for found in description.compiled) == num_bytes * (
        num_devices.bit_length() - 1
    )


class ConvNetWithoutState(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dropout(0.3, deterministic=not train)(nn.relu(nn.Conv(4, (3, 3))(x)))
        return nn.Dense(3)(x.reshape(x.shape[0], -1))


@pytest.mark.long
def test_training_equals_the_fast_steps_up_to_rounding():
    weights = []
    with devices(4):
        for reproducible in (True, False):
            model = compiled(
                ConvNetWithoutState(), optax.sgd(0.1), reproducible=reproducible, virtual_ranks=4
            )
            model.fit(*images(23), batch_size=10, epochs=2, verbose=0, shuffle=False)
            weights.append(model.variables["params"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *weights)


def test_a_model_that_looks_at_other_ranks_is_refused():
    model = compiled(SynchronizedNet(), optax.sgd(0.1), virtual_ranks=2)
    with devices(2), pytest.raises(ValueError, match="Leave out axis_name"):
        model.fit(*images(8), batch_size=8, verbose=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"virtual_ranks": 6}, "must be a power of two"),
        (
            {"gradient_compression": "bfloat16"},
            "gradient_compression='bfloat16' changes how gradients are summed",
        ),
        ({"shard_optimizer_state": True}, "shard_optimizer_state=True changes"),
    ],
)
def test_options_that_cannot_be_kept_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tnt.Model(Mlp(), reproducible=True, **options)


def test_a_number_of_devices_that_does_not_fit_is_refused():
    model = compiled(Mlp(), optax.sgd(0.1), virtual_ranks=4)
    with devices(3), pytest.raises(ValueError, match="runs on 1, 2, 4 device"):
        model.fit(*images(8), batch_size=8, verbose=0)
