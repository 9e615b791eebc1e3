import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tnt_jax import _jax, collectives
from tnt_jax.collectives import average_model_state, plan_buckets, sum_in_buckets

FLOAT = 4


@pytest.mark.parametrize(
    ("floats", "threshold", "expected"),
    [
        # Tarantella's own cases: arrays of 94, 17, 2 and 81 floats.
        ([94, 17, 2, 81], 2, [[0], [1], [2], [3]]),
        ([94, 17, 2, 81], 10, [[0], [1], [2, 3]]),
        ([94, 17, 2, 81], 100, [[0, 1], [2, 3]]),
        ([94, 17, 2, 81], 112, [[0, 1, 2], [3]]),
        ([94, 17, 2, 81], 200, [[0, 1, 2, 3]]),
        ([94, 17], 0, [[0], [1]]),
        ([], 8, []),
    ],
)
def test_plan_buckets(floats, threshold, expected):
    assert plan_buckets([FLOAT * n for n in floats], FLOAT * threshold) == expected


def test_a_bucket_holds_one_dtype():
    assert plan_buckets([4, 4, 2, 2, 4], 100, kinds=["f4", "f4", "f2", "f2", "f4"]) == [[0, 1], [2, 3], [4]]


def test_a_negative_threshold_is_refused():
    with pytest.raises(ValueError, match="at least 0 bytes, but is -1"):
        plan_buckets([4], -1)


@pytest.mark.parametrize("threshold", [0, 100, 10**9])
@pytest.mark.parametrize("in_order", [False, True])
def test_buckets_sum_every_leaf(threshold, in_order):
    mesh = _jax.make_data_mesh(jax.devices()[:4])
    rng = np.random.default_rng(0)
    tree = {"a": rng.normal(size=(4, 30)), "b": [rng.normal(size=(4, 2, 3)), rng.integers(0, 9, (4, 7))], "c": rng.normal(size=4)}
    tree = jax.tree.map(lambda x: x.astype(np.float32 if x.dtype.kind == "f" else np.int32), tree)

    def reduce(tree):
        local = jax.tree.map(lambda x: x[0], tree)
        return sum_in_buckets(local, threshold=threshold, in_order=in_order)

    summed = jax.jit(_jax.shard_map(reduce, mesh=mesh, in_specs=P("data"), out_specs=P()))(tree)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b.sum(axis=0), rtol=1e-6), summed, tree)


def run_average(state, share):
    mesh = _jax.make_data_mesh(jax.devices()[:4])

    def average(state, share):
        local = {"per_rank": state["per_rank"][0], "same": state["same"]}
        return average_model_state(local, None if share is None else share[0])

    specs = ({"per_rank": P("data"), "same": P()}, P("data"))
    return jax.jit(_jax.shard_map(average, mesh=mesh, in_specs=specs, out_specs=P()))(state, share)


def test_floating_model_state_is_averaged_by_share_and_the_rest_kept():
    state = {"per_rank": np.float32([1, 2, 3, 6]), "same": np.int32(7)}
    assert run_average(state, None)["per_rank"] == 3
    weighted = run_average(state, np.float32([0.5, 0.5, 0, 0]))
    assert weighted["per_rank"] == 1.5
    assert weighted["same"] == 7


def test_integer_state_that_differs_between_ranks_is_refused():
    with pytest.raises(TypeError, match=r"per_rank.*int32.*differs between ranks"):
        run_average({"per_rank": np.int32([1, 2, 3, 6]), "same": np.int32(7)}, None)


@pytest.mark.parametrize("value", [3, 2.5, np.arange(6).reshape(2, 3), {"a": [np.float32(1.5), np.zeros(0)], "b": jnp.ones(3)}])
def test_host_collectives_of_one_process_return_the_value(value):
    for function in (collectives.broadcast, collectives.all_reduce):
        jax.tree.map(np.testing.assert_array_equal, function(value), value)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, np.asarray(b)[None]), collectives.all_gather(value), value)


def test_text_cannot_be_summed():
    with pytest.raises(TypeError, match="got str: 'abc'"):
        collectives.all_reduce(["abc"])


def test_raise_together_raises_what_happened_here():
    collectives.raise_together(None)
    with pytest.raises(KeyError, match="gone"):
        collectives.raise_together(KeyError("gone"))
