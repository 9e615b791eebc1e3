"""What users of other libraries most often get wrong in several processes: here it is right by
itself, or refused with a remedy. The pages list these cases.
"""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from long_params import long_but_last

import tnt_jax as tnt
from tnt_jax.cluster.clusters import detect_job

ROWS, FEATURES, CLASSES = 22, 5, 3
_RNG = np.random.default_rng(0)
X = _RNG.normal(size=(ROWS, FEATURES)).astype(np.float32)
Y = _RNG.integers(0, CLASSES, ROWS)
KERNEL = _RNG.normal(size=(FEATURES, CLASSES)).astype(np.float32)
VARIABLES = {"params": {"kernel": KERNEL, "bias": np.zeros(CLASSES, np.float32)}}


def cross_entropy(kernel=KERNEL, rows=slice(None)):
    """Returns the loss of each row, computed by NumPy."""
    logits = (X[rows] @ kernel).astype(np.float64)
    logits -= logits.max(1, keepdims=True)
    picked = np.take_along_axis(logits, Y[rows][:, None], 1)[:, 0]
    return np.log(np.exp(logits).sum(1)) - picked


def make(loss="sparse", *, optimizer=None, module=None, **compile_arguments):
    model = tnt.Model(module or nn.Dense(CLASSES), variables=None if module else VARIABLES)
    if loss == "sparse":
        loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or optax.sgd(0.1), loss, **compile_arguments)
    return model


# From Horovod and PyTorch.


@pytest.mark.parametrize("num_ranks", long_but_last(1, 4))
def test_the_rate_is_that_of_the_optimizer_on_any_number_of_ranks(num_ranks, use_ranks):
    """Not the rate times or divided by the ranks: gradients are neither summed nor averaged twice."""
    use_ranks(num_ranks)
    model = make()
    model.fit(X, Y, batch_size=ROWS, shuffle=False, verbose=0)

    def loss(kernel):
        return optax.softmax_cross_entropy_with_integer_labels(X @ kernel, Y).mean()

    expected = KERNEL - 0.1 * np.asarray(jax.grad(loss)(KERNEL))
    np.testing.assert_allclose(model.variables["params"]["kernel"], expected, atol=1e-6)


@pytest.mark.parametrize("num_ranks", long_but_last(1, 4))
def test_a_schedule_counts_updates_and_not_the_steps_of_every_rank(num_ranks, use_ranks):
    use_ranks(num_ranks)
    schedule = tnt.schedules.PiecewiseConstantDecay([2], [1.0, 0.0])
    model = make(optimizer=tnt.optimizers.SGD(schedule))
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
    assert model.optimizer.iterations == 6  # Batches of 8, 8 and 6 rows, twice.


def test_a_logged_loss_is_that_of_all_rows_and_not_a_mean_of_means(use_ranks):
    use_ranks(4)
    model = make(optimizer=optax.sgd(0.0))
    # Batches of 8, 8 and 6 rows: the last has ranks of 2, 2, 2 and 0 rows.
    logged = model.fit(X, Y, batch_size=8, verbose=0).history["loss"]
    np.testing.assert_allclose(logged, [cross_entropy().mean()], rtol=1e-6)


def test_evaluation_counts_no_row_twice(use_ranks):
    """`DistributedSampler` repeats rows so that all processes have equally many."""
    use_ranks(4)
    model = make(metrics=["accuracy"])
    loss, accuracy = model.evaluate(X, Y, batch_size=8, verbose=0)
    np.testing.assert_allclose(loss, cross_entropy().mean(), rtol=1e-6)
    np.testing.assert_allclose(accuracy, ((X @ KERNEL).argmax(1) == Y).mean(), rtol=1e-6)
    assert len(model.predict(X, batch_size=8, verbose=0)) == ROWS


def test_a_loader_that_reads_a_shard_is_refused(use_ranks):
    use_ranks(2)
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    dataset = torch.utils.data.TensorDataset(torch.tensor(X), torch.tensor(Y))
    sampler = torch.utils.data.DistributedSampler(dataset, num_replicas=2, rank=0)
    loader = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler)
    with pytest.raises(ValueError, match=r"one of 2 shards.*tnt_distribute_dataset=False"):
        make().fit(loader, verbose=0)


# From tf.distribute.


def test_a_loss_that_is_averaged_by_hand_is_refused(use_ranks):
    use_ranks(2)

    def averaged(targets, outputs):
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(outputs, targets))

    with pytest.raises(ValueError, match="one value per row"):
        make(averaged).fit(X, Y, batch_size=8, verbose=0)


def test_a_loss_that_is_divided_by_the_batch_is_trained_as_written_with_a_warning(
    use_ranks, capsys
):
    def divided(targets, outputs):
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, targets)
        return losses / len(targets)

    use_ranks(2)
    history = make(divided).fit(X, Y, batch_size=ROWS, verbose=0).history
    np.testing.assert_allclose(history["loss"], [cross_entropy().mean() / ROWS], rtol=1e-5)
    assert "Do not average over the rows of the batch: the step does" in capsys.readouterr().err


class Decayed(nn.Module):
    @nn.compact
    def __call__(self, x):
        dense = nn.Dense(CLASSES, use_bias=False, kernel_init=lambda *_: jnp.asarray(KERNEL))
        outputs = dense(x)
        self.sow("losses", "decay", 0.01 * jnp.sum(dense.variables["params"]["kernel"] ** 2))
        return outputs


@pytest.mark.parametrize("num_ranks", long_but_last(1, 4))
def test_a_regularisation_counts_once_whatever_the_ranks(num_ranks, use_ranks):
    use_ranks(num_ranks)
    model = make(module=Decayed(), optimizer=optax.sgd(0.0))
    logged = model.fit(X, Y, batch_size=ROWS, verbose=0).history["loss"]
    expected = cross_entropy().mean() + 0.01 * np.sum(KERNEL.astype(np.float64) ** 2)
    np.testing.assert_allclose(logged, [expected], rtol=1e-6)


def test_labels_of_several_dimensions_are_averaged_over_all_of_them(use_ranks):
    use_ranks(4)
    images = _RNG.normal(size=(10, 3, 4, 2)).astype(np.float32)
    labels = _RNG.integers(0, 2, (10, 3, 4))
    model = tnt.Model(nn.Sequential([lambda x: x]))
    model.compile("sgd", tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
    expected = optax.softmax_cross_entropy_with_integer_labels(images, labels).mean()
    loss = model.evaluate(images, labels, batch_size=8, verbose=0)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


# In a custom training loop; `tests/train/loops/test_wrong_steps.py` has what is refused.


def step_of(loss_of, *, after=lambda loss, grads, hits: (grads, loss)):
    """Returns a step of gradient descent; `after` says what becomes of loss and gradients."""

    @tnt.distributed_step
    def step(params, batch):
        def loss_fn(params):
            logits = batch.inputs @ params["kernel"]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
            return loss_of(losses, params), logits.argmax(-1) == batch.targets

        (loss, hits), grads = tnt.value_and_grad(loss_fn, has_aux=True)(params)
        grads, metrics = after(loss, grads, hits)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), metrics

    return step


def run(step, batch_size=ROWS):
    params = {"kernel": jnp.asarray(KERNEL)}
    metrics = []
    for batch in tnt.distribute(X, Y, batch_size=batch_size, shuffle=False):
        params, metric = step(params, batch)
        metrics.append(metric)
    return params["kernel"], metrics


def right(losses, params):
    return tnt.compute_average_loss(losses)


def penalty(params):
    return 0.01 * jnp.sum(params["kernel"] ** 2)


@pytest.mark.parametrize("num_ranks", long_but_last(1, 4))
def test_a_loop_counts_rows_and_penalties_once(num_ranks, use_ranks):
    use_ranks(num_ranks)
    step = step_of(
        lambda losses, params: (
            right(losses, params) + tnt.scale_regularization_loss(penalty(params))
        ),
        after=lambda loss, grads, hits: (
            jax.tree.map(jnp.zeros_like, grads),
            (loss, tnt.reduce(hits, "mean")),
        ),
    )
    _, metrics = run(step, batch_size=8)
    hits = (X @ KERNEL).argmax(1) == Y
    extra = 0.01 * np.sum(KERNEL.astype(np.float64) ** 2)
    for (loss, accuracy), start in zip(metrics, (0, 8, 16), strict=True):
        rows = slice(start, start + 8)
        np.testing.assert_allclose(loss, cross_entropy(rows=rows).mean() + extra, rtol=1e-6)
        np.testing.assert_allclose(accuracy, hits[rows].mean(), rtol=1e-6)


@pytest.mark.parametrize("num_ranks", long_but_last(1, 4))
def test_every_epoch_has_another_order_of_the_same_rows(num_ranks, use_ranks):
    """Without `sampler.set_epoch`, every epoch of PyTorch's sampler has the same one."""
    use_ranks(num_ranks)
    numbers = np.arange(ROWS, dtype=np.float32)

    @tnt.distributed_step
    def read(state, batch):
        return state, tnt.reduce(batch.inputs, "concat")

    dataset, epochs = tnt.distribute(numbers, batch_size=8, seed=1), []
    for _ in range(2):
        rows = [batch.without_padding(read({}, batch)[1]) for batch in dataset]
        epochs.append(np.concatenate(rows))
    assert not np.array_equal(*epochs)
    for epoch in epochs:
        np.testing.assert_array_equal(np.sort(epoch), numbers)


def test_parameter_servers_are_refused_with_what_to_do():
    cluster = {"worker": ["a:1", "b:1"], "ps": ["c:1"]}
    environment = {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    }
    with pytest.raises(
        ValueError, match="Leave the ps entries out and start workers only, or train with"
    ):
        detect_job(environment)
