"""A custom step in several passes has the result of one pass, or says why it cannot have it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from own_loops import make_state
from reference_trainer import Net, make_data
from training import assert_close

import tnt_jax as tnt
from tnt_jax.train import memory_choice
from tnt_jax.train.loops.engine import Engine

# Batches that neither four ranks nor passes divide evenly.
NUM_EXAMPLES, SIZE = 22, 11


def make_step(net, accuracy, **options):
    """Returns a step with dropout, weights, two losses, a penalty, a metric and values of rows."""

    @tnt.distributed_step(**options)
    def train_step(state, batch, key):
        def loss_fn(params, batch, key):
            logits = net.apply({"params": params}, batch.inputs, train=True, rngs={"dropout": key})
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
            accuracy.update_state(batch.targets, logits)
            entropy = tnt.compute_average_loss(losses, batch.weight)
            square = tnt.compute_average_loss(logits**2)
            penalty = tnt.scale_regularization_loss(1e-2 * optax.tree.norm(params))
            return sum([entropy, square / 2]) * 0.5 + penalty, (entropy, {"logits": logits})

        (loss, (entropy, aux)), grads = tnt.value_and_grad(loss_fn, has_aux=True)(
            state.params, batch, key
        )
        logits = tnt.reduce(aux["logits"], "concat")
        return state.apply_gradients(grads=grads), {"loss": loss, "ce": entropy, "logits": logits}

    return train_step


def train(**options):
    x, y, weight = make_data(NUM_EXAMPLES)
    net, accuracy = Net(dropout=0.4), tnt.metrics.SparseCategoricalAccuracy()
    step, state = make_step(net, accuracy, **options), make_state(net, optax.sgd(0.1), x)
    dataset = tnt.distribute(x, y, sample_weight=weight, batch_size=SIZE, shuffle=False)
    seen = []
    for _ in range(2):
        for batch in dataset:
            state, metrics = step(state, batch, jax.random.key(0))
            metrics["logits"] = batch.without_padding(metrics["logits"])
            seen.append(jax.device_get(metrics))
    for batches in dataset.stacked():
        state, metrics = step.scan(state, batches, jax.random.key(0))
        seen.append(jax.device_get(metrics["loss"]))
    return state.params, seen, float(accuracy.result())


@pytest.fixture(scope="module")
def in_one_pass():
    tnt.shutdown()
    tnt.init(devices=[0])
    yield train()
    tnt.shutdown()


@pytest.mark.parametrize(
    ("num_ranks", "rows"),
    [
        (1, 5),
        (4, 2),
        pytest.param(1, 1, marks=pytest.mark.long),
        pytest.param(2, 4, marks=pytest.mark.long),
    ],
)
def test_passes_give_what_one_pass_gives(use_ranks, in_one_pass, num_ranks, rows):
    use_ranks(num_ranks)
    params, seen, accuracy = train(rows_at_once=rows)
    assert_close(params, in_one_pass[0])
    assert_close(
        [x for x in seen if isinstance(x, dict)], [x for x in in_one_pass[1] if isinstance(x, dict)]
    )
    assert accuracy == pytest.approx(in_one_pass[2])


def test_as_many_rows_as_fit_the_memory_are_computed_at_once(use_ranks, monkeypatch):
    """The steps of `fit` choose alike: see `test_fit_memory.py`."""
    x = np.random.default_rng(0).normal(size=(4096, 16)).astype(np.float32)
    y = np.arange(4096) % 5
    net, results, chosen = (
        nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(64), nn.relu, nn.Dense(5)]),
        [],
        [],
    )
    params = jax.device_get(net.init(jax.random.key(0), x[:1])["params"])
    choose = memory_choice.choose
    monkeypatch.setattr(
        "tnt_jax.train.loops.engine.choose",
        lambda *args: chosen.append(choose(*args)) or chosen[-1],
    )
    for memory in (None, "2MiB", "1500KiB"):
        if memory:
            monkeypatch.setenv("TNT_DEVICE_MEMORY", memory)
        use_ranks(2)

        @tnt.distributed_step(rows_at_once="auto")
        def step(params, batch):
            def loss_fn(params, batch):
                logits = net.apply({"params": params}, batch.inputs)
                losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
                return tnt.compute_average_loss(losses)

            loss, grads = tnt.value_and_grad(loss_fn)(params, batch)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), {"loss": loss}

        for batch in tnt.distribute(x, y, batch_size=4096, shuffle=False):
            results.append(jax.device_get(step(params, batch)))
    rows = [choice.rows_at_once for choice in chosen]
    assert rows[0] is None
    assert 1 < rows[2] < rows[1] < 2048
    assert all(choice.attempts[-1][-1].nbytes <= choice.limit for choice in chosen)
    assert_close(results[1:], results[:1] * 2)


def test_a_step_that_finds_no_memory_gets_its_state_back(use_ranks, monkeypatch, in_one_pass):
    """Real lack of memory: see `test_out_of_memory.py`."""
    use_ranks(1)
    jitted, failed = Engine._jitted, []

    def failing(self, rows_at_once, *, stacked):
        program = jitted(self, rows_at_once, stacked=stacked)

        def step(state, *others):
            if (stacked, rows_at_once) in ((False, None), (False, 4), (True, None)):
                failed.append((stacked, rows_at_once))
                jax.tree.map(lambda x: x.delete(), state)
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory.")
            return program(state, *others)

        step.trace = program.trace
        return step

    monkeypatch.setattr(Engine, "_jitted", failing)
    params, _, accuracy = train(rows_at_once="auto")
    assert failed == [(False, None), (False, 4), (True, None)]
    assert_close(params, in_one_pass[0])
    assert accuracy == pytest.approx(in_one_pass[2])


class Module(nnx.Module):
    def __init__(self, norm=False):
        rngs = nnx.Rngs(0)
        self.first, self.last = nnx.Linear(6, 8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(8, axis_name="data", rngs=rngs) if norm else lambda x: x
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def train_nnx(norm=False, **options):
    x, y, _ = make_data(NUM_EXAMPLES)

    @tnt.distributed_step(**options)
    def step(state, batch, key):
        module, optimizer = state

        def loss_fn(module, x, y):
            return tnt.compute_average_loss(
                optax.softmax_cross_entropy_with_integer_labels(module(x), y)
            )

        loss, grads = tnt.value_and_grad(loss_fn)(module, batch.inputs, batch.targets)
        optimizer.update(module, grads)
        return (module, optimizer), {"loss": loss}

    module, losses = Module(norm), []
    state = module, nnx.Optimizer(module, optax.sgd(0.1), wrt=nnx.Param)
    for batch in tnt.distribute(x, y, batch_size=SIZE, shuffle=False):
        state, metrics = step(state, batch, jax.random.key(0))
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get(nnx.state(state[0], nnx.Param))


def test_the_module_of_a_pass_draws_for_its_rows(use_ranks):
    use_ranks(1)
    expected = train_nnx()
    use_ranks(2)
    assert_close(train_nnx(rows_at_once=2), expected)


def losses_of(params, batch):
    return (batch.inputs @ params - 1) ** 2


def step_of(loss_fn, *, closes=False, has_aux=False):
    """Returns a step of a loss function of parameters, batch and key."""

    def step(params, batch, key):
        function = (lambda p: loss_fn(p, batch, key)) if closes else loss_fn
        args = () if closes else (batch, key)
        _, grads = tnt.value_and_grad(function, has_aux=has_aux)(params, *args)
        return params - (0 if grads is None else grads), {}

    return step


def average(params, batch, key):
    return tnt.compute_average_loss(losses_of(params, batch))


def statistics(params, batch, key):
    return average(params, batch, key), jnp.mean(batch.inputs, axis=0)


def weights_of_as_many_entries(params, batch, key):
    return average(params, batch, key), jnp.broadcast_to(params[:1], (2, 1)) * jnp.arange(2)[
        :, None
    ]


def without_our_gradient(params, batch, key):
    return params - jax.grad(average)(params, batch, key), {}


def computed_before(params, batch, key):
    batch = batch._replace(inputs=2 * batch.inputs)
    return params - tnt.grad(average)(params, batch, key), {}


WRONG = {
    "gradient of JAX": (without_our_gradient, "computes no gradient with tnt_jax.value_and_grad"),
    "computed before": (computed_before, "or that were computed from these before"),
    "closed over": (step_of(average, closes=True), r"value_and_grad\(loss_fn\)\(params, batch, key\)"),
    "logarithm": (step_of(lambda *a: jnp.log(average(*a))), "LossOfPass"),
    "product": (step_of(lambda *a: average(*a) * average(*a)), "multiplied by numbers only"),
    "rows as a factor": (
        step_of(lambda p, b, k: average(p, b, k) * jnp.mean(b.inputs)), "The loss differs between ranks",
    ),
    "unscaled penalty": (step_of(lambda p, b, k: average(p, b, k) + jnp.sum(p)), "scale_regularization"),
    "penalty of rows": (
        step_of(lambda p, b, k: average(p, b, k) + tnt.scale_regularization_loss(jnp.mean(b.inputs))),
        "a penalty of its loss depends on the rows",
    ),
    "statistics": (step_of(statistics, has_aux=True), r"returns float32\[6\], which has no value for each"),
    "no rows": (step_of(weights_of_as_many_entries, has_aux=True), "has no value for each row"),
    "reduced inside": (
        step_of(lambda p, b, k: (average(p, b, k), tnt.reduce(losses_of(p, b))), has_aux=True),
        "reduce them outside",
    ),
    "communicates": (
        step_of(lambda p, b, k: tnt.compute_average_loss(
            losses_of(p, b) * jax.lax.pmean(jnp.mean(b.inputs), "data"))),
        "communicates with other ranks|compares rows of a batch",
    ),
    "compares rows": (
        step_of(lambda p, b, k: tnt.compute_average_loss(losses_of(p, b) @ jnp.ones(len(b.inputs)) + 0 * losses_of(p, b))),
        "compares rows of a batch",
    ),
}  # fmt: skip


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("name", WRONG)
def test_what_passes_would_change_is_refused(use_ranks, num_ranks, name):
    use_ranks(num_ranks)
    step, text = WRONG[name]
    x, y, _ = make_data(4 * num_ranks)
    step = tnt.distributed_step(step, rows_at_once=2)
    for batch in tnt.distribute(x, y, batch_size=4 * num_ranks, shuffle=False):
        with pytest.raises((ValueError, TypeError), match=text):
            step(jnp.ones(6), batch, jax.random.key(0))


def test_statistics_of_an_nnx_module_are_refused(use_ranks):
    use_ranks(1)
    with pytest.raises(ValueError, match=r"communicates with other ranks"):
        train_nnx(norm=True, rows_at_once=2)


@pytest.mark.parametrize("rows", [0, "Auto", 1.5])
def test_other_numbers_of_rows_are_refused(rows):
    with pytest.raises(ValueError, match="rows_at_once must be a number of rows, 'auto' or None"):
        tnt.distributed_step(step_of(average), rows_at_once=rows)
