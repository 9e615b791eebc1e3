"""Metrics: Keras's numbers, and sums that do not depend on how rows are cut."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from keras_beside import by_keras, computed, skip_on_oldest_keras
from long_params import long_but_last

from tnt_jax.keras_compat import losses, metrics

RNG = np.random.default_rng(1)


def labels_and_scores(rows, classes=6, *, time=None):
    shape = (rows,) if time is None else (rows, time)
    powers = np.exp(RNG.normal(size=(*shape, classes)) * 2)
    scores = powers / powers.sum(axis=-1, keepdims=True)
    return RNG.integers(0, classes, size=shape), scores.astype("float32")


def one_hot_and_scores(rows, classes=6, *, time=None):
    labels, scores = labels_and_scores(rows, classes, time=time)
    return np.eye(classes, dtype="float32")[labels], scores


def binary(rows, outputs=1, *, time=None):
    shape = (rows, outputs) if time is None else (rows, time, outputs)
    return RNG.integers(0, 2, size=shape).astype("float32"), RNG.random(shape).astype("float32")


def real(rows, outputs=3, *, time=None):
    shape = (rows, outputs) if time is None else (rows, time, outputs)
    return RNG.normal(size=shape).astype("float32"), RNG.normal(size=shape).astype("float32")


def positive(rows, *, time=None):
    return tuple(np.abs(a) for a in real(rows, time=time))


def signs(rows, *, time=None):
    y_true, y_pred = binary(rows, time=time)
    return 2 * y_true - 1, 4 * y_pred - 2


def signs_from_zero(rows, *, time=None):
    y_true, y_pred = signs(rows, time=time)
    return (y_true + 1) / 2, y_pred


def many_binary(rows, *, time=None):
    return binary(rows, outputs=4, time=time)


def rounded(rows, *, time=None):
    return tuple(np.round(a) for a in real(rows, time=time))


CASES = [
    ("Accuracy", {}, rounded),
    ("BinaryAccuracy", {}, binary),
    ("BinaryAccuracy", {"threshold": 0.3}, binary),
    ("CategoricalAccuracy", {}, one_hot_and_scores),
    ("SparseCategoricalAccuracy", {}, labels_and_scores),
    ("TopKCategoricalAccuracy", {"k": 3}, one_hot_and_scores),
    ("SparseTopKCategoricalAccuracy", {"k": 2}, labels_and_scores),
    ("MeanSquaredError", {}, real),
    ("MeanAbsoluteError", {}, real),
    ("RootMeanSquaredError", {}, real),
    ("BinaryCrossentropy", {}, binary),
    ("BinaryCrossentropy", {"from_logits": True, "label_smoothing": 0.1}, binary),
    ("CategoricalCrossentropy", {"label_smoothing": 0.1}, one_hot_and_scores),
    ("SparseCategoricalCrossentropy", {}, labels_and_scores),
    ("SparseCategoricalCrossentropy", {"from_logits": True, "ignore_class": 2}, labels_and_scores),
    ("MeanAbsolutePercentageError", {}, real),
    ("MeanSquaredLogarithmicError", {}, positive),
    ("LogCoshError", {}, real),
    ("CosineSimilarity", {}, real),
    ("Hinge", {}, signs),
    ("SquaredHinge", {}, signs),
    ("CategoricalHinge", {}, one_hot_and_scores),
    ("KLDivergence", {}, one_hot_and_scores),
    ("Poisson", {}, positive),
]

COUNTED = [
    ("R2Score", {}, real),
    ("R2Score", {"class_aggregation": "variance_weighted_average"}, real),
    ("Precision", {}, binary),
    ("Precision", {"thresholds": [0.2, 0.7]}, many_binary),
    ("Precision", {"top_k": 2}, one_hot_and_scores),
    ("Precision", {"class_id": 1}, one_hot_and_scores),
    ("Recall", {}, binary),
    ("Recall", {"thresholds": [0.0, 0.5, 1.0]}, many_binary),
    ("Recall", {"top_k": 3, "class_id": 0}, one_hot_and_scores),
    ("TruePositives", {}, binary),
    ("FalsePositives", {"thresholds": 0.3}, binary),
    ("TrueNegatives", {}, binary),
    ("FalseNegatives", {"thresholds": [0.1, 0.9]}, many_binary),
    ("AUC", {}, binary),
    ("AUC", {"num_thresholds": 7, "summation_method": "minoring"}, binary),
    ("AUC", {"summation_method": "majoring", "thresholds": [0.3, 0.35, 0.9]}, binary),
    ("AUC", {"curve": "PR"}, binary),
    ("AUC", {"curve": "PR", "summation_method": "majoring"}, binary),
    ("AUC", {"from_logits": True}, signs_from_zero),
    ("AUC", {"multi_label": True}, many_binary),
    (
        "AUC",
        {"multi_label": True, "curve": "PR", "label_weights": [1.0, 2.0, 0.0, 1.0]},
        many_binary,
    ),
]
COUNTED_IDS = [f"{name}-{'-'.join(map(str, settings.items()))}" for name, settings, _ in COUNTED]
IDS = [f"{name}-{'-'.join(map(str, settings))}" for name, settings, _ in CASES]


def keras_metrics():
    return pytest.importorskip("keras").metrics


def add(left, right):
    return jax.tree.map(jnp.add, left, right)


def cut(y_true, y_pred, weight, micro):
    """Returns the arrays in parts [parts, micro, ...]; rows of weight 0 pad the last part, with
    outputs that are no numbers.
    """
    rows = len(y_pred)
    index = np.arange(-(-rows // micro) * micro).reshape(-1, micro)
    real, index = index < rows, np.minimum(index, rows - 1)
    outputs = y_pred[index]
    outputs[~real] = np.inf
    outputs[-1, -1] = np.nan
    return y_true[index], outputs, real * (np.float32(1) if weight is None else weight[index])


def sums_in_parts(metric, batches, micro):
    """Returns the sums of batches that are cut into parts of `micro` rows."""
    sums = [jax.vmap(metric.increments)(*cut(*batch, micro)) for batch in batches]
    return jax.tree.map(lambda *parts: sum(part.sum(axis=0) for part in parts), *sums)


def check_against_keras(name, settings, batch, *, weighted, time):
    if name == "SparseCategoricalCrossentropy" and "ignore_class" in settings:
        skip_on_oldest_keras("has no ignore_class in this metric")
    ours, theirs = getattr(metrics, name)(**settings), getattr(keras_metrics(), name)(**settings)
    batches = [
        (*batch(rows, time=time), RNG.random(rows).astype("float32") if weighted else None)
        for rows in (100, 7)
    ]

    def results():
        for y_true, y_pred, weight in batches:
            ours.update_state(y_true, y_pred, sample_weight=weight)
        total = jax.tree.map(lambda *a: sum(a), *(ours.increments(*batch) for batch in batches))
        found = ours.result(), ours.compute(total), ours.compute(sums_in_parts(ours, batches, 34))
        return found, by_keras(theirs, batches)

    found, expected = computed(results)
    np.testing.assert_allclose(found, [expected] * 3, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "settings", "batch"), COUNTED, ids=COUNTED_IDS)
@pytest.mark.parametrize("weighted", [pytest.param(False, marks=pytest.mark.long), True])
def test_counted_metric_equals_keras_whole_and_in_parts(name, settings, batch, weighted):
    check_against_keras(name, settings, batch, weighted=weighted, time=None)


# With weights, Keras leaves the values at ignore_class out of the mean; without, it does not. Here
# they are always in it.
WEIGHTED = [
    pytest.param(*case, weighted, id=f"{case_id}-{'weighted' if weighted else 'unweighted'}")
    for case, case_id in zip(CASES, IDS, strict=True)
    for weighted in (False, True)
    if not (weighted and "ignore_class" in case[1])
]


@pytest.mark.parametrize(("name", "settings", "batch", "weighted"), WEIGHTED)
@pytest.mark.parametrize("time", [pytest.param(None, marks=pytest.mark.long), 3])
def test_metric_equals_keras_whole_and_in_parts(name, settings, batch, weighted, time):
    check_against_keras(name, settings, batch, weighted=weighted, time=time)


@pytest.mark.parametrize(
    ("name", "settings", "batch"), CASES[::4] + COUNTED[::4], ids=IDS[::4] + COUNTED_IDS[::4]
)
def test_increments_summed_over_ranks_equal_those_of_the_batch(name, settings, batch):
    metric = getattr(metrics, name)(**settings)
    y_true, y_pred = batch(8)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(y_true, y_pred):
        return jax.lax.psum(metric.increments(y_true, y_pred), "data")

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P())
    found, expected = computed(
        lambda *batch: [metric.compute(f(*batch)) for f in (mapped, metric.increments)],
        y_true,
        y_pred,
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("ignore_class", long_but_last(None, 2))
@pytest.mark.parametrize("weighted", [False, True])
def test_mean_iou_equals_keras_whole_and_in_parts(ignore_class, weighted):
    settings = {"num_classes": 6, "ignore_class": ignore_class, "sparse_y_pred": False}
    ours, theirs = metrics.MeanIoU(**settings), keras_metrics().MeanIoU(**settings)
    y_true, y_pred = labels_and_scores(101)
    y_true[5] = 7
    weight = (
        RNG.integers(0, 4, size=101) if weighted else None
    )  # Keras truncates weights to integers.
    batches = [(y_true, y_pred, weight)]
    whole, parts, expected = computed(
        lambda: (
            ours(*batches[0]),
            ours.compute(sums_in_parts(ours, batches, 9)),
            by_keras(theirs, batches),
        )
    )
    np.testing.assert_allclose([whole, parts], [expected] * 2, rtol=1e-6)
    assert theirs.name.startswith(ours.name)  # Keras numbers the instances of a process.


def test_iou_counts_every_label_beyond_2_to_the_24():
    def update(metric):
        metric.total_cm.assign([[2**24 + 1, 3], [2**25 + 1, 0]])
        for _ in range(3):
            metric.update_state([0, 1, 0], [0, 0, 0])
        return metric.result()

    ours, theirs = metrics.MeanIoU(2), keras_metrics().MeanIoU(2)
    np.testing.assert_allclose(update(ours), update(theirs), rtol=1e-6)
    np.testing.assert_array_equal(ours.total_cm, [[2**24 + 7, 3], [2**25 + 4, 0]])
    many = computed(lambda y: metrics.BinaryIoU().increments(y, y), np.zeros(2**24 + 9, bool))
    assert int(many["total_cm"][0, 0]) == 2**24 + 9
    ours.update_state([1, 1], [0, 0], sample_weight=[0.25, 2.5])
    np.testing.assert_array_equal(ours.total_cm, [[2**24 + 7, 3], [2**25 + 6, 0]])
    np.testing.assert_array_equal(ours.fractions, [[0, 0], [0.75, 0]])
    again = metrics.deserialize(metrics.serialize(ours))
    assert again.total_cm.dtype == ours.total_cm.dtype == "int32"


@pytest.mark.parametrize("cls", [metrics.Precision, metrics.Recall, metrics.AUC])
def test_nothing_to_count_gives_zero(cls):
    metric = cls()
    nothing = np.zeros((4, 1)), np.zeros((4, 1)), np.zeros(4)
    assert computed(lambda *batch: metric.compute(metric.increments(*batch)), *nothing) == 0
    assert metric.name == cls.__name__.lower()


def test_a_mean_of_precisions_would_be_wrong():
    y_true, y_pred = np.array([1.0, 0, 0, 0]), np.array([0.9, 0.1, 0.9, 0.9])
    metric = metrics.Precision()
    parts = [metric.increments(y_true[part], y_pred[part]) for part in (slice(2), slice(2, 4))]
    assert [float(metric.compute(part)) for part in parts] == [1.0, 0.0]
    np.testing.assert_allclose(metric.compute(add(*parts)), 1 / 3)


@pytest.mark.parametrize("weights", ["values", "broadcast"])
def test_weights_of_single_values_equal_keras(weights):
    y_true, y_pred = labels_and_scores(9, time=4)
    weight = RNG.random((9, 4) if weights == "values" else (9, 1)).astype("float32")
    ours, theirs = metrics.SparseCategoricalAccuracy(), keras_metrics().SparseCategoricalAccuracy()
    found, expected = computed(
        lambda *batch: (ours(*batch), by_keras(theirs, [batch])), y_true, y_pred, weight
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_mean_and_sum_equal_keras():
    values, weight = RNG.normal(size=(5, 3)).astype("float32"), RNG.random(5).astype("float32")
    for ours, theirs in [
        (metrics.Mean(), keras_metrics().Mean()),
        (metrics.Sum(), keras_metrics().Sum()),
    ]:
        assert float(ours.result()) == 0
        for given in (None, weight):
            theirs.update_state(values, sample_weight=given)
            np.testing.assert_allclose(
                ours(values, sample_weight=given), theirs.result(), rtol=1e-6
            )
        ours.update_state(2.0)
        theirs.update_state(2.0)
        np.testing.assert_allclose(ours.result(), theirs.result(), rtol=1e-6)
        ours.reset_state()
        assert float(ours.result()) == 0


def test_labels_with_a_class_dimension_of_one():
    y_true, y_pred = labels_and_scores(20)
    for cls in (metrics.SparseCategoricalAccuracy, metrics.SparseTopKCategoricalAccuracy):
        column, flat = computed(
            lambda y, cls=cls: (cls()(y[:, None], y_pred), cls()(y, y_pred)), y_true
        )
        assert column == flat


def test_top_k_counts_ties_and_refuses_nan():
    scores = np.array([[1.0, 1.0, 0.0], [np.nan, 1.0, 0.0]])
    np.testing.assert_array_equal(
        metrics.sparse_top_k_categorical_accuracy(jnp.array([1, 0]), scores, 1), [1, 0]
    )


@pytest.mark.parametrize(
    ("name", "batch", "expected"),
    [
        ("accuracy", labels_and_scores, "SparseCategoricalAccuracy"),
        ("acc", one_hot_and_scores, "CategoricalAccuracy"),
        ("Accuracy", binary, "BinaryAccuracy"),
        ("mse", real, "MeanSquaredError"),
        ("MAE", real, "MeanAbsoluteError"),
        ("binary_accuracy", binary, "BinaryAccuracy"),
        ("RootMeanSquaredError", real, "RootMeanSquaredError"),
    ],
)
def test_get_by_name_chooses_as_keras_does(name, batch, expected):
    y_true, y_pred = batch(5)
    metric = metrics.get(name, y_true.shape, y_pred.shape)
    from keras.src.trainers.compile_utils import get_metric

    theirs = get_metric(name, y_true, y_pred)
    assert (type(metric).__name__, metric.name) == (expected, name)
    assert (type(theirs).__name__, theirs.name) == (expected, name)
    found, expected = computed(
        lambda *batch: (metric(*batch), by_keras(theirs, [(*batch, None)])), y_true, y_pred
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_labels_of_one_column_are_sparse():
    assert isinstance(metrics.get("accuracy", (8, 1), (8, 5)), metrics.SparseCategoricalAccuracy)


def test_crossentropy_takes_logits_where_the_loss_does():
    metric = metrics.get(
        "crossentropy", (8,), (8, 5), loss=losses.SparseCategoricalCrossentropy(True)
    )
    assert not metric.loss.expects_probabilities
    assert metrics.get("ce", (8,), (8, 5)).loss.expects_probabilities


def test_get_takes_instances_classes_losses_and_functions():
    instance = metrics.Mean()
    assert metrics.get(instance) is instance
    assert isinstance(metrics.get(metrics.BinaryAccuracy), metrics.BinaryAccuracy)
    y_true, y_pred = real(7)

    def my_error(y_true, y_pred):
        return (y_true - y_pred) ** 2

    given = [
        losses.MeanSquaredError(),
        losses.MeanSquaredError,
        losses.mean_squared_error,
        my_error,
    ]
    found = computed(lambda *batch: [metrics.get(each)(*batch) for each in given], y_true, y_pred)
    np.testing.assert_allclose(found, [np.mean((y_true - y_pred) ** 2)] * 4, rtol=1e-6)
    assert metrics.get(my_error).name == "my_error"
    assert metrics.get(losses.sparse_categorical_crossentropy).loss.expects_probabilities
