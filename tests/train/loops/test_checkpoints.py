"""A custom training loop goes on where it was saved: the same state, at the same row."""

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import tnt_jax as tnt

ROWS = np.arange(70)
STATE = {"params": {"w": np.arange(3.0, dtype=np.float32)}, "count": np.int32(7)}


@pytest.fixture(autouse=True)
def one_rank(use_ranks):
    use_ranks(1)


def dataset_of(data=ROWS, size=16, **options):
    return tnt.distribute(data, batch_size=size, **options)


def rows_of(batches):
    found = [np.ravel(batch.without_padding(batch.inputs)) for batch in batches]
    return [int(row) for rows in found for row in rows]


def rows_left(dataset, epochs):
    found = []
    while dataset.position["epoch"] < epochs:
        found += rows_of(dataset)
    return found


def save(folder, state, dataset, **options):
    checkpoints = tnt.LoopCheckpoints(folder)
    checkpoints.save(state, dataset, **options)
    checkpoints.close()


def restored(folder, state, dataset):
    return tnt.LoopCheckpoints(folder).restore(state, dataset)


@pytest.mark.parametrize("num_batches", [0, 1, 4, 5, 6, 10])
@pytest.mark.parametrize("stacked", [False, True])
def test_no_row_is_lost_or_seen_twice(tmp_path, num_batches, stacked):
    whole = rows_left(dataset_of(), 3)
    first, seen, count = dataset_of(), [], 0
    while count < num_batches:
        for batch in first.stacked(1) if stacked else first:
            seen += rows_of([batch])
            count += 1
            if count == num_batches:
                break
    save(tmp_path, STATE, first)
    again = dataset_of()
    state = restored(tmp_path, STATE, again)
    assert seen + rows_left(again, 3) == whole
    assert again.position["step"] == 15
    np.testing.assert_array_equal(state["params"]["w"], STATE["params"]["w"])


def test_a_dataset_that_sought_a_position_is_saved_there(tmp_path):
    first = dataset_of()
    first.seek({"epoch": 1, "batch": 3, "step": 8})
    save(tmp_path, STATE, first)
    again = dataset_of(size=12)
    restored(tmp_path, STATE, again)
    whole = dataset_of()
    next(iter(whole))
    assert rows_left(again, 2) == rows_of(whole)[48:]


def test_without_a_checkpoint_nothing_changes(tmp_path):
    dataset = dataset_of()
    assert restored(tmp_path, STATE, dataset) is STATE
    assert dataset.position == {"epoch": 0, "batch": 0, "step": 0}


def saved_within_an_epoch(folder, num_batches, **options):
    dataset = dataset_of(**options)
    for batch in dataset:
        if batch.step == num_batches - 1:
            break
    save(folder, STATE, dataset)


def test_another_global_batch_goes_on_at_the_same_row_or_is_refused(tmp_path, caplog):
    saved_within_an_epoch(tmp_path, 3)
    again = dataset_of(size=12)
    restored(tmp_path, STATE, again)
    assert "The global batch has 12 rows, 16 before" in caplog.text
    assert rows_left(again, 1) == rows_of(dataset_of())[48:]
    with pytest.raises(ValueError, match=r"done 48 rows of epoch 1 .* of 16 rows.* has 20 rows"):
        restored(tmp_path, STATE, dataset_of(size=20))


@pytest.mark.parametrize(
    ("data", "options", "text"),
    [
        (ROWS, {"seed": 5}, r"by the seed \d+, but the seed is 5"),
        (ROWS[:64], {}, r"another batches of an epoch: 5, and 4 now"),
        (ROWS, {"steps_per_epoch": 3}, r"had no steps_per_epoch, but this one has"),
    ],
)
def test_other_data_is_refused(tmp_path, data, options, text):
    saved_within_an_epoch(tmp_path, 2)
    with pytest.raises(ValueError, match=text):
        restored(tmp_path, STATE, dataset_of(data, **options))


def test_another_state_is_refused_by_the_names_of_its_arrays(tmp_path):
    save(tmp_path, STATE, dataset_of())
    other = {"params": {"w": np.ones(4, np.float32), "b": np.ones(1)}, "count": np.int32(0)}
    with pytest.raises(ValueError, match=r"not in the file: params/b; different: params/w"):
        restored(tmp_path, other, dataset_of())


def make_flax():
    params = {"kernel": jnp.ones((2, 3))}
    return TrainState.create(apply_fn=None, params=params, tx=optax.adam(0.1))


def make_nnx():
    model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param), nnx.Rngs(dropout=1)


def make_dict():
    return {"key": jax.random.key(3), "parts": [np.float32(1), (jnp.ones(2, jnp.bfloat16), 5)]}


def words(leaf):
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if is_key else leaf)


@pytest.mark.parametrize("make", [make_flax, make_nnx, make_dict])
def test_any_pytree_comes_back(tmp_path, make):
    def other(leaf):
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.fold_in(leaf, 1)
        return jnp.asarray(leaf) + 1

    state = jax.tree.map(other, make())
    save(tmp_path, state, dataset_of())
    found = restored(tmp_path, make(), dataset_of())
    assert type(found) is type(make())
    for one, two in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
        assert words(one).dtype == words(two).dtype
        np.testing.assert_array_equal(words(one), words(two))


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [
        ({"a/b": 1.0, "a": {"b": 2.0}}, ValueError, "Two arrays of the state have the path a/b"),
        ({"a.b": 1.0, "a": {"b": 2.0}}, ValueError, "a.b and a/b would have the same name"),
        (
            {"a": jnp.ones(3, jnp.uint4)},
            TypeError,
            "a has the dtype uint4, which checkpoints cannot",
        ),
    ],
)
def test_what_could_not_be_restored_is_refused_on_saving(tmp_path, state, error, text):
    with pytest.raises(error, match=text):
        save(tmp_path, state, dataset_of())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "state",
    [
        {"a.b": 1.0, "a": {"c.d": 2.0}},
        {"a/b": 1.0, "a": {"c": 2.0}},
        {"..": 1.0, "": 2.0, ".": 3.0},
        {name: jnp.ones(3, name) for name in ("int4", "bool", "bfloat16", "float8_e4m3fn")},
    ],
)
def test_odd_names_and_dtypes_come_back(tmp_path, state):
    save(tmp_path, state, dataset_of())
    found = restored(tmp_path, jax.tree.map(jnp.zeros_like, state), dataset_of())
    assert jax.tree.map(lambda x: (str(x.dtype), np.asarray(x).tolist()), found) == jax.tree.map(
        lambda x: (str(jnp.asarray(x).dtype), np.asarray(x).tolist()), state
    )


def test_notes_come_back(tmp_path):
    checkpoints = tnt.LoopCheckpoints(tmp_path)
    checkpoints.save(STATE, dataset_of(), notes={"best": [0.25, "a"]})
    checkpoints.close()
    again = tnt.LoopCheckpoints(tmp_path)
    assert again.notes == {}
    again.restore(STATE, dataset_of())
    assert again.notes == {"best": [0.25, "a"]}


def test_a_generator_cannot_go_back(tmp_path):
    def batches():
        for first in range(0, 64, 16):
            yield ROWS[first : first + 16]

    dataset = tnt.distribute(batches())
    next(iter(dataset))
    save(tmp_path, STATE, dataset)
    again = tnt.distribute(batches())
    restored(tmp_path, STATE, again)
    assert rows_left(again, 1) == list(range(16, 64))


def test_nan_does_not_replace_a_checkpoint(tmp_path, caplog):
    dataset = dataset_of()
    save(tmp_path, STATE, dataset)
    bad = {"params": {"w": np.full(3, np.nan, np.float32)}, "count": np.int32(8)}
    save(tmp_path, bad, dataset)
    assert "params/w holds NaN or infinity" in caplog.text
    assert restored(tmp_path, STATE, dataset_of())["count"] == 7


def rows_done(dataset):
    return dataset.describe_position()["data"]["rows"]


def test_rows_of_stacked_batches_are_counted_in_each_epoch():
    dataset = dataset_of()
    batches = dataset.stacked(3)
    next(batches)
    assert rows_done(dataset) == 48
    assert len(list(batches)) == 2
    assert rows_done(dataset) == 0


class Uneven:
    """Batches of three sizes, from the first on in each pass."""

    def __iter__(self):
        return iter([ROWS[:10], ROWS[10:30], ROWS[30:35]])


def test_rows_of_uneven_batches_are_counted_over_a_restart(tmp_path):
    dataset = tnt.distribute(Uneven())
    for batch in dataset:
        if batch.index == 1:
            break
    save(tmp_path, STATE, dataset)
    again = tnt.distribute(Uneven())
    restored(tmp_path, STATE, again)
    assert rows_done(again) == 30
    assert rows_left(again, 1) == list(range(30, 35))
