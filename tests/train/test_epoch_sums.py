"""The sums behind the logs: losses by rows, terms by the count of the global batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from long_params import long_but_last

from tnt_jax import _jax
from tnt_jax.train.contracts import Batch, LossTerm
from tnt_jax.train.steps.epoch_sums import (
    add_sums,
    divide,
    num_real_rows,
    quotient,
    weighted,
    weighted_sum,
)

ROWS, RANK = PartitionSpec("data"), PartitionSpec()


@pytest.mark.parametrize(
    ("count", "share"),
    [(None, 3.0), (4.0, 0.75), (0.0, 0.0)],  # No real row, and so no loss.
)
def test_a_term_is_divided_by_its_count_and_weighted_in_the_sum(count, share):
    term = LossTerm(jnp.float32(3), count, scale=2.0)
    found = quotient(term, count)
    assert float(found) == share
    assert float(weighted_sum([found], [term], 0.5)) == 2 * share + 0.5


def test_no_count_gives_no_infinite_gradient():
    gradient = jax.grad(lambda total: quotient(LossTerm(total, 0.0), jnp.float32(0)))(1.0)
    assert float(gradient) == 0


@pytest.mark.parametrize("num_ranks", long_but_last(1, 2, 4))
def test_shares_of_the_ranks_add_up_to_the_loss_of_the_global_batch(use_ranks, num_ranks):
    mesh = use_ranks(num_ranks).mesh
    losses, mask = np.arange(8, dtype=np.float32), np.array([1, 1, 1, 1, 1, 0, 0, 0], np.float32)

    def measure(losses, mask):
        known = divide(LossTerm(jnp.sum(losses * mask), jnp.sum(mask)))
        alone = divide(LossTerm(jnp.sum(losses * mask), None))
        rows = num_real_rows(Batch(losses, mask=mask)), num_real_rows(Batch(losses))
        return jax.lax.psum((known, alone), "data"), rows

    mapped = _jax.shard_map(measure, mesh=mesh, in_specs=(ROWS, ROWS), out_specs=RANK)
    (known, alone), rows = jax.jit(mapped)(losses, mask)
    assert float(known) == losses[:5].mean()
    assert float(alone) == losses[:5].sum()
    assert [float(count) for count in rows] == [5, 8]


def test_the_loss_of_an_epoch_weighs_batches_by_their_rows():
    sums = {"loss": (0.0, 0.0), "losses": [(0.0, 0.0)] * 2, "metrics": {"hits": jnp.zeros(2)}}
    for loss, rows in ((1.0, 16), (4.0, 8)):
        terms = [jnp.float32(loss), jnp.float32(-loss)]
        sums = add_sums(sums, jnp.float32(loss), terms, {"hits": jnp.array([1.0, rows])}, rows)
    mean = np.average([1, 4], weights=[16, 8])
    assert sums["loss"][0] / sums["loss"][1] == mean
    assert [float(total / rows) for total, rows in sums["losses"]] == [mean, -mean]
    assert sums["metrics"]["hits"].tolist() == [2, 24]


@pytest.mark.parametrize("dtype", ["int32", "bool", "uint8"])
def test_weights_of_whole_numbers_may_be_fractions(dtype):
    values, weight = weighted(jnp.array([1, 1, 0], dtype), np.array([0.5, 0.25, 9]), None, None)
    np.testing.assert_array_equal(values * weight, [0.5, 0.25, 0])
