"""Sums of a program become calls, without a job."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tnt_jax import _jax
from tnt_jax._jax.program_sums import _with_calls

NUM_DEVICES = 4
CALL = re.compile(r"stablehlo\.custom_call @sum\((.*?)\).*?slot = (\d+)")


def rewritten(function, *args, leads=None, axes=None):
    """Returns the text of a program of four devices with calls in place of its sums."""
    devices = jax.devices()[:NUM_DEVICES]
    mesh = _jax.make_data_mesh(devices)
    if axes is not None:
        auto = (jax.sharding.AxisType.Auto,) * len(axes)
        mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=auto, devices=devices)
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P(mesh.axis_names),
        check_vma=False,
    )  # fmt: skip
    module = jax.jit(mapped).lower(*args).compiler_ir("stablehlo")
    before = str(module)
    text = str(_with_calls(module, "sum", NUM_DEVICES, leads))
    assert str(module) == before, "The program of the user is not changed."
    return text


def calls(text):
    """Returns how many arrays each call sums, in the order of its slots."""
    found = sorted((int(slot), len(operands.split(","))) for operands, slot in CALL.findall(text))
    assert [slot for slot, _ in found] == list(range(len(found)))
    return [count for _, count in found]


ROWS = jnp.ones((8, 3))


def test_arrays_that_are_summed_together_are_one_call():
    text = rewritten(lambda x: x + sum(jax.lax.psum((x, x + 1, x.sum()), "data")), ROWS)
    assert calls(text) == [3]
    assert "all_reduce" not in text


def test_what_follows_from_a_sum_is_summed_later_and_all_else_with_it():
    def function(x):
        first = jax.lax.psum(x.sum(), "data")
        second = jax.lax.psum(jnp.sin(first) * x, "data")
        beside = jax.lax.psum(jnp.cos(x), "data")
        return second + beside

    assert calls(rewritten(function, ROWS)) == [2, 1]


def test_each_dtype_has_calls_of_its_own():
    assert calls(
        rewritten(lambda x: x + sum(jax.lax.psum((x, x.astype(jnp.int32)), "data")), ROWS)
    ) == [1, 1]


@pytest.mark.parametrize("kind", ["scan", "cond"])
def test_sums_inside_loops_and_branches_are_calls(kind):
    def function(x):
        if kind == "scan":
            return jax.lax.scan(lambda c, _: (jax.lax.psum(c, "data") * 0.1, None), x, None, 3)[0]
        return jax.lax.cond(x[0, 0] > 0, lambda x: jax.lax.psum(x, "data"), lambda x: x, x)

    text = rewritten(function, ROWS)
    assert calls(text) == [1]
    assert "all_reduce" not in text


def test_a_sum_that_a_loop_needs_comes_before_it():
    def function(x):
        total = jax.lax.psum(x, "data")
        return jax.lax.scan(lambda c, _: (jax.lax.psum(c + total, "data"), None), x, None, 2)[0]

    assert calls(rewritten(function, ROWS)) == [1, 1]


def test_each_call_of_a_function_has_slots_of_its_own():
    @jax.jit
    def inner(x):
        return x / jax.lax.psum(x, "data")

    @jax.jit
    def outer(x):
        return inner(x) + 1

    text = rewritten(lambda x: inner(x) * outer(x) + outer(x + 2), ROWS)
    assert calls(text) == [1, 1, 1]
    assert "all_reduce" not in text


def test_a_function_may_have_the_name_of_another_ones_copy():
    @jax.jit
    def inner(x):
        return jax.lax.psum(x, "data")

    @jax.jit
    def inner_sum_1(x):
        return jax.lax.psum(x * 2, "data")

    assert calls(rewritten(lambda x: inner(x) + inner(x + 1) + inner_sum_1(x), ROWS)) == [1, 1, 1]


def test_other_collectives_are_left_to_the_compiler():
    def function(x):
        small = jax.lax.psum(x.astype(jnp.bfloat16), "data").astype(jnp.float32)
        return small + jax.lax.pmax(x, "data") + jax.lax.all_gather(x, "data").sum(0)

    text = rewritten(function, ROWS)
    assert calls(text) == []
    assert text.count('"stablehlo.all_reduce"') == 2


def test_sums_over_a_part_of_the_mesh_are_left_to_the_compiler():
    axes = {"data": 2, "other": 2}
    text = rewritten(
        lambda x: jax.lax.psum(x, "data") + jax.lax.psum(x, ("data", "other")), ROWS, axes=axes
    )
    assert calls(text) == [1]
    assert text.count('"stablehlo.all_reduce"') == 1


def test_several_hosts_sum_within_each_and_between_their_first_devices():
    text = rewritten(lambda x: x + jax.lax.psum(x, "data"), ROWS, leads=[True, False, False, True])
    assert calls(text) == [1, 1]
    assert text.count("shares = 1") == 1
    (groups,) = re.findall(r"replica_groups = dense<(.*?)>", text)
    assert groups == "[[0, 3], [1, -1], [2, -1]]"


def test_a_program_without_sums_is_not_copied():
    module = jax.jit(jnp.sin).lower(ROWS).compiler_ir("stablehlo")
    assert _with_calls(module, "sum", NUM_DEVICES) is module
