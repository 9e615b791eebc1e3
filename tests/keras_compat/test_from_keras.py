"""Real Keras losses, metrics, optimizers and schedules inside our step, beside Keras alone on one
device.
"""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from keras_beside import apply_keras, by_keras, computed

from tnt_jax.keras_compat import keras_objects, losses, metrics, optimizers

keras = pytest.importorskip("keras")
RNG = np.random.default_rng(3)


def mesh(size=4):
    return jax.make_mesh((size,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def over_ranks(function):
    """Returns `function` on the rows of four ranks, summed over them."""
    return jax.shard_map(
        lambda *parts: jax.lax.psum(function(*parts), "data"),
        mesh=mesh(),
        in_specs=P("data"),
        out_specs=P(),
    )


class Quartic(keras.losses.Loss):
    def call(self, y_true, y_pred):
        return keras.ops.mean((y_true - y_pred) ** 4, axis=-1)


class Largest(keras.metrics.Metric):
    """A maximum over rows does not add up."""

    def __init__(self, name="largest"):
        super().__init__(name=name)
        self.value = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign(keras.ops.maximum(self.value, keras.ops.max(y_pred)))

    def result(self):
        return self.value


class MeanOfMeans(Largest):
    """The mean of a batch added up depends on how rows are cut."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign_add(keras.ops.mean(y_pred))


class CountRows(Largest):
    """Counts rows of weight 0."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.value.assign_add(len(y_pred))


class WithoutWeights(Largest):
    def update_state(self, y_true, y_pred):
        self.value.assign_add(keras.ops.sum(y_pred))


class CountRight(Largest):
    """Has a result that is a variable, and a variable that is never updated."""

    def __init__(self, name="count_right"):
        super().__init__(name)
        self.start = self.add_variable((), "ones")

    def update_state(self, y_true, y_pred, sample_weight=None):
        right = keras.ops.cast(
            keras.ops.round(y_pred) == keras.ops.cast(y_true, "float32"), "float32"
        )
        right = keras.ops.sum(keras.ops.reshape(right, (right.shape[0], -1)), axis=-1)
        self.start.assign_add(
            keras.ops.sum(right if sample_weight is None else right * sample_weight)
        )

    def result(self):
        return self.start


# losses


@pytest.mark.parametrize(
    "loss",
    [
        keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2, name="mine"),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum"),
    ],
)
def test_keras_losses_of_ours_become_ours(loss):
    y_true, y_pred = RNG.integers(0, 5, size=(8, 3)), RNG.normal(size=(8, 3, 5)).astype("float32")
    ours = losses.get(loss)
    assert type(ours) is losses.SparseCategoricalCrossentropy
    assert (ours.name, ours.reduction) == (loss.name, loss.reduction)
    found, expected = computed(lambda *batch: [f(*batch) for f in (ours, loss)], y_true, y_pred)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


NOT_LOSSES = {"Loss", "LossFunctionWrapper", "deserialize", "get", "serialize"}


@pytest.mark.parametrize("name", sorted(set(losses.__all__) & set(dir(keras.losses)) - NOT_LOSSES))
def test_every_keras_class_and_function_of_our_names_is_recognised(name):
    given = getattr(keras.losses, name)
    if isinstance(given, type):
        assert type(losses.get(given())).__module__.startswith("tnt_jax")
        assert type(losses.get(given)) is getattr(losses, name)
    else:
        assert losses.get(given).fn is getattr(losses, name)


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", "mean_with_sample_weight"])
@pytest.mark.parametrize("make", [Quartic, lambda **kw: keras.losses.Tversky(axis=1, **kw)])
def test_other_keras_losses_add_up_over_ranks(make, reduction):
    loss = make(reduction=reduction)
    y_true, y_pred = RNG.integers(0, 2, size=(8, 3)), RNG.random((8, 3)).astype("float32")
    weight = RNG.random(8).astype("float32")
    ours = losses.get(loss)

    def results(*batch):
        return ours(*batch), over_ranks(ours.terms)(*batch), loss(*batch)

    whole, (total, count), expected = computed(results, y_true, y_pred, weight)
    np.testing.assert_allclose(whole, expected, rtol=1e-6)
    np.testing.assert_allclose(total if count is None else total / count, expected, rtol=1e-6)


def test_padding_does_not_reach_a_keras_loss():
    y_true, y_pred = (
        np.ones((3, 2), "float32"),
        np.array([[0.5, 0.5], [0.1, 0.2], [np.nan, np.nan]], "float32"),
    )
    (total, count), expected = computed(
        lambda true, pred: (
            losses.get(Quartic()).terms(true, pred, None, np.array([1.0, 1.0, 0.0])),
            Quartic()(true[:2], pred[:2]),
        ),
        y_true,
        y_pred,
    )
    np.testing.assert_allclose(total / count, expected, rtol=1e-6)


def test_losses_that_compare_rows_are_refused():
    with pytest.raises(ValueError, match="'circle' compares every row with every other"):
        jax.eval_shape(losses.get(keras.losses.Circle()).terms, np.ones(4), np.ones((4, 2)))
    with pytest.raises(ValueError, match=r"returned values of shape \(\).*one value per row"):
        jax.eval_shape(losses.get(keras.losses.Dice()).terms, np.ones((4, 2)), np.ones((4, 2)))


# metrics

METRICS = [
    (keras.metrics.F1Score, {"average": "macro", "threshold": 0.4}, 3),
    (keras.metrics.FBetaScore, {"average": "micro", "beta": 2.0}, 3),
    (keras.metrics.AUC, {"num_thresholds": 50}, 1),
    (keras.metrics.AUC, {"multi_label": True, "curve": "PR"}, 3),
    (keras.metrics.AUC, {"curve": "PRGAIN"}, 1),
    (keras.metrics.AUC, {"label_weights": [0.1, 0.2, 0.7]}, 3),
    (keras.metrics.Precision, {"thresholds": 0.3}, 3),
    (keras.metrics.SensitivityAtSpecificity, {"specificity": 0.4}, 1),
    (keras.metrics.PrecisionAtRecall, {"recall": 0.6}, 1),
    (keras.metrics.BinaryIoU, {"target_class_ids": [0, 1], "threshold": 0.5}, 1),
    (keras.metrics.RootMeanSquaredError, {}, 3),
    (keras.metrics.MeanAbsoluteError, {}, 3),
    (keras.metrics.R2Score, {}, 3),
    (keras.metrics.R2Score, {"num_regressors": 2, "class_aggregation": None}, 3),
    (keras.metrics.PearsonCorrelation, {}, 3),
    (CountRight, {}, 3),
]


@pytest.mark.parametrize(
    ("cls", "settings", "outputs"), METRICS, ids=[f"{cls.__name__}-{s}" for cls, s, _ in METRICS]
)
def test_keras_metrics_over_ranks_and_steps_equal_keras_alone(cls, settings, outputs):
    theirs, ours = cls(**settings), metrics.get(cls(**settings), (8, outputs), (8, outputs))
    theirs.reset_state()  # As before every epoch.
    increments = jax.jit(over_ranks(ours.increments))
    sums = None
    for _ in range(3):
        y_true = RNG.integers(0, 2, size=(8, outputs)).astype("float32")
        if cls is keras.metrics.PearsonCorrelation:  # Equal targets have none.
            y_true = RNG.random((8, outputs)).astype("float32")
        y_pred = RNG.random((8, outputs)).astype("float32")
        mask = np.array([1, 1, 1, 1, 1, 1, 0, 0], "float32")
        theirs.update_state(y_true[:6], y_pred[:6])
        added = increments(y_true, y_pred, mask)
        sums = added if sums is None else jax.tree.map(jnp.add, sums, added)
    np.testing.assert_allclose(ours.compute(sums), theirs.result(), rtol=1e-5)


@pytest.mark.parametrize(
    ("metric", "problem"),
    [
        (Largest(), "updates of two parts do not add up"),
        (MeanOfMeans(), "updates of two parts do not add up"),
        (WithoutWeights(), "update_state failed on random rows with sample_weight"),
        (CountRows(), "rows of sample_weight 0 change the state"),
    ],
)
def test_metrics_that_do_not_add_up_are_refused_with_the_reason(metric, problem):
    with pytest.raises(
        ValueError, match=rf"cannot be computed from parts of the data: .*{problem}"
    ):
        metrics.get(metric, (8, 3), (8, 3))


class HitsByClass(keras.metrics.Metric):
    """Mean over classes of how often the label, which is an index, has the largest output."""

    def __init__(self, name="hits"):
        super().__init__(name=name)
        self.hits = self.add_variable((3,), "zeros", name="hits")
        self.rows = self.add_variable((3,), "zeros", name="rows")

    def update_state(self, y_true, y_pred, sample_weight=None):
        weight = keras.ops.ones(len(y_true)) if sample_weight is None else sample_weight
        is_hit = keras.ops.cast(keras.ops.argmax(y_pred, -1) == y_true, "float32")
        self.hits.assign_add(keras.ops.segment_sum(is_hit * weight, y_true, 3))
        self.rows.assign_add(keras.ops.segment_sum(weight, y_true, 3))

    def result(self):
        return keras.ops.mean(self.hits / keras.ops.maximum(self.rows, 1))


class RowsByClass(metrics.Metric):
    """Share of the rows that class 0 has."""

    def __init__(self):
        super().__init__(name="rows")
        self.rows = self.add_variable((3,), "zeros", name="rows")

    def update_state(self, y_true, y_pred, sample_weight=None):
        weight = jnp.ones(len(y_true)) if sample_weight is None else sample_weight
        self.rows.assign_add(jnp.zeros(3).at[y_true].add(weight))

    def result(self):
        return self.rows.value[0] / self.rows.value.sum()


@pytest.mark.parametrize("make", [HitsByClass, RowsByClass])
def test_a_metric_may_use_labels_as_indices(make):
    y_true, y_pred = RNG.integers(0, 3, 8), RNG.random((8, 3), "float32")
    ours, theirs = metrics.get(make(), (8,), (8, 3)), make()
    theirs.update_state(y_true, y_pred)
    np.testing.assert_allclose(ours(y_true, y_pred), theirs.result(), rtol=1e-6)


def test_a_keras_metric_needs_shapes():
    with pytest.raises(ValueError, match="needs the shapes of targets and outputs"):
        metrics.get(keras.metrics.AUC())


def test_names_that_only_keras_has():
    metric = metrics.get("f1_score", (8, 3), (8, 3))
    assert metric.name == "f1_score"
    y_true, y_pred = np.eye(3, dtype="float32"), RNG.dirichlet(np.ones(3), 3).astype("float32")
    found, expected = computed(
        lambda *batch: (metric(*batch), by_keras(keras.metrics.F1Score(), [(*batch, None)])),
        y_true,
        y_pred,
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert losses.get("tversky").name == "tversky"
    assert optimizers.get("ftrl").name == "ftrl"
    with pytest.raises(
        ValueError,
        match=r"Unknown loss 'nonsense'.*Names of Keras beyond these are known too, "
        r"but",
    ):
        losses.get("nonsense")


# optimizers

OPTIMIZERS = [
    keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    keras.optimizers.Adam(0.01, clipnorm=0.5, weight_decay=0.1),
    keras.optimizers.Nadam(),
    keras.optimizers.Adafactor(),
    keras.optimizers.Muon(),
    keras.optimizers.Ftrl(0.1),
    # The oldest Keras has none.
    *(make(0.01) for make in [getattr(keras.optimizers, "ScheduleFreeAdamW", None)] if make),
    keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9),
    keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 4, 0.5)),
]


def params_and_grads(steps=20):
    def draw():
        dense = {"kernel": RNG.normal(size=(3, 4)), "bias": RNG.normal(size=4)}
        return {"embedding": RNG.normal(size=(5, 3)), "dense": dense}

    return tuple(
        jax.tree.map(lambda a: a.astype("float32"), tree)
        for tree in (draw(), [draw() for _ in range(steps)])
    )


@pytest.mark.parametrize(
    "optimizer", OPTIMIZERS, ids=[f"{i}-{o.name}" for i, o in enumerate(OPTIMIZERS)]
)
def test_twenty_steps_over_ranks_equal_keras_alone(optimizer):
    params, grads = params_and_grads()
    theirs = type(optimizer).from_config(optimizer.get_config())
    with keras.name_scope("dense"):  # In the order of jax.tree.leaves.
        flat = [keras.Variable(params["dense"][name], name=name) for name in ("bias", "kernel")]
    flat.append(keras.Variable(params["embedding"], name="embedding"))
    theirs.build(flat)
    ours = optimizers.get(optimizer)
    transformation = ours.transformation()
    state = transformation.init(params)

    def step(params, state, grads):
        grads = jax.tree.map(lambda g: jax.lax.psum(g[0], "data") / 4, grads)
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.jit(
        jax.shard_map(step, mesh=mesh(), in_specs=(P(), P(), P("data")), out_specs=P())
    )
    apply_keras(theirs, [jax.tree.leaves(grad) for grad in grads], flat)
    for grad in grads:
        params, state = mapped(params, state, jax.tree.map(lambda g: np.stack([g] * 4), grad))
    for leaf, variable in zip(jax.tree.leaves(params), flat, strict=True):
        np.testing.assert_allclose(leaf, np.asarray(variable.value), rtol=1e-5, atol=1e-6)
    if optimizer.use_ema:
        theirs.finalize_variable_values(flat)
        for leaf, variable in zip(jax.tree.leaves(ours.averaged_params(state)), flat, strict=True):
            np.testing.assert_allclose(leaf, np.asarray(variable.value), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(
        optimizers.read_learning_rate(state), optimizer_rate(theirs), rtol=1e-6
    )


def optimizer_rate(optimizer):
    """Returns the rate of the last update: that of a schedule has moved on."""
    schedule = optimizer._learning_rate
    is_schedule = isinstance(schedule, keras.optimizers.schedules.LearningRateSchedule)
    return schedule(19) if is_schedule else float(optimizer.learning_rate)


def test_the_rate_of_a_keras_optimizer_is_settable():
    transformation = optimizers.get(keras.optimizers.SGD(0.5)).transformation()
    params = {"w": jnp.ones(2)}
    state = optimizers.write_learning_rate(transformation.init(params), 0.25)
    updates, state = transformation.update(params, state, params)
    np.testing.assert_allclose(updates["w"], -0.25, rtol=1e-6)
    np.testing.assert_allclose(optimizers.read_learning_rate(state), 0.25)


def test_weight_decay_exclusions_by_name_are_kept():
    optimizer = keras.optimizers.SGD(1.0, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    transformation = optimizers.get(optimizer).transformation()
    params = {"bias": jnp.ones(1), "kernel": jnp.ones(1)}
    updates, _ = transformation.update(
        jax.tree.map(jnp.zeros_like, params), transformation.init(params), params
    )
    assert (float(updates["bias"][0]), float(updates["kernel"][0])) == (0.0, -0.5)


def test_keras_optimizers_that_need_more_than_gradients_are_refused():
    by_object = keras.optimizers.SGD(weight_decay=0.1)
    by_object.exclude_from_weight_decay(var_list=[keras.Variable(1.0)])
    with pytest.raises(
        ValueError,
        match=r"excludes variables from weight decay that do not belong to this model.*var_names",
    ):
        optimizers.get(by_object).transformation().init({"w": jnp.ones(2)})
    with pytest.raises(ValueError, match="keeps no averaged weights"):
        optimizers.get(keras.optimizers.SGD()).averaged_params(None)


def test_a_keras_schedule_drives_our_optimizer_over_ranks():
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10, warmup_target=0.5, warmup_steps=3)
    transformation = optimizers.SGD(schedule).transformation()
    params = {"w": jnp.ones(2)}
    state = transformation.init(params)
    update = jax.jit(jax.shard_map(transformation.update, mesh=mesh(), in_specs=P(), out_specs=P()))
    for step in range(6):
        updates, state = update(params, state, params)
        np.testing.assert_allclose(updates["w"], -float(schedule(step)), rtol=1e-6)


# Keras missing, or on another backend


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout


def test_an_unknown_name_without_keras_says_how_to_get_more():
    code = """
import sys
sys.modules.pop("keras", None)
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *args: None if name == "keras" else find_spec(name, *args)
from tnt_jax.keras_compat import losses
assert "keras" not in sys.modules
try:
    losses.get("tversky_")
except ValueError as error:
    print(error)
"""
    assert "Names of Keras beyond these need Keras: pip install keras." in run(code)


def test_keras_on_another_backend_is_named(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "torch")
    with pytest.raises(ValueError, match=r"Keras uses 'torch'. Set KERAS_BACKEND=jax"):
        losses.get(Quartic())
    with pytest.raises(ValueError, match=r"need its JAX backend, but Keras uses 'torch'"):
        losses.get("tversky_")
    assert keras_objects.find_class("tversky", "losses") is None


def test_accumulation_is_left_to_the_step():
    assert (
        optimizers.get(
            keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
        ).gradient_accumulation_steps
        == 3
    )
