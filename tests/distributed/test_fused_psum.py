import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tnt_jax import _jax
from tnt_jax.distributed.sums.reduction import Reduction, psum, sum_over_ranks

NUM_RANKS = 4
# Of 1 MiB, and thus not small.
LARGE = (2, 512, 256)


def make_tree():
    rng = np.random.default_rng(0)
    shapes = {"a": (3,), "scalar": (), "b": (2, 5), "large": LARGE, "empty": (0, 2)}
    tree = {
        name: rng.normal(size=(NUM_RANKS, *shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    return tree | {"counts": np.arange(8, dtype=np.int32).reshape(NUM_RANKS, 2)}


def on_ranks(function, num_ranks=NUM_RANKS):
    mesh = _jax.make_data_mesh(jax.devices()[:num_ranks])

    def of_one_rank(tree):
        return function(jax.tree.map(lambda x: x[0], tree))

    return jax.jit(_jax.shard_map(of_one_rank, mesh=mesh, in_specs=P("data"), out_specs=P()))


def count_sums(mapped, tree):
    return mapped.lower(tree).as_text().count("stablehlo.all_reduce")


@pytest.mark.parametrize("join_small", [False, True])
def test_sums_are_those_of_numpy(join_small):
    tree = make_tree()
    sums = on_ranks(lambda tree: psum(tree | {"number": 2.0}, join_small=join_small))(tree)
    assert sums.pop("number") == 2.0 * NUM_RANKS
    assert sums["counts"].dtype == np.int32
    jax.tree.map(
        lambda x, total: np.testing.assert_allclose(total, x.sum(0), rtol=1e-6, atol=1e-6),
        tree,
        sums,
    )


def test_what_differs_between_stages_is_joined_apart():
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("data", "stage"))
    tree = {"a": np.arange(4.0), "b": np.arange(6.0), "of_stage": np.arange(8.0)}
    specs = {"a": P("data"), "b": P("data"), "of_stage": P(("data", "stage"))}
    mapped = jax.shard_map(
        lambda tree: psum(tree, join_small=True),
        mesh=mesh,
        in_specs=(specs,),
        out_specs={"a": P(), "b": P(), "of_stage": P("stage")},
    )
    sums = jax.jit(mapped)(tree)
    np.testing.assert_array_equal(sums["a"], [2, 4])
    np.testing.assert_array_equal(sums["of_stage"], [4, 6, 8, 10])
    assert count_sums(jax.jit(mapped), tree) == 2


def test_joining_changes_no_bit_between_two_ranks():
    tree = jax.tree.map(lambda x: x[:2], make_tree())
    together, alone = (
        on_ranks(lambda tree, join_small=join_small: psum(tree, join_small=join_small), 2)(tree)
        for join_small in (True, False)
    )
    jax.tree.map(np.testing.assert_array_equal, together, alone)


def test_small_arrays_of_a_dtype_travel_as_one():
    tree = make_tree()
    # One for small floats, one for integers and one for the large array.
    assert count_sums(on_ranks(lambda tree: psum(tree, join_small=True)), tree) == 3
    assert count_sums(on_ranks(lambda tree: psum(tree)), tree) > 3


@pytest.mark.parametrize(("threshold", "num_sums"), [(2**30, 3), (0, 6), ("xla", 6)])
def test_buckets_say_what_is_joined_between_processes(monkeypatch, threshold, num_sums):
    monkeypatch.setattr("tnt_jax.distributed.sums.reduction._has_slow_starts", lambda: True)
    mapped = on_ranks(lambda tree: sum_over_ranks(tree, Reduction(threshold)))
    assert count_sums(mapped, make_tree()) == num_sums


def test_one_rank_sends_nothing():
    tree = {"x": np.ones((1, 3), np.float32)}
    mapped = on_ranks(lambda tree: _jax.make_varying(psum(tree, join_small=True)), 1)
    assert count_sums(mapped, tree) == 0
    np.testing.assert_array_equal(mapped(tree)["x"], jnp.ones(3))
