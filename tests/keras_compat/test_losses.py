"""Losses: Keras's values, sums that add up over ranks, and checks of the first batch."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from keras_beside import computed, skip_on_oldest_keras
from long_params import long_but_last

from tnt_jax.keras_compat import losses

RNG = np.random.default_rng(0)


def softmax(x):
    powers = np.exp(x)
    return powers / powers.sum(axis=-1, keepdims=True)


def class_batch(rows=7, classes=5, *, time=None, logits=True):
    shape = (rows,) if time is None else (rows, time)
    outputs = RNG.normal(size=(*shape, classes)).astype("float32") * 2
    return RNG.integers(0, classes, size=shape), outputs if logits else softmax(outputs)


def soft_batch(rows=7, classes=5, *, time=None, logits=True):
    labels, outputs = class_batch(rows, classes, time=time, logits=logits)
    return np.eye(classes, dtype="float32")[labels], outputs


def binary_batch(rows=7, outputs=3, *, time=None, logits=True):
    shape = (rows, outputs) if time is None else (rows, time, outputs)
    y_pred = RNG.normal(size=shape).astype("float32") * 2
    return RNG.integers(0, 2, size=shape).astype("float32"), y_pred if logits else 1 / (
        1 + np.exp(-y_pred)
    )


def real_batch(rows=7, outputs=3, *, time=None, logits=True):
    shape = (rows, outputs) if time is None else (rows, time, outputs)
    return RNG.normal(size=shape).astype("float32"), RNG.normal(size=shape).astype("float32")


def count_batch(rows=7, **kwargs):
    return RNG.poisson(2.0, size=(rows, 3)).astype("float32"), RNG.random((rows, 3)).astype(
        "float32"
    ) * 4


def sign_batch(**kwargs):
    y_true, y_pred = binary_batch(**kwargs)
    return 2 * y_true - 1, y_pred


def sequence_batch(**kwargs):
    labels, outputs = class_batch(time=4, **kwargs)
    return np.where(RNG.random(labels.shape) < 0.3, -1, labels), outputs


CASES = [
    ("SparseCategoricalCrossentropy", {"from_logits": True}, class_batch),
    ("SparseCategoricalCrossentropy", {}, class_batch),
    ("SparseCategoricalCrossentropy", {"from_logits": True, "ignore_class": -1}, sequence_batch),
    ("SparseCategoricalCrossentropy", {"ignore_class": -1}, sequence_batch),
    ("CategoricalCrossentropy", {"from_logits": True}, soft_batch),
    ("CategoricalCrossentropy", {"from_logits": True, "label_smoothing": 0.1}, soft_batch),
    ("CategoricalCrossentropy", {"label_smoothing": 0.2}, soft_batch),
    ("BinaryCrossentropy", {"from_logits": True}, binary_batch),
    ("BinaryCrossentropy", {"from_logits": True, "label_smoothing": 0.1}, binary_batch),
    ("BinaryCrossentropy", {}, binary_batch),
    ("MeanSquaredError", {}, real_batch),
    ("MeanAbsoluteError", {}, real_batch),
    ("MeanAbsolutePercentageError", {}, real_batch),
    ("MeanSquaredLogarithmicError", {}, real_batch),
    ("Huber", {}, real_batch),
    ("Huber", {"delta": 0.3}, real_batch),
    ("LogCosh", {}, real_batch),
    ("CosineSimilarity", {}, real_batch),
    ("Poisson", {}, count_batch),
    ("Hinge", {}, sign_batch),
    ("Hinge", {}, binary_batch),
    ("SquaredHinge", {}, sign_batch),
    ("CategoricalHinge", {}, soft_batch),
    ("KLDivergence", {}, soft_batch),
    ("BinaryFocalCrossentropy", {}, binary_batch),
    (
        "BinaryFocalCrossentropy",
        {"from_logits": True, "gamma": 1.5, "apply_class_balancing": True, "alpha": 0.4},
        binary_batch,
    ),
    ("CategoricalFocalCrossentropy", {"label_smoothing": 0.1}, soft_batch),
    ("CategoricalFocalCrossentropy", {"from_logits": True, "alpha": 0.5}, soft_batch),
]
IDS = [f"{name}-{'-'.join([*settings, batch.__name__])}" for name, settings, batch in CASES]
NUM_ROWS = 197  # No multiple of the numbers of ranks.
REDUCTIONS = ["sum_over_batch_size", "sum", "mean_with_sample_weight"]
# Reductions and weights are the same code for every loss: the whole grid for one with and one
# without ignored labels, whose values are those of the rows.
GRID = [
    pytest.param(*case, reduction, weights, id=f"{case_id}-{reduction}-{weights}")
    for i, (case, case_id) in enumerate(zip(CASES, IDS, strict=True))
    for reduction in REDUCTIONS
    for weights in (None, "rows", "values")
    if i == 2
    or (i == 0 and weights != "rows")
    or (reduction, weights) == ("sum_over_batch_size", "values")
]


def make(batch, settings, **kwargs):
    """Returns targets, and logits or probabilities as the settings say."""
    return batch(logits=settings.get("from_logits", False), **kwargs)


def keras_losses():
    return pytest.importorskip("keras").losses


def cut(arrays, ranks):
    """Cuts each array [rows, ...] into equal parts [ranks, rows of a rank, ...], padding with the
    last row, and returns the parts with their masks.
    """
    rows = arrays[0].shape[0]
    micro = -(-rows // ranks)
    index = np.arange(micro * ranks).reshape(ranks, micro)
    parts = [None if a is None else a[np.minimum(index, rows - 1)] for a in arrays]
    return parts, (index < rows).astype("float32")


@pytest.mark.parametrize(("name", "settings", "batch", "reduction", "weights"), GRID)
@pytest.mark.parametrize("ranks", long_but_last(2, 5))
def test_loss_of_the_batch_and_of_padded_parts_equals_keras(
    name, settings, batch, reduction, weights, ranks
):
    if settings == {"ignore_class": -1}:
        skip_on_oldest_keras("gives NaN as gradients of ignored labels")
    ours = getattr(losses, name)(reduction=reduction, **settings)
    theirs = getattr(keras_losses(), name)(reduction=reduction, **settings)
    y_true, y_pred = make(batch, settings, rows=NUM_ROWS)
    shape = jax.eval_shape(ours.call, y_true, y_pred).shape
    # Keras takes weights of rows only as [rows, 1] when values are [rows, time].
    weight_shape = {None: (), "rows": shape[:1] + (1,) * (len(shape) - 1), "values": shape}[weights]
    weight = None if weights is None else RNG.random(weight_shape).astype("float32")
    part_weight = weight[:, 0] if weights == "rows" and len(shape) > 1 else weight
    (true_parts, pred_parts, weight_parts), masks = cut([y_true, y_pred, part_weight], ranks)
    # Whatever padded rows hold.
    bad_rows = np.flatnonzero(masks[-1] == 0)
    pred_parts[-1, bad_rows], pred_parts[-1, bad_rows[-1:]] = np.nan, np.inf
    if weight is not None:
        weight_parts[-1, bad_rows] = np.nan

    def in_parts(pred_parts):
        totals, counts = jax.vmap(ours.terms)(true_parts, pred_parts, weight_parts, masks)
        return totals.sum() if counts is None else losses.divide_no_nan(totals.sum(), counts.sum())

    def values_and_grads(y_pred, pred_parts):
        return [
            jax.value_and_grad(lambda p: ours(y_true, p, weight))(y_pred),
            jax.value_and_grad(lambda p: theirs(y_true, p, weight))(y_pred),
            jax.value_and_grad(in_parts)(pred_parts),
        ]

    (value, grad), (expected, expected_grad), (part_value, part_grads) = computed(
        values_and_grads, y_pred, pred_parts
    )
    part_grads = part_grads.reshape(-1, *y_pred.shape[1:])
    np.testing.assert_allclose([value, part_value], [expected] * 2, rtol=1e-6)
    for found in (grad, part_grads[:NUM_ROWS]):
        np.testing.assert_allclose(found, expected_grad, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(part_grads[NUM_ROWS:], 0)


# Every two of the three come together.
@pytest.mark.parametrize(
    ("reduction", "weighted", "masked"),
    [
        (reduction, weighted, weighted == (reduction != "sum"))
        for reduction in REDUCTIONS
        for weighted in (False, True)
    ],
)
def test_terms_trace_inside_shard_map(reduction, weighted, masked):
    loss = losses.SparseCategoricalCrossentropy(
        from_logits=True, ignore_class=-1, reduction=reduction
    )
    y_true, y_pred = sequence_batch(rows=8)
    weight = RNG.random(8).astype("float32") if weighted else None
    mask = np.array([1] * 7 + [0], "float32") if masked else None
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(true, pred, weight, mask):
        total, count = loss.terms(true, pred, weight, mask)
        total = jax.lax.psum(total, "data")
        return total if count is None else losses.divide_no_nan(total, jax.lax.psum(count, "data"))

    mapped = jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P())
    rows = 7 if masked else 8
    value, expected = computed(
        lambda: (
            mapped(y_true, y_pred, weight, mask),
            loss(y_true[:rows], y_pred[:rows], weight[:rows] if weighted else None),
        )
    )
    np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_count_of_unmasked_unweighted_rows_can_be_summed_over_ranks():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(y):
        total, count = losses.MeanSquaredError().terms(y, y + 1)
        return jax.lax.psum(total, "data"), jax.lax.psum(count, "data")

    total, count = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P()))(
        np.ones((8, 3), "float32")
    )
    assert (float(total), float(count)) == (8.0, 8.0)


def test_a_batch_of_ignored_labels_has_loss_zero_and_no_nan_in_its_gradient():
    loss = losses.SparseCategoricalCrossentropy(ignore_class=-1)
    y_true, y_pred = np.full(3, -1), np.full((3, 4), np.nan, "float32")
    value, grad = computed(jax.value_and_grad(lambda p: loss(y_true, p)), y_pred)
    assert float(value) == 0
    np.testing.assert_array_equal(grad, 0)


def test_half_precision_outputs_are_summed_in_float32():
    y_true, y_pred = class_batch(rows=512)
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    half = y_pred.astype(jnp.bfloat16)
    value, expected = computed(
        lambda *outputs: [loss(y_true, y) for y in outputs], half, half.astype("float32")
    )
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, expected, rtol=1e-7)


def test_classes_along_another_axis():
    y_true, y_pred = class_batch(time=4)
    moved = np.moveaxis(y_pred, -1, 1)
    one_hot = np.moveaxis(np.eye(5)[y_true], -1, 1)
    expected, *found = computed(
        lambda: [
            losses.SparseCategoricalCrossentropy(True)(y_true, y_pred),
            losses.SparseCategoricalCrossentropy(True, axis=1)(y_true, moved),
            losses.CategoricalCrossentropy(True, axis=1)(one_hot, moved),
        ]
    )
    np.testing.assert_allclose(found, [expected] * 2, rtol=1e-6)


def test_hinge_with_zeros_among_negative_labels_is_refused():
    losses.check_labels(losses.Hinge(), np.array([[0.0], [1.0]]), (2, 1))
    losses.check_labels(losses.Hinge(), np.array([[-1], [1]]), (2, 1))
    with pytest.raises(
        ValueError, match=r"targets that are -1 and 1, or 0 and 1; row 0 of this batch holds 0"
    ):
        losses.check_labels(losses.Hinge(), np.array([[0], [1], [-1]]), (3, 1))


def test_the_cosine_of_a_zero_vector_is_zero_and_has_a_gradient():
    value, grad = computed(
        jax.value_and_grad(lambda p: losses.CosineSimilarity()(np.ones((1, 2)), p)),
        np.zeros((1, 2), "float32"),
    )
    assert float(value) == 0
    assert np.all(np.isfinite(grad))


def test_kl_divergence_names_the_layer_that_is_missing():
    with pytest.raises(
        ValueError,
        match=r"CategoricalCrossentropy\(from_logits=True\); or end the model with jax.nn.softmax",
    ):
        losses.check_outputs(losses.KLDivergence(), np.array([[-1.0, 2.0]]))


@pytest.mark.parametrize(
    ("name", "cls"),
    [
        ("mse", losses.MeanSquaredError),
        ("MSE", losses.MeanSquaredError),
        ("mean_squared_error", losses.MeanSquaredError),
        ("MeanSquaredError", losses.MeanSquaredError),
        ("mae", losses.MeanAbsoluteError),
        ("bce", losses.BinaryCrossentropy),
        ("sparse_categorical_crossentropy", losses.SparseCategoricalCrossentropy),
        ("CategoricalCrossentropy", losses.CategoricalCrossentropy),
    ],
)
def test_get_by_name(name, cls):
    loss = losses.get(name)
    assert type(loss) is cls
    assert loss.name == name


def test_get_takes_instances_classes_and_functions():
    instance = losses.MeanSquaredError()
    assert losses.get(instance) is instance
    assert type(losses.get(losses.MeanSquaredError)) is losses.MeanSquaredError
    assert losses.get(losses.sparse_categorical_crossentropy).expects_probabilities
    y_true, y_pred = class_batch()
    wrapped = losses.get(lambda y, p: optax.softmax_cross_entropy_with_integer_labels(p, y))
    found, expected = computed(
        lambda: [f(y_true, y_pred) for f in (wrapped, losses.SparseCategoricalCrossentropy(True))]
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_get_crossentropy_chooses_by_shape_as_keras_does():
    loss = losses.get("crossentropy")
    for batch, chosen in [
        (class_batch, "sparse_categorical"),
        (soft_batch, "categorical"),
        (binary_batch, "binary"),
    ]:
        y_true, y_pred = batch(logits=False, **({"outputs": 1} if batch is binary_batch else {}))
        named = losses.get(f"{chosen}_crossentropy")
        found, expected = (computed(f, y_true, y_pred) for f in (loss, named))
        np.testing.assert_allclose(found, expected, rtol=1e-6)
        losses.check_outputs(loss, y_pred)
        losses.check_labels(loss, y_true, y_pred.shape)


def test_unknown_names_list_the_known_and_the_nearest():
    with pytest.raises(
        ValueError,
        match=r"Unknown loss 'mean_square_error'. Did you mean 'mean_squared_error'\?.*, mse,",
    ):
        losses.get("mean_square_error")
    with pytest.raises(
        ValueError, match=r"must be a name, a Loss, a keras.losses.Loss or a callable"
    ):
        losses.get(3)


def test_no_reduction_gives_values():
    y_true, y_pred = real_batch()
    weight = RNG.random(7).astype("float32")
    found, expected = computed(
        lambda *batch: [
            room.MeanSquaredError(reduction=None)(*batch) for room in (losses, keras_losses())
        ],
        y_true,
        y_pred,
        weight,
    )
    np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("weight_shape", [(3,), (7, 4), (7, 2, 2)])
def test_weights_that_do_not_fit_are_refused(weight_shape):
    y_true, y_pred = class_batch(time=3)
    with pytest.raises(
        ValueError, match=r"sample_weight of shape .* does not fit loss values of shape \(7, 3\)"
    ):
        jax.eval_shape(
            losses.SparseCategoricalCrossentropy(True).terms, y_true, y_pred, np.ones(weight_shape)
        )


def test_unknown_reduction_is_refused():
    with pytest.raises(ValueError, match=r"reduction: it must be one of .*got 'average'"):
        losses.MeanSquaredError(reduction="average")
