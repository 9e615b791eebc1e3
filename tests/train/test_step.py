"""One step computes what NumPy computes on the whole batch, on any number of devices."""

from functools import cache, partial

import jax
import numpy as np
import optax
import pytest
from linear_steps import ByHand, apply, make_batches, make_parts, model_state, parameters
from long_params import long_but_last

from tnt_jax.distributed.sums.random_rows import row_key
from tnt_jax.distributed.sums.reduction import Reduction
from tnt_jax.train.contracts import Start, TrainingStep
from tnt_jax.train.execution import stack
from tnt_jax.train.steps.data_parallel import DataParallelSteps
from tnt_jax.train.steps.epoch_sums import zero_sums
from tnt_jax.train.steps.step import (
    make_eval_step,
    make_predict_step,
    make_train_step,
)

# Batches of 16 rows of which so many are real; the last leave ranks without a real row.
ROWS = (16, 16, 11, 1)


class Job:
    """Parts of a step on some ranks, with the state before the first and empty sums."""

    def __init__(self, runtime, **options):
        self.mesh, self.parts = runtime.mesh, make_parts()
        steps = DataParallelSteps(runtime, Reduction())
        self.state = steps.put_state(
            steps.create_state(
                (parameters(), model_state()),
                Start(optax.sgd(0.1), 5, options.get("accumulation_steps", 1)),
            )
        )
        self.sums = zero_sums(self.parts, self.state, make_batches(16)[0], self.mesh)
        self.options = options

    def make(self, make_step):
        training = TrainingStep(self.parts, optax.sgd(0.1), **self.options)
        return make_step(training, self.mesh, reduction=Reduction())


def train(job, batches, by_hand):
    step, sums = job.make(make_train_step), job.sums
    for batch in batches:
        job.state, sums = step(job.state, sums, batch)
        by_hand.train(batch)
        by_hand.assert_state_is(job.state)
    by_hand.assert_sums_are(sums)
    return sums


@pytest.mark.parametrize("num_ranks", long_but_last(1, 2, 4, 8))
def test_training_steps_equal_numpy_on_whole_batches(use_ranks, num_ranks):
    sums = train(Job(use_ranks(num_ranks)), make_batches(*ROWS), ByHand())
    # Random numbers are those of the rows, wherever the rows are, and fresh in every step.
    assert float(sums["metrics"]["model"]["noise"]) == pytest.approx(noise(), rel=1e-5)


@cache
def noise():
    keys = [row_key(jax.random.fold_in(jax.random.key(5), step), 0) for step in range(4)]
    draws = np.array([jax.random.uniform(key, (16,)) for key in keys])
    return sum(row[:real].sum() for row, real in zip(draws, ROWS, strict=True))


@pytest.mark.parametrize("num_ranks", long_but_last(1, 4))
def test_steps_in_one_program_equal_numpy_on_whole_batches(use_ranks, num_ranks):
    job, by_hand, batches = Job(use_ranks(num_ranks)), ByHand(), make_batches(16, 16, 16)
    state, sums = job.make(partial(make_train_step, stacked=True))(
        job.state, job.sums, stack(batches)
    )
    for batch in batches:
        by_hand.train(batch)
    by_hand.assert_state_is(state)
    by_hand.assert_sums_are(sums)


@pytest.mark.parametrize("num_ranks", long_but_last(1, 4))
def test_accumulation_updates_by_the_mean_gradient_of_its_steps(use_ranks, num_ranks):
    job = Job(use_ranks(num_ranks), accumulation_steps=3)
    by_hand = ByHand(accumulation_steps=3)
    train(job, make_batches(16, 16, 16, 16), by_hand)
    # Each rank holds its own part of the step that no update has used yet.
    assert job.state.accumulated["w"].shape == (num_ranks, 3)
    np.testing.assert_allclose(
        np.sum(job.state.accumulated["w"], axis=0), by_hand.total["w"], rtol=1e-5
    )


def test_a_step_takes_the_state_and_leaves_the_sums(use_ranks):
    job = Job(use_ranks(2))
    given = jax.tree.leaves((job.state.params, job.state.model_state))
    job.sums = jax.device_put(job.sums)
    job.make(make_train_step)(job.state, job.sums, make_batches(16)[0])
    assert all(leaf.is_deleted() for leaf in given)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(job.sums))


@pytest.mark.parametrize("num_ranks", long_but_last(1, 8))
def test_evaluation_and_prediction_change_nothing_and_draw_no_numbers(use_ranks, num_ranks):
    job, by_hand, batches = Job(use_ranks(num_ranks)), ByHand(), make_batches(16, 11)
    evaluate, sums = make_eval_step(job.parts, job.mesh), job.sums
    for batch in batches:
        sums = evaluate(job.state.params, job.state.model_state, sums, batch)
        by_hand.look(batch)
    by_hand.assert_sums_are(sums)
    by_hand.assert_state_is(job.state)
    assert float(sums["metrics"]["model"]["noise"]) == 0
    outputs = make_predict_step(apply, job.mesh)(
        job.state.params, job.state.model_state, batches[1].inputs, np.uint32(0)
    )
    expected = batches[1].inputs @ parameters()["w"] + parameters()["b"]
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)
    assert [shard.data.shape for shard in outputs.addressable_shards] == [
        (16 // num_ranks,)
    ] * num_ranks


def test_state_that_cannot_be_averaged_is_an_error(use_ranks):
    def count_rows(params, model_state, inputs, **options):
        applied = apply(params, model_state, inputs, **options)
        seen = (inputs[:, 0] > 0).sum(dtype="int32")
        return applied._replace(model_state={**applied.model_state, "calls": seen})

    job = Job(use_ranks(2))
    job.parts = make_parts(count_rows)
    with pytest.raises(TypeError, match=r"Model state \['calls'\] \(int32\) differs between ranks"):
        job.make(make_train_step)(job.state, job.sums, make_batches(16)[0])
