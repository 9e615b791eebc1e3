"""A distributed data set gives every row once an epoch, wherever it is taken up again."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensorflow as tf
from long_params import long_but_last
from own_loops import per_row
from reference_trainer import make_data

import tnt_jax as tnt
from tnt_jax.data import RandomAccess

X, Y, WEIGHT = make_data(23)
PARAMS = {"kernel": np.random.default_rng(1).normal(size=(6, 3)).astype(np.float32)}


def batches_of(size):
    return [(X[i : i + size], Y[i : i + size]) for i in range(0, len(X), size)]


KINDS = {
    "arrays": lambda: tnt.distribute(X, Y, batch_size=8, shuffle=False),
    "pair": lambda: tnt.distribute((X, Y), batch_size=8, shuffle=False),
    "list of batches": lambda: tnt.distribute(batches_of(8)),
    "generator": lambda: tnt.distribute(batch for batch in batches_of(8) * 3),
    "tf.data": lambda: tnt.distribute(tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)),
    "unbatched tf.data": lambda: tnt.distribute(
        tf.data.Dataset.from_tensor_slices((X, Y)), tnt_micro_batch_size=4
    ),
    "random access": lambda: tnt.distribute(RandomAccess(_Examples(), batch_size=8)),
    "DataLoader": lambda: tnt.distribute(_loader()),
}


def _loader():
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    rows = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    return torch.utils.data.DataLoader(rows, batch_size=8)


class _Examples:
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], Y[index]


@tnt.distributed_eval_step
def rows_of(state, batch):
    return tnt.reduce((batch.inputs, batch.targets), "concat")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_data_gives_each_row_once(use_ranks, kind):
    use_ranks(2)
    dataset = KINDS[kind]()
    found = []
    for index, batch in enumerate(dataset):
        found.append(batch.without_padding(rows_of({}, batch)))
        assert (batch.epoch, batch.index, batch.step) == (0, index, index)
        if kind == "generator" and index == 2:
            break
    x, y = (np.concatenate(parts) for parts in zip(*found, strict=True))
    order = np.lexsort(x.T)
    np.testing.assert_array_equal(x[order], X[np.lexsort(X.T)])
    np.testing.assert_array_equal(y[order], Y[np.lexsort(X.T)])
    assert [batch.num_rows for batch in [batch]] == [7]


def numbers(dataset, num_batches):
    """Returns the targets of the next batches, epoch after epoch."""
    found = []
    while len(found) < num_batches:
        for batch in dataset:
            found.append(batch.without_padding(rows_of({}, batch))[1].tolist())
            if len(found) == num_batches:
                break
    return found


@pytest.mark.parametrize("kind", ["arrays", "list of batches", "random access"])
@pytest.mark.parametrize("done", [0, 2, 3, 4, 7])
def test_a_sought_data_set_goes_on_as_the_one_before(use_ranks, kind, done):
    use_ranks(2)

    def make():
        if kind == "arrays":
            return tnt.distribute(X, np.arange(23), batch_size=8, seed=3)
        return KINDS[kind]()

    expected = numbers(make(), 8)
    first, second = make(), make()
    assert numbers(first, done) == expected[:done] if done else True
    second.seek(first.position)
    assert numbers(second, 8 - done) == expected[done:]


def test_an_epoch_that_is_left_has_ended(use_ranks):
    use_ranks(2)
    dataset = tnt.distribute(X, Y, batch_size=8, steps_per_epoch=2)
    assert len(dataset) == 2
    for _ in dataset:
        break
    assert dataset.position == {"epoch": 0, "batch": 1, "step": 1}
    iterator = iter(dataset)
    batch = next(iterator)
    assert (batch.epoch, batch.index, batch.step) == (1, 0, 1)
    # Three batches make a pass, which ends an epoch as in `fit`.
    assert list(iterator) == []
    assert dataset.position == {"epoch": 2, "batch": 0, "step": 2}


def test_a_remainder_can_be_dropped(use_ranks):
    use_ranks(2)
    dataset = tnt.distribute(X, Y, batch_size=8, drop_remainder=True)
    assert [batch.num_rows for batch in dataset] == [8, 8]
    assert (len(dataset), dataset.global_batch_size) == (2, 8)


@pytest.mark.parametrize("num_ranks", long_but_last(1, 3))
def test_results_and_metrics_are_those_of_the_whole_data(use_ranks, num_ranks):
    use_ranks(num_ranks)
    mean, accuracy, seen = (
        tnt.metrics.Mean(),
        tnt.metrics.SparseCategoricalAccuracy(),
        tnt.metrics.Sum(),
    )

    @tnt.distributed_eval_step
    def evaluate(params, batch):
        losses, logits = per_row(params, batch), batch.inputs @ params["kernel"]
        mean.update_state(losses, batch.weight)
        accuracy.update_state(batch.targets, logits)
        seen.update_state(jnp.ones_like(losses))
        correct = jnp.argmax(logits, -1) == batch.targets
        results = {op: tnt.reduce(losses, op) for op in ("sum", "mean", "max", "min", "concat")}
        half = tnt.reduce(losses.astype(jnp.bfloat16), "sum")
        return results | {"correct": tnt.reduce(correct), "any": tnt.reduce(correct, "max"),
                          "all": tnt.reduce(correct, "min"), "half": half}  # fmt: skip

    dataset = tnt.distribute(X, Y, sample_weight=WEIGHT, batch_size=8, shuffle=False)
    logits = X @ PARAMS["kernel"]
    losses = np.asarray(optax.softmax_cross_entropy_with_integer_labels(logits, Y))
    correct = logits.argmax(-1) == Y
    for _ in range(2):
        for batch in dataset:
            part = slice(8 * batch.index, 8 * batch.index + batch.num_rows)
            found = evaluate(PARAMS, batch)
            np.testing.assert_allclose(
                batch.without_padding(found["concat"]), losses[part], rtol=1e-5
            )
            for op in ("sum", "mean", "max", "min"):
                expected = getattr(np, op)(losses[part])
                np.testing.assert_allclose(found[op], expected, rtol=1e-5, err_msg=op)
            np.testing.assert_allclose(found["half"], np.sum(losses[part]), rtol=1e-2)
            assert found["correct"] == correct[part].sum()
            assert (found["any"], found["all"]) == (correct[part].any(), correct[part].all())
        weighted = np.sum(losses * WEIGHT) / np.sum(WEIGHT)
        np.testing.assert_allclose(mean.result(), weighted, rtol=1e-5)
        np.testing.assert_allclose(accuracy.result(), correct.mean(), rtol=1e-6)
        assert seen.result() == len(X)
        for metric in (mean, accuracy, seen):
            metric.reset_state()
    for batches in dataset.stacked(2):
        evaluate.scan(PARAMS, batches)
    assert seen.result() == len(X)
    np.testing.assert_allclose(accuracy.result(), correct.mean(), rtol=1e-6)
