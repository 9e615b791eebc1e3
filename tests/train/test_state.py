"""The state of training: what it starts with, and where a trainer puts it."""

import jax
import numpy as np
import optax
import pytest
from linear_steps import model_state, parameters
from long_params import long_but_last

from tnt_jax.distributed.sums.reduction import Reduction
from tnt_jax.train.contracts import Start
from tnt_jax.train.state import create_state, started_at_once
from tnt_jax.train.steps.data_parallel import DataParallelSteps


def make_state(optimizer=None, **ranks):
    return create_state(parameters(), model_state(), optimizer or optax.adam(0.1), seed=5, **ranks)


def test_a_state_starts_at_step_0_with_the_arrays_given():
    state = make_state()
    assert int(state.step) == 0
    assert state.step.dtype == np.int32
    np.testing.assert_array_equal(state.params["w"], parameters()["w"])
    np.testing.assert_array_equal(state.model_state["mean"], model_state()["mean"])
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(
        optax.adam(0.1).init(parameters())
    )
    assert state.accumulated is None
    assert state.residual is None


def test_the_key_is_the_words_of_the_threefry_key_of_the_seed():
    key = make_state().key
    assert key.dtype == np.uint32
    np.testing.assert_array_equal(key, [0, 5])  # JAX: the seed's two halves of 32 bits.


@pytest.mark.parametrize("part", ["accumulated", "residual"])
def test_each_rank_keeps_a_row_of_zeros_for_its_own_gradients(part):
    option = {"accumulated": "accumulating_ranks", "residual": "compressing_ranks"}[part]
    rows = getattr(make_state(**{option: 4}), part)
    assert rows["w"].shape == (4, 3)
    assert rows["b"].shape == (4,)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(rows))


def test_a_state_is_a_pytree_of_all_its_arrays():
    state = make_state(optax.sgd(0.1), accumulating_ranks=2)
    # Step, two parameters, two arrays of model state, key, two accumulated; SGD has no state.
    assert len(jax.tree.leaves(state)) == 8
    doubled = jax.tree.map(lambda x: 2 * x, state)
    np.testing.assert_array_equal(doubled.params["w"], 2 * parameters()["w"])


@pytest.mark.parametrize("num_ranks", long_but_last(1, 2, 4, 8))
def test_put_on_devices_all_is_replicated_but_the_rows_of_ranks(use_ranks, num_ranks):
    runtime = use_ranks(num_ranks)
    steps = DataParallelSteps(runtime, Reduction())
    host = make_state(accumulating_ranks=num_ranks, compressing_ranks=num_ranks)
    state = steps.put_state(host)
    for (path, leaf), expected in zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(host), strict=True
    ):
        np.testing.assert_array_equal(leaf, expected)
        by_row = path[0].name in ("accumulated", "residual")
        shards = [shard.data.shape for shard in leaf.addressable_shards]
        own = (1, *leaf.shape[1:]) if by_row else leaf.shape
        assert shards == [own] * num_ranks, path


@pytest.mark.parametrize("num_ranks", long_but_last(2, 8))
def test_with_a_sharded_optimizer_each_rank_holds_a_part_of_its_state(use_ranks, num_ranks):
    runtime = use_ranks(num_ranks)
    steps = DataParallelSteps(runtime, Reduction(shard_optimizer_state=True))
    params = {"w": np.ones((16, 3), np.float32)}
    variables = type("Variables", (tuple,), {})((params, {}))
    state = steps.put_state(steps.create_state(variables, Start(optax.adam(0.1), seed=0)))
    held = [shard.data.size for shard in state.opt_state[0].mu["w"].addressable_shards]
    assert held == [48 // num_ranks] * num_ranks
    assert {shard.data.size for shard in state.params["w"].addressable_shards} == {48}


def reading(params):
    """An `init` that needs the values of parameters."""
    return {"sum": np.float32(float(params["w"].sum())), "like": jax.tree.map(np.copy, params)}


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adam(0.1),
        optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.9),
        optax.contrib.schedule_free_sgd(0.1),
        optax.GradientTransformation(reading, optax.sgd(0.1).update),
        optax.identity(),
    ],
)
def test_an_optimizer_that_starts_at_once_has_the_state_of_its_own_init(optimizer):
    expected = optimizer.init(parameters())
    found = started_at_once(optimizer).init(parameters())
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.asarray(one).dtype == np.asarray(other).dtype


def test_an_optimizer_starts_by_one_program():
    programs = []

    def note(event, seconds, **about):
        if event == "/jax/core/compile/backend_compile_duration":
            programs.append(about.get("fun_name"))

    params = {str(n): np.zeros((n, 3), np.float32) for n in range(40, 60)}
    optimizer = started_at_once(optax.adam(0.1))
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        optimizer.init(params)
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    assert len(programs) == 1


def test_an_error_of_an_init_is_its_own():
    def init(params):
        raise KeyError("no such parameter")

    optimizer = started_at_once(optax.GradientTransformation(init, optax.sgd(0.1).update))
    with pytest.raises(KeyError, match="no such parameter"):
        optimizer.init(parameters())
