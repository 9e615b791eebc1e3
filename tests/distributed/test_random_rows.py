import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from long_params import long_but_last

from tnt_jax import _jax
from tnt_jax.distributed.sums.random_rows import (
    DrawError,
    RowDim,
    batch_key,
    draws_of,
    key_for,
    row_key,
)

FOUR = jnp.zeros(4)


def drawn(draw, key, num_rows=4):
    """Returns what `draw(key, rows)` returns for so many rows."""
    rows = jnp.zeros(num_rows)
    return draw(key_for(draw, key, rows, {}), rows)


def bits(*shape, dtype=jnp.uint32):
    """Returns a function that draws an array; the size "rows" is the number of rows."""

    def draw(key, rows):
        sizes = {"rows": len(rows), "twice": 2 * len(rows)}
        return jax.random.bits(key, [sizes.get(size, size) for size in shape], dtype)

    return draw


@pytest.mark.parametrize("num_ranks", long_but_last(1, 2, 3, 6))
@pytest.mark.parametrize(
    "draw",
    [jax.random.bits, jax.random.uniform, jax.random.normal],
    ids=["bits", "uniform", "normal"],
)
def test_ranks_draw_the_rows_of_one_device(num_ranks, draw):
    key = jax.random.key(3)
    expected = draw(row_key(jax.random.fold_in(key, 5), 0), (12, 4, 2))
    mesh = _jax.make_data_mesh(jax.devices()[:num_ranks])

    def local(key):
        num_rows = 12 // num_ranks
        key = batch_key(jax.random.key_data(key), 5, num_rows)
        return drawn(lambda key, rows: draw(key, (len(rows), 4, 2)), key, num_rows)

    found = jax.jit(_jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P("data")))(key)
    np.testing.assert_array_equal(found, expected)


def test_split_and_fold_in_keep_the_rows():
    def derive(key, rows):
        return jax.random.bits(jax.random.split(jax.random.fold_in(key, 9), 3)[1], (len(rows), 5))

    whole = derive(row_key(jax.random.key(1), 0), jnp.zeros(8))
    for first in (0, 4):
        np.testing.assert_array_equal(
            drawn(derive, row_key(jax.random.key(1), first)), whole[first : first + 4]
        )


# The number of rows of a rank is 4, and so are other dimensions.
@pytest.mark.parametrize(
    ("draw", "dim", "per_row"),
    [
        (bits("rows"), 0, 1),
        (bits("rows", 4), 0, 1),
        (bits("rows", 1), 0, 1),
        (bits(4, "rows"), 1, 1),
        (bits(4, "rows", 4), 1, 1),
        (bits("twice", 4), 0, 2),
        (bits(4, "twice"), 1, 2),
        (bits(), None, 0),
        (bits(4), None, 0),
        (bits(4, 1), None, 0),
        (bits(1, 4, 4), None, 0),
        (bits("rows", dtype=jnp.uint8), 0, 1),
        (lambda key, rows: jax.random.key_data(jax.random.split(key, len(rows))), 0, 1),
        (lambda key, rows: jax.random.key_data(jax.random.split(key, 4))[:, :2], None, 0),
        (lambda key, rows: jax.vmap(lambda x: jax.random.bits(key, (4,)))(rows), None, 0),
        (lambda key, rows: jax.lax.map(lambda k: bits("rows", 4)(k, rows), key[None])[0], 0, 1),
    ],
)
def test_the_dimension_of_rows_is_the_one_that_changes(draw, dim, per_row):
    key = jax.random.key(1)
    [(_, found)] = draws_of(draw, row_key(key, 4), FOUR).kinds
    assert found == (None if dim is None else RowDim(dim, per_row))
    whole = np.asarray(drawn(draw, row_key(key, 0), 8))
    for first in (0, 4):
        rank = drawn(draw, row_key(key, first))
        part = slice(first * per_row, (first + 4) * per_row)
        if draw(row_key(key, 0), FOUR).shape == whole.shape:
            np.testing.assert_array_equal(rank, whole)
        elif dim is None:  # One draw for each of the rows, which vmap repeats.
            np.testing.assert_array_equal(rank, whole[:4])
        else:
            np.testing.assert_array_equal(rank, np.take(whole, np.r_[part], axis=dim))


def test_keys_of_the_rows_draw_by_row():
    def draw(key, rows):
        return jax.vmap(lambda key: jax.random.normal(key, (3,)))(jax.random.split(key, len(rows)))

    keys = jax.random.split(jax.random.key(1), 8)
    expected = np.asarray(jax.random.key_data(keys))
    split = lambda key, rows: jax.random.key_data(jax.random.split(key, len(rows)))[:, :2]  # noqa: E731
    # The words are those of JAX's own split.
    np.testing.assert_array_equal(drawn(split, row_key(jax.random.key(1), 0), 8), expected)
    whole = drawn(draw, row_key(jax.random.key(1), 0), 8)
    np.testing.assert_array_equal(drawn(draw, row_key(jax.random.key(1), 4)), whole[4:])


def both(key, rows):
    first, second = jax.random.split(key)
    return jax.random.bits(first, (len(rows), 8)), jax.random.bits(second, (4, 8))


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (both, r"4 row\(s\) on a device.*the same shape \[4, 8\]"),
        (bits("rows", "rows"), r"an array \[4, 4\] for 4 row\(s\), but \[8, 8\] for 8"),
        (
            lambda key, rows: [jax.random.bits(key, (3,)) for _ in rows],
            "draws 4 arrays for 4 row.* but 8 for 8",
        ),
        (
            lambda key, rows: jax.random.bits(key, rows.reshape(4, 1).shape),
            "fails with 8 row.*reshape",
        ),
    ],
)
def test_what_cannot_be_told_apart_is_refused_unless_the_rows_are_the_whole_batch(draw, message):
    with pytest.raises(DrawError, match=message):
        drawn(draw, row_key(jax.random.key(1), 4))
    drawn(draw, row_key(jax.random.key(1), 0))


def test_the_same_draws_are_told_apart_for_another_number_of_rows():
    known = {}
    for num_rows in (3, 5):
        rows = jnp.zeros(num_rows)
        both(key_for(both, row_key(jax.random.key(1), num_rows), rows, known), rows)
    assert len(known) == 1
    [draws] = known.values()
    assert draws.problem(3) is None
    assert "[4, 8]" in draws.problem(4)


def test_numbers_that_the_trace_does_not_show_are_refused():
    def draw(key, rows):
        return jax.random.gamma(key, 2.0, rows.shape)

    with pytest.raises(DrawError, match=r"shape \[4\].*jax.random.gamma"):
        drawn(draw, row_key(jax.random.key(1), 4))


def test_rows_steps_and_seeds_differ():
    parts = [
        drawn(bits("rows", 64), row_key(jax.random.fold_in(jax.random.key(seed), step), first))
        for seed in (0, 1) for step in (0, 1) for first in (0, 4)
    ]  # fmt: skip
    rows = np.concatenate(parts)
    assert len({row.tobytes() for row in rows}) == len(rows)


@pytest.mark.parametrize("width", [jnp.uint8, jnp.uint16, jnp.uint32])
def test_bits_are_uniform(width):
    numbers = np.asarray(jax.random.bits(row_key(jax.random.key(0), 0), (1000, 200), width))
    ones = np.unpackbits(numbers.view(np.uint8)).mean()
    assert abs(ones - 0.5) < 1e-3
    values = np.asarray(jax.random.uniform(row_key(jax.random.key(2), 0), (1000, 200)))
    counts, _ = np.histogram(values, bins=100, range=(0, 1))
    # Chi-squared with 99 degrees of freedom: beyond 160 in one of 10,000 trials.
    assert np.sum((counts - 2000.0) ** 2 / 2000.0) < 160
