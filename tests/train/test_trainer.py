"""The trainer alone, without a facade: which steps it runs, what it tells its caller and when."""

from dataclasses import replace

import jax
import numpy as np
import optax
import pytest
from linear_steps import ByHand, LinearAdapter, make_batches, make_parts, parameters
from long_params import long_but_last

from tnt_jax._jax import make_data_mesh
from tnt_jax.adapters.base import Variables
from tnt_jax.data.sources import HostBatch
from tnt_jax.distributed.sums.reduction import Reduction
from tnt_jax.train import compiled_steps
from tnt_jax.train.compiled_steps import Ahead, Kept
from tnt_jax.train.steps.data_parallel import DataParallelSteps
from tnt_jax.train.steps.epoch_sums import zero_sums
from tnt_jax.train.trainer import Trainer, device_feed


class Hooks:
    """Writes down what a loop says, and stops it after a given step."""

    def __init__(self, stop_after=None):
        self.calls, self.stop_after = [], stop_after

    def on_batch_begin(self, index):
        self.calls.append(("begin", index))

    def on_batch_end(self, index, sums, num_rows):
        self.calls.append(("end", index, num_rows))
        return index == self.stop_after


def make_trainer(runtime, *, reduction=Reduction(), **options):  # noqa: B008 (immutable)
    return Trainer(
        LinearAdapter(), runtime, DataParallelSteps(runtime, reduction), seed=5, **options
    )


def trained(runtime, *, optimizer=None, accumulation_steps=1, **options):
    """Returns a compiled trainer with variables."""
    trainer = make_trainer(runtime, **options)
    trainer.compile(
        make_parts(), optimizer or optax.sgd(0.1), accumulation_steps=accumulation_steps
    )
    trainer.build(None)
    return trainer


def items(batches):
    return iter(
        [
            HostBatch(batch, batch.mask, 16 if batch.mask is None else int(batch.mask.sum()))
            for batch in batches
        ]
    )


def feed(trainer, batches, *, threaded=False, num_steps=1):
    return device_feed(
        trainer, items(batches), lambda item: item.data, threaded=threaded, num_steps=num_steps
    )


def run(method, trainer, batches, hooks=None, **options):
    with feed(trainer, batches, **options) as groups:
        return method(groups, hooks or Hooks())


@pytest.mark.parametrize(("num_ranks", "num_steps"), [(8, 1), (4, 2), (1, 2)])
def test_an_epoch_equals_numpy_whatever_the_steps_of_a_program(use_ranks, num_ranks, num_steps):
    trainer, by_hand, hooks = trained(use_ranks(num_ranks)), ByHand(), Hooks()
    batches = make_batches(16, 16, 16, 11)
    options = {"threaded": num_steps == 2, "num_steps": num_steps}
    sums = run(trainer.train_epoch, trainer, batches, hooks, **options)
    for batch in batches:
        by_hand.train(batch)
    by_hand.assert_state_is(trainer.state)
    by_hand.assert_sums_are(sums)
    # The third batch finds no partner of its shape.
    first = [("begin", 0), ("end", 1, 32)]
    if num_steps == 1:
        first = [("begin", 0), ("end", 0, 16), ("begin", 1), ("end", 1, 16)]
    assert hooks.calls == [*first, ("begin", 2), ("end", 2, 16), ("begin", 3), ("end", 3, 11)]


@pytest.mark.parametrize("num_steps", [1, 2])
def test_steps_of_an_elastic_job_are_traced_once_for_a_number_of_devices(
    use_ranks, num_steps, monkeypatch
):
    traced, zeros, sgd = [], [], optax.sgd(0.1)
    monkeypatch.setattr(
        compiled_steps, "zero_sums", lambda *args: zeros.append(1) or zero_sums(*args)
    )

    def update(*args, **kwargs):
        traced.append(1)
        return sgd.update(*args, **kwargs)

    job, optimizer = use_ranks(4), optax.GradientTransformation(sgd.init, update)
    trainer, by_hand = make_trainer(job), ByHand()
    trainer.traced = Kept()
    trainer.compile(make_parts(), optimizer)
    trainer.build(None)
    batches, counts = make_batches(16, 16, 11), []
    for _ in range(3):
        sums = run(trainer.train_epoch, trainer, batches, num_steps=num_steps)
        trainer.reopen(job, DataParallelSteps(job, Reduction()), trainer.kept())
        trainer.compile(make_parts(), optimizer)
        counts.append(len(traced))
        by_hand.clear()
        for batch in batches:
            by_hand.train(batch)
    by_hand.assert_state_is(trainer.state)
    by_hand.assert_sums_are(sums)
    if num_steps == 1:  # On CPUs, programs of several steps are searched for convolutions.
        assert len(set(counts)) == 1
    # Batches with padding, and without, have programs of their own; sums begin with the first.
    assert len(zeros) == 1
    assert [ranks for ranks, _ in trainer.traced.programs] == [4, 4]
    # What the user compiles may compute something else.
    trainer.compile(make_parts(), optimizer)
    run(trainer.train_epoch, trainer, batches, num_steps=num_steps)
    assert len(traced) == counts[-1] + counts[0]
    assert len(zeros) == 2


def test_a_step_is_traced_and_compiled_for_fewer_ranks_before_a_process_is_lost(
    use_ranks, monkeypatch
):
    traced, compiled, sgd = [], [], optax.sgd(0.1)

    def update(*args, **kwargs):
        traced.append(1)
        return sgd.update(*args, **kwargs)

    def steps_of(job):
        return DataParallelSteps(job, Reduction())

    job, optimizer = use_ranks(4), optax.GradientTransformation(sgd.init, update)
    fewer = replace(job, mesh=make_data_mesh(job.mesh.devices[:3]))
    left = {4: fewer, 3: None}
    monkeypatch.setattr(type(job), "without_a_process", lambda job: left[job.num_ranks])
    start = Ahead.start
    monkeypatch.setattr(Ahead, "start", lambda own, lower: compiled.append(1) or start(own, lower))
    trainer, by_hand = make_trainer(job), ByHand()
    trainer.traced, trainer.steps_of = Kept(), steps_of
    trainer.compile(make_parts(), optimizer)
    trainer.build(None)
    batches = make_batches(16, 16, 16)
    run(trainer.train_epoch, trainer, batches[:1])
    assert not compiled  # The first step has no company.
    run(trainer.train_epoch, trainer, batches)
    trainer.ahead_of_loss.wait()
    assert len(compiled) == 1
    assert [ranks for ranks, _ in trainer.traced.programs] == [4, 3]
    before = len(traced)
    trainer.reopen(fewer, steps_of(fewer), trainer.kept())
    trainer.compile(make_parts(), optimizer)
    padded = make_batches(16, 16, size=18)
    run(trainer.train_epoch, trainer, padded)
    assert len(traced) == before
    assert [ranks for ranks, _ in trainer.traced.programs] == [4, 3]
    for batch in (*batches[:1], *batches, *padded):
        by_hand.train(batch)
    by_hand.assert_state_is(trainer.state)


def test_an_epoch_goes_on_from_its_middle_and_stops_when_told(use_ranks):
    trainer, by_hand, hooks = trained(use_ranks(2)), ByHand(), Hooks(stop_after=3)
    batches = make_batches(16, 16, 16, 16, 16)
    sums = run(trainer.train_epoch, trainer, batches[:2])
    saved = [np.asarray(leaf) for leaf in jax.tree.leaves(sums)]
    with feed(trainer, batches[2:]) as groups:
        sums = trainer.train_epoch(
            groups, hooks, first_index=2, sums=trainer.host_sums(saved, batches[2])
        )
    for batch in batches[:4]:
        by_hand.train(batch)
    by_hand.assert_state_is(trainer.state)
    by_hand.assert_sums_are(sums)
    assert [call[:2] for call in hooks.calls] == [
        ("begin", 2),
        ("end", 2),
        ("begin", 3),
        ("end", 3),
    ]


@pytest.mark.parametrize("num_ranks", long_but_last(1, 4))
def test_evaluation_and_prediction_read_real_rows_alone(use_ranks, num_ranks):
    trainer, by_hand, batches = trained(use_ranks(num_ranks)), ByHand(), make_batches(16, 16, 11)
    by_hand.clear()
    for batch in batches:
        by_hand.look(batch)
    x = np.concatenate([batch.inputs for batch in batches])[: 32 + 11]
    expected = x @ parameters()["w"] + parameters()["b"]
    for num_steps in (1, 2):
        by_hand.assert_sums_are(run(trainer.evaluate, trainer, batches, num_steps=num_steps))
        outputs = run(trainer.predict, trainer, batches, num_steps=num_steps)
        np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)
    by_hand.assert_state_is(trainer.state)


def test_of_no_batches_there_are_no_sums_and_no_predictions(use_ranks):
    trainer = trained(use_ranks(2))
    assert run(trainer.train_epoch, trainer, []) is None
    assert run(trainer.evaluate, trainer, []) is None
    with pytest.raises(ValueError, match="The dataset is empty: at least one example is needed"):
        run(trainer.predict, trainer, [])


def test_rows_of_shards_come_shard_after_shard(use_ranks):
    trainer = trained(use_ranks(2))
    batches = make_batches(16, 16)
    # Two processes, each with 8 rows of a batch of which some are padding.
    shards = ((slice(0, 8), slice(8, 13)), (slice(0, 3), slice(8, 9)))
    listed = [
        HostBatch(batch, None, sum(rows.stop - rows.start for rows in real), real)
        for batch, real in zip(batches, shards, strict=True)
    ]
    with device_feed(trainer, iter(listed), lambda item: item.data, threaded=False) as groups:
        outputs = trainer.predict(groups, Hooks())
    rows = [batches[step].inputs[shards[step][shard]] for shard in (0, 1) for step in (0, 1)]
    expected = np.concatenate(rows) @ parameters()["w"] + parameters()["b"]
    np.testing.assert_allclose(outputs, expected, rtol=1e-5, atol=1e-6)


def test_without_variables_there_is_an_error_that_says_how_to_get_them(use_ranks):
    trainer = make_trainer(use_ranks(1))
    with pytest.raises(RuntimeError, match=r"no variables yet\. Call build"):
        trainer.require_state()
    view = make_trainer(trainer.runtime, owner=trainer)
    with pytest.raises(RuntimeError, match="that this view was made from has no variables"):
        view.build(None)


def test_a_view_reads_the_state_of_its_owner(use_ranks):
    owner = trained(use_ranks(2))
    view = make_trainer(owner.runtime, owner=owner)
    view.build("inputs")
    assert view.adapter.attached == ["inputs"]
    assert view.state is owner.state
    run(owner.train_epoch, owner, make_batches(16))
    assert view.state is owner.state


def test_compiling_again_starts_another_optimizer_and_goes_on_with_the_same(use_ranks):
    adam = optax.adam(0.1)
    trainer = trained(use_ranks(2), optimizer=adam)
    run(trainer.train_epoch, trainer, make_batches(16, 16))
    weights = trainer.variables().params["w"]
    trainer.compile(make_parts(), adam)
    assert int(trainer.state.opt_state[0].count) == 2
    trainer.compile(make_parts(), optax.adam(0.1))
    assert int(trainer.state.opt_state[0].count) == 0
    np.testing.assert_array_equal(trainer.variables().params["w"], weights)
    trainer.compile(make_parts(), adam, accumulation_steps=2)
    assert trainer.state.accumulated["w"].shape == (2, 3)


def test_variables_are_copies_of_the_host(use_ranks):
    trainer = trained(use_ranks(2))
    before = trainer.variables()
    run(trainer.train_epoch, trainer, make_batches(16))
    np.testing.assert_array_equal(before.params["w"], parameters()["w"])
    assert type(before.params["w"]) is np.ndarray
    trainer.build_from(Variables({"w": np.zeros(3, "f4"), "b": np.float32(1)}, before.model_state))
    assert float(trainer.state.params["b"]) == 1


def test_the_state_is_whole_where_ranks_hold_parts_of_it(use_ranks):
    reduction = Reduction(shard_optimizer_state=True)
    trainer = trained(use_ranks(3), reduction=reduction, optimizer=optax.adam(0.1))
    run(trainer.train_epoch, trainer, make_batches(15, size=15))
    whole = trainer.gathered_state()
    assert {leaf.is_fully_replicated for leaf in jax.tree.leaves(whole.opt_state)} == {True}
    run(trainer.train_epoch, trainer, make_batches(15, size=15))
    assert not np.array_equal(
        trainer.gathered_state().opt_state[0].mu["w"], whole.opt_state[0].mu["w"]
    )


# Of 7 steps, 4 may run: the host has waited for the first 3, by their rows; for one device alone,
# for half of those that run whenever there are more.
@pytest.mark.parametrize(("num_ranks", "expected"), [(2, [16, 32, 48]), (1, [32, 64])])
def test_the_host_is_never_far_ahead_of_the_devices(use_ranks, monkeypatch, num_ranks, expected):
    trainer, waited = trained(use_ranks(num_ranks)), []
    monkeypatch.setattr(jax, "block_until_ready", lambda x: waited.append(float(x)))
    run(trainer.train_epoch, trainer, make_batches(*[16] * 7))
    assert waited == expected
