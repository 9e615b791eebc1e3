"""Which processes train together, and what is refused before any of them waits for another."""

import flax.linen as nn
import numpy as np
import optax
import pytest

import tnt_jax as tnt
from tnt_jax.distributed.host import collectives
from tnt_jax.train.local.groups import _check_ranks, _processes, join_group


@pytest.mark.parametrize(
    ("groups", "hosts", "expected"),
    [
        ("host", "aabb", ((0, 1), (2, 3))),
        ("host", "a", ((0,),)),
        ("process", "aab", ((0,), (1,), (2,))),
        ([[2, 3], [1, 0]], "aaaa", ((0, 1), (2, 3))),
    ],
)
def test_groups_are_found_in_order(groups, hosts, expected):
    assert _processes(groups, hosts) == expected


@pytest.mark.parametrize(
    ("groups", "hosts", "text"),
    [
        ("host", "abab", "Number them host by host"),
        ("hosts", "ab", "each of the 2 processes once"),
        ([[0], [0, 1]], "ab", "each of the 2 processes once"),
        ([[0, 2], [1, 3]], "aaaa", "neighbouring numbers"),
        (3, "ab", "each of the 2 processes once"),
    ],
)
def test_other_groups_are_refused(groups, hosts, text):
    with pytest.raises(ValueError, match=text):
        _processes(groups, hosts)


def test_groups_of_unequal_size_are_refused():
    _check_ranks([(0,), (1,)], [0, 0, 1, 1])
    with pytest.raises(ValueError, match=r"equally many ranks.*\[2, 1\]"):
        _check_ranks([(0,), (1,)], [0, 0, 1])


@pytest.mark.parametrize(("groups", "warns"), [("host", True), ([[0, 1]], False)])
def test_a_default_that_makes_one_group_is_noted(groups, warns, monkeypatch, capsys):
    monkeypatch.setattr(collectives, "agree", lambda *_, **__: ["a", "a"])
    assert join_group(groups, tnt.init().mesh).num_groups == 1
    assert ("LocalSteps has one group" in capsys.readouterr().err) == warns


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"every": 0}, ValueError, "every must be an integer of at least 1"),
        ({"every": 2.0}, ValueError, "every must be an integer"),
        ({"every": 2, "fragments": 3}, ValueError, "at most every"),
        ({"every": 2, "delay": 2}, ValueError, "below every"),
        ({"compress": "int4"}, ValueError, "one of 'none', 'int8', 'float4', but is 'int4'"),
        ({"outer": 0.7}, TypeError, "an Optax transformation or a tnt_jax.optimizers object"),
    ],
)
def test_invalid_rounds_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        tnt.LocalSteps(**options)


@pytest.mark.parametrize(
    ("has_statistics", "expected"), [(False, [-0.7 * 1.9, -0.7 * 2.71]), (True, [-1.0, -1.0])]
)
def test_the_outer_weights_are_the_mean_where_there_are_moving_statistics(has_statistics, expected):
    optimizer = tnt.LocalSteps().transformation(has_statistics=has_statistics)
    move = {"w": np.float32(1.0)}
    first, state = optimizer.update(move, optimizer.init(move), move)
    second, _ = optimizer.update(move, state, move)
    np.testing.assert_allclose([first["w"], second["w"]], expected, rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"fsdp": 2}},
        {"reproducible": True},
        {"shard_optimizer_state": True},
        {"ranks_per_host": 2},
        {"gradient_compression": "bfloat16"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_exclude_local_steps_are_refused(options):
    with pytest.raises(ValueError, match=f"cannot be combined with {next(iter(options))}"):
        tnt.Model(nn.Dense(1), sync=tnt.LocalSteps(), **options)
    with pytest.raises(TypeError, match=r"sync must be a tnt_jax\.LocalSteps"):
        tnt.Model(nn.Dense(1), sync="host")


@pytest.mark.parametrize(
    ("choices", "name"),
    [
        ({"on_nan": "rollback"}, 'on_nan="rollback"'),
        ({"optimizer": tnt.optimizers.SGD(gradient_accumulation_steps=2)}, "gradient_accumulation"),
        ({"optimizer": tnt.optimizers.SGD(use_ema=True)}, "use_ema"),
    ],
)
def test_what_groups_cannot_do_is_refused_in_compile(choices, name):
    model = tnt.Model(nn.Dense(1), sync=tnt.LocalSteps(outer=optax.sgd(1.0)))
    with pytest.raises(ValueError, match=name):
        model.compile(**{"optimizer": "sgd", "loss": "mse"} | choices)
