"""What is recorded of the arrays and rows of a step."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tnt_jax.train.health.recording import (
    changed_by_rounding,
    checksums_of_rows,
    describe_array,
    rounding_unit,
    signed_sums,
)

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("n", [1, 7, 1000, (1 << 20) + 3])
def test_signed_sums_tell_how_far_arrays_are_apart(n):
    a = RNG.normal(size=n)
    b = a + 1e-6 * RNG.normal(size=n)
    found = np.sqrt(np.mean((signed_sums(a) - signed_sums(b)) ** 2))
    assert 0.4 < found / np.linalg.norm(a - b) < 1.9


def test_signs_are_the_same_on_every_machine():
    expected = [-3.0, 3.0, 3.0, -3.0, -3.0, 3.0, -3.0, -3.0]
    np.testing.assert_array_equal(signed_sums(np.array([3.0])), expected)


def test_sums_are_linear():
    a, b = RNG.normal(size=(2, 5000))
    np.testing.assert_allclose(signed_sums(a) + signed_sums(b), signed_sums(a + b), atol=1e-10)


def test_an_array_of_integers_has_a_digest_alone():
    assert describe_array(np.arange(3)).keys() == {"digest"}
    found = describe_array(np.array([[3.0, 4.0]], np.float32))
    assert found["norm"] == 5.0
    assert found["eps"] == 2.0**-23
    assert found["digest"] != describe_array(np.array([[3.0], [4.0]], np.float32))["digest"]


@pytest.mark.parametrize("dim", [0, 1])
def test_each_row_has_its_own_checksum_wherever_it_lies(use_ranks, dim):
    mesh = use_ranks(4).mesh
    x, y = RNG.normal(size=(8, 3)).astype("f4"), np.arange(8, dtype="i4")
    expected = [zlib.crc32(y[i].tobytes(), zlib.crc32(x[i].tobytes())) for i in range(8)]
    trees = [np.moveaxis(x[:, None], 0, 1), y[None]] if dim else [x, y]
    expected_of_host = checksums_of_rows([trees[0], trees[1].astype("i8")], dim)
    if not dim:
        np.testing.assert_array_equal(expected_of_host, expected)
    sharding = NamedSharding(mesh, PartitionSpec(*(None,) * dim, "data"))
    placed = jax.device_put(trees, sharding)
    np.testing.assert_array_equal(checksums_of_rows(placed, dim), expected_of_host)
    assert checksums_of_rows((None, None)).tolist() == []


def test_rounding_changes_values_by_a_few_units_and_integers_not():
    tree = {"a": jnp.linspace(1, 2, 1000), "n": jnp.arange(3), "z": jnp.zeros(4)}
    changed = changed_by_rounding(tree, 2.0**-23)
    off = np.abs(np.asarray(changed["a"], np.float64) / np.asarray(tree["a"]) - 1)
    assert 2.0**-23 < off.max() <= 5 * 2.0**-23
    np.testing.assert_array_equal(changed["n"], tree["n"])
    np.testing.assert_array_equal(changed["z"], tree["z"])
    again = changed_by_rounding(tree, 2.0**-23)
    np.testing.assert_array_equal(changed["a"], again["a"])


@pytest.mark.parametrize(
    ("dtype", "program", "platform", "unit"),
    [
        ("float32", "", "cpu", 2.0**-23),
        ("float32", "tensor<4x8xbf16>", "cpu", 2.0**-7),
        ("float32", "", "gpu", 2.0**-10),
        ("float32", "", "tpu", 2.0**-7),
        ("bfloat16", "", "cpu", 2.0**-7),
        ("int32", "", "cpu", 2.0**-23),
    ],
)
def test_the_unit_is_that_of_the_coarsest_rounding(dtype, program, platform, unit):
    assert rounding_unit({"a": jnp.zeros(2, dtype)}, program, platform) == unit


def test_products_of_full_precision_round_no_factors():
    with jax.default_matmul_precision("highest"):
        assert rounding_unit({"a": jnp.zeros(2)}, "", "gpu") == 2.0**-23
