import re
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tnt_jax import _jax
from tnt_jax.distributed.sums.reduction import (
    Reduction,
    choose_reduction,
    default_reduction,
    plan_buckets,
    sum_compressed,
    sum_over_ranks,
)
from tnt_jax.settings import Settings

FLOAT = 4
NUM_RANKS = 4


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


def test_a_bucket_holds_one_dtype_and_goes_when_its_last_array_is_ready():
    assert plan_buckets([4, 4, 2, 2, 4], 100, kinds=["f4", "f4", "f2", "f2", "f4"]) == [
        [2, 3],
        [0, 1, 4],
    ]


def test_a_negative_threshold_is_refused():
    with pytest.raises(ValueError, match="at least 0 bytes, but is -1"):
        plan_buckets([4], -1)


def on_ranks(function, *trees):
    """Runs `function` of each rank's entry of arrays `[ranks, ...]`; its second result comes back
    as `[ranks, ...]`.
    """
    mesh = _jax.make_data_mesh(jax.devices()[:NUM_RANKS])

    def run(*trees):
        same, own = function(*jax.tree.map(lambda x: x[0], trees))
        return same, jax.tree.map(lambda x: x[None], own)

    specs: Any = (P(), P("data"))
    return jax.jit(_jax.shard_map(run, mesh=mesh, in_specs=P("data"), out_specs=specs))


def make_tree(seed=0):
    rng = np.random.default_rng(seed)
    # Sizes that ranks divide and sizes that they do not; two dtypes, one of them in between.
    shapes = {"a": (30,), "b": [(2, 3), (7,)], "c": (), "d": (5, 8)}
    tree = jax.tree.map(
        lambda s: rng.normal(size=(NUM_RANKS, *s)).astype(np.float32),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    tree["b"][1] = rng.integers(0, 9, (NUM_RANKS, 7)).astype(np.int32)
    return tree


PLANS = [
    Reduction("xla"),
    Reduction(0),
    Reduction(100),
    Reduction(10**9),
    Reduction(0, chained=True),
    Reduction(100, chained=True),
    Reduction(10**9, chained=True),
]


@pytest.mark.parametrize("order", [None, [3, 0, 4, 1, 2]])
@pytest.mark.parametrize(
    "reduction",
    [*PLANS, Reduction(100, ranks_per_host=2), Reduction(100, ranks_per_host=NUM_RANKS)],
)
def test_every_reduction_sums_every_leaf(reduction, order):
    tree = make_tree()
    summed, _ = on_ranks(lambda tree: (sum_over_ranks(tree, reduction, order=order), ()), tree)(
        tree
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b.sum(axis=0), rtol=1e-6, atol=1e-6),
        summed,
        tree,
    )
    assert jax.tree.map(lambda x: x.dtype, summed) == jax.tree.map(lambda x: x.dtype, tree)


def test_bucket_plans_give_the_same_bits():
    tree = make_tree()
    results = [
        on_ranks(lambda tree, plan=plan: (sum_over_ranks(tree, plan), ()), tree)(tree)[0]
        for plan in PLANS
    ]
    for other in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], other)


def test_buckets_are_reduced_in_the_order_given():
    tree = make_tree()
    program = on_ranks(
        lambda tree: (sum_over_ranks(tree, Reduction(0, chained=True), order=[3, 0, 4, 1, 2]), ()),
        tree,
    )
    sizes = re.findall(
        r"\"stablehlo.all_reduce\".*?\(tensor<(\d*)x?[fi]32>\) ->",
        program.lower(tree).as_text(),
        flags=re.DOTALL,
    )
    assert sizes == ["1", "30", "40", "6", "7"]


def compressed(tree, residual, *, threshold=100):
    return sum_compressed(
        tree, residual, Reduction(threshold, compression="bfloat16"), order=[4, 3, 2, 1, 0]
    )


def test_compressed_sums_and_residuals_add_up_to_the_true_sums():
    program, residual, applied, true = (
        on_ranks(compressed),
        jax.tree.map(np.zeros_like, make_tree()),
        0,
        0,
    )
    for step in range(20):
        tree = make_tree(step)
        summed, residual = program(tree, residual)
        applied = jax.tree.map(np.add, summed, applied) if step else summed
        true = jax.tree.map(lambda new, old: new.sum(axis=0, dtype=np.float64) + old, tree, true) if step else jax.tree.map(
            lambda x: x.sum(axis=0, dtype=np.float64), tree
        )  # fmt: skip
    missing = jax.tree.map(lambda x: np.asarray(x).sum(axis=0, dtype=np.float64), residual)
    jax.tree.map(
        lambda a, m, t: np.testing.assert_allclose(a + m, t, atol=2e-5), applied, missing, true
    )


def test_one_compressed_sum_is_within_the_stated_error():
    tree = make_tree()
    summed, residual = on_ranks(compressed)(tree, jax.tree.map(np.zeros_like, tree))
    for leaf, sent in zip(jax.tree.leaves(summed), jax.tree.leaves(tree), strict=True):
        bound = 2.0**-8 * (np.abs(sent).sum(axis=0) + np.abs(sent.sum(axis=0))) * 1.01
        assert np.all(np.abs(np.asarray(leaf) - sent.sum(axis=0)) <= bound)
    assert any(np.any(np.asarray(x) != 0) for x in jax.tree.leaves(residual))
    assert not np.any(residual["b"][1])  # Integers are sent as they are.


def test_values_of_eight_bits_are_compressed_exactly():
    tree = jax.tree.map(lambda x: np.round(x).astype(x.dtype), make_tree())
    summed, residual = on_ranks(compressed)(tree, jax.tree.map(np.zeros_like, tree))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.sum(axis=0)), summed, tree)
    assert not any(np.any(x) for x in jax.tree.leaves(residual))


def test_compressed_gradients_travel_in_sixteen_bits():
    tree = {"w": np.zeros((NUM_RANKS, 1024), np.float32)}
    mapped = on_ranks(
        lambda tree, rest: sum_compressed(
            tree, rest, Reduction(0, compression="bfloat16"), order=[0]
        )
    )
    text = mapped.lower(tree, tree).compile().as_text() or ""
    assert re.search(r"u16\S* all-to-all", text) or re.search(r"\(u16[^)]*\) all-to-all", text)
    assert re.search(r"u16\S* all-gather", text)
    assert "all-reduce" not in text


def test_hosts_are_summed_first():
    tree = {"w": np.zeros((NUM_RANKS, 1024), np.float32)}
    mapped = on_ranks(lambda tree: (sum_over_ranks(tree, Reduction(0, ranks_per_host=2)), ()))
    text = mapped.lower(tree).compile().as_text() or ""
    groups = re.findall(r"reduce-scatter\(.*?replica_groups=(\{\{.*?\}\})", text)
    assert groups == ["{{0,1},{2,3}}", "{{0,2},{1,3}}"]


def test_the_platform_decides_what_was_not_chosen():
    assert default_reduction("cpu", 8) == Reduction(2 * 2**20)
    assert choose_reduction("cpu", 8, settings=Settings(), threshold_kb=0) == Reduction(0)
    assert choose_reduction("cpu", 8, settings=Settings(), threshold_kb="xla") == Reduction("xla")
    assert default_reduction("gpu", 8) == Reduction(8 * 2**20, chained=True)
    assert default_reduction("gpu", 512) == Reduction(100 * 2**20, chained=True)
    # On middling clusters the compiler's grouping is better for many bytes.
    assert default_reduction("gpu", 64).resolve(98 * 2**20) == Reduction(100 * 2**20, chained=True)
    assert default_reduction("gpu", 64).resolve(200 * 2**20) == Reduction("xla")
    assert choose_reduction("gpu", 64, settings=Settings(), threshold_kb=1) == Reduction(
        1024, chained=True
    )
    assert (
        choose_reduction("gpu", 64, settings=Settings(), compression="bfloat16").xla_bytes is None
    )
    assert choose_reduction("gpu", 8, settings=Settings()) == default_reduction("gpu", 8)
    assert choose_reduction("gpu", 8, settings=Settings(fusion_threshold_kb=3)).threshold == 3072
    assert (
        choose_reduction(
            "gpu", 8, settings=Settings(fusion_threshold_kb=3), threshold_kb=2
        ).threshold
        == 2048
    )
    assert choose_reduction("gpu", 8, settings=Settings(), threshold_kb="xla") == Reduction("xla")


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"threshold_kb": -1}, "at least 0, or 'xla', but is -1"),
        ({"threshold_kb": "auto"}, "or 'xla', but is 'auto'"),
        ({"threshold_kb": True}, "or 'xla', but is True"),
        ({"compression": "fp8"}, "must be 'bfloat16' or None, but is 'fp8'"),
        (
            {"ranks_per_host": 3},
            r"ranks_per_host \(3\) must be at least 1 and divide the number of ranks \(8\)",
        ),
        ({"ranks_per_host": 0}, r"ranks_per_host \(0\)"),
        (
            {"ranks_per_host": 2, "compression": "bfloat16"},
            "gradient_compression and ranks_per_host exclude one another",
        ),
        (
            {"shard_optimizer_state": True, "threshold_kb": "xla"},
            "shard_optimizer_state works on buckets",
        ),
    ],
)
def test_invalid_choices_are_refused(choices, message):
    with pytest.raises(ValueError, match=message):
        choose_reduction("gpu", 8, settings=Settings(), **choices)
