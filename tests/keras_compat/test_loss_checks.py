"""What losses refuse in the first batch: outputs, labels and values that do not fit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tnt_jax.keras_compat import losses

RNG = np.random.default_rng(0)


@pytest.mark.parametrize(
    "name",
    [
        "sparse_categorical_crossentropy",
        "categorical_crossentropy",
        "binary_crossentropy",
        "crossentropy",
    ],
)
def test_logits_given_to_a_loss_of_probabilities_are_refused(name):
    outputs = RNG.normal(size=(4, 3)).astype("float32") * 3
    with pytest.raises(
        ValueError,
        match=r"expects probabilities.*range from -.*from_logits=True.*end the model with "
        r"jax.nn.(soft|sig)m",
    ):
        losses.check_outputs(losses.get(name), outputs)


def test_rows_that_do_not_sum_to_one_are_refused_unless_outputs_are_independent():
    outputs = np.array([[0.5, 0.5], [0.9, 0.7]], "float32")
    with pytest.raises(
        ValueError, match=r"row 1 sums to 1.6.*SparseCategoricalCrossentropy\(from_logits=True\)"
    ):
        losses.check_outputs(losses.SparseCategoricalCrossentropy(), outputs)
    losses.check_outputs(losses.BinaryCrossentropy(), outputs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_probabilities_of_any_precision_pass(dtype):
    outputs = jax.nn.softmax(jnp.asarray(RNG.normal(size=(64, 1000)), dtype))
    losses.check_outputs(losses.SparseCategoricalCrossentropy(), outputs)
    with pytest.raises(ValueError, match="probabilities"):
        losses.check_outputs(losses.SparseCategoricalCrossentropy(), 1.1 * outputs)


def test_outputs_pass_where_logits_are_expected_and_nan_is_not_blamed():
    losses.check_outputs(losses.SparseCategoricalCrossentropy(True), np.array([[-3.0, 9.0]]))
    losses.check_outputs(
        losses.SparseCategoricalCrossentropy(), np.array([[np.nan, np.nan], [0.5, 0.5]])
    )
    with pytest.raises(ValueError, match="probabilities"):
        losses.check_outputs(losses.SparseCategoricalCrossentropy(), np.array([[-3.0, 9.0]]))


@pytest.mark.parametrize(
    ("loss", "y_true", "shape", "message"),
    [
        (
            losses.SparseCategoricalCrossentropy(),
            [0, 4, 2],
            (3, 4),
            r"in \[0, 4\).*row 1 of this batch holds 4 \(1 such",
        ),
        (
            losses.SparseCategoricalCrossentropy(),
            [[0], [1], [-1]],
            (3, 4),
            r"row 2 of this batch holds -1",
        ),
        (
            losses.SparseCategoricalCrossentropy(),
            [[0, 1], [1, 9]],
            (2, 2, 4),
            r"row 1 at \(1,\) of this batch holds 9",
        ),
        (
            losses.SparseCategoricalCrossentropy(),
            [0.0, 1.5, 1.0],
            (3, 4),
            r"row 1 of this batch holds 1.5",
        ),
        (
            losses.SparseCategoricalCrossentropy(),
            np.eye(3),
            (3, 3),
            r"shape \(3,\).*got \(3, 3\). One-hot targets need",
        ),
        (
            losses.CategoricalCrossentropy(),
            [0, 1, 2],
            (3, 4),
            r"got \(3,\). Integer labels need 'sparse_categorical",
        ),
        (
            losses.BinaryCrossentropy(),
            [[0.0], [2.0]],
            (2, 1),
            r"targets in \[0, 1\]; row 1 of this batch holds 2",
        ),
        (losses.MeanSquaredError(), np.zeros((4, 2)), (4, 3), r"shape \(4, 3\), got \(4, 2\)"),
        (
            losses.MeanSquaredError(),
            np.zeros((3, 1)),
            (4, 1),
            r"as many targets as outputs, got shapes \(3, 1\) and \(4, 1\)",
        ),
        (losses.get(lambda y, p: y), np.zeros(3), (4,), r"as many targets as outputs"),
    ],
)
def test_labels_that_do_not_fit_are_refused(loss, y_true, shape, message):
    with pytest.raises(ValueError, match=message):
        losses.check_labels(loss, np.asarray(y_true), shape)


def test_labels_that_fit_pass():
    losses.check_labels(
        losses.SparseCategoricalCrossentropy(ignore_class=-1), np.array([0, -1, 3]), (3, 4)
    )
    losses.check_labels(
        losses.SparseCategoricalCrossentropy(), np.array([[0], [3]], "uint8"), (2, 4)
    )
    losses.check_labels(losses.MeanSquaredError(), np.zeros(4), (4, 1))
    losses.check_labels(losses.get(lambda y, p: y), np.zeros((4, 7)), (4, 2))
    with pytest.raises(ValueError, match="integer labels in"):  # No class is ignored here.
        losses.check_labels(losses.SparseCategoricalCrossentropy(), np.array([0, -1, 3]), (3, 4))


def test_losses_without_a_value_per_row_are_refused():
    with pytest.raises(ValueError, match=r"returned values of shape \(\).*return \[batch, ...\]"):
        losses.get(lambda y, p: jnp.mean((y - p) ** 2)).terms(np.zeros((4, 2)), np.zeros((4, 2)))
    with pytest.raises(ValueError, match="reduction=None; training needs one of"):
        losses.MeanSquaredError(reduction=None).terms(np.zeros((4, 2)), np.zeros((4, 2)))
