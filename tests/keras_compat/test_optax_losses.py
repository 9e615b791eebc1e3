"""Losses of Optax, which take the outputs first, and functions of users in that order."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tnt_jax as tnt

RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 5)).astype(np.float32)
LABELS = RNG.integers(0, 3, 16)
ONE_HOT = np.eye(3, dtype=np.float32)[LABELS]
BINARY = RNG.integers(0, 2, (16, 3)).astype(np.float32)
REAL = RNG.normal(size=(16, 3)).astype(np.float32)

ADAPTED = [
    (optax.softmax_cross_entropy, ONE_HOT),
    (partial(optax.softmax_cross_entropy, axis=-1), ONE_HOT),
    (jax.jit(optax.softmax_cross_entropy), ONE_HOT),
    (optax.safe_softmax_cross_entropy, ONE_HOT),
    (optax.losses.poly_loss_cross_entropy, ONE_HOT),
    (optax.softmax_cross_entropy_with_integer_labels, LABELS),
    (optax.losses.multiclass_hinge_loss, LABELS),
    (optax.sigmoid_binary_cross_entropy, BINARY),
    (partial(optax.sigmoid_focal_loss, gamma=1.0), BINARY),
    (optax.hinge_loss, 2 * BINARY - 1),
    (optax.kl_divergence, ONE_HOT),
    (optax.squared_error, REAL),
    (optax.l2_loss, REAL),
    (partial(optax.huber_loss, delta=0.5), REAL),
    (optax.log_cosh, REAL),
    (optax.cosine_distance, REAL),
]


@pytest.mark.parametrize(
    ("function", "targets"), ADAPTED, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_loss_of_optax_equals_its_mean_over_rows_on_four_ranks(function, targets, use_ranks):
    use_ranks(4)
    module = nn.Dense(3)
    variables = module.init(jax.random.key(0), X[:1])
    model = tnt.Model(module, variables=variables)
    model.compile("sgd", function, metrics=[function])
    found = model.evaluate(X, targets, batch_size=16, verbose=0, return_dict=True)
    expected = float(jnp.mean(function(module.apply(variables, X), targets)))
    np.testing.assert_allclose(list(found.values()), expected, rtol=1e-5)
    assert len(found) == 2, found


def test_labels_with_a_dimension_of_one_are_class_indices_as_in_keras(use_ranks):
    use_ranks(1)
    loss = tnt.losses.get(optax.softmax_cross_entropy_with_integer_labels)
    plain, column = loss(LABELS, REAL), loss(LABELS[:, None], REAL)
    np.testing.assert_array_equal(plain, column)


def test_training_with_a_loss_of_optax_goes_down_and_stays_positive(use_ranks):
    use_ranks(2)
    model = tnt.Model(nn.Dense(3))
    model.compile(optax.sgd(0.5), optax.softmax_cross_entropy)
    history = model.fit(X, ONE_HOT, epochs=5, verbose=0).history["loss"]
    assert 0 < history[-1] < history[0]


def reversed_by_name(logits, labels):
    return optax.softmax_cross_entropy(logits, labels)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            optax.ctc_loss,
            r"optax.ctc_loss\(logits, logit_paddings, labels, label_paddings\) cannot be a loss",
        ),
        (optax.losses.triplet_margin_loss, "triplet_margin_loss"),
        (optax.losses.ntxent, r"ntxent.*cannot be a loss or metric, which maps"),
        (optax.smooth_labels, "smooth_labels"),
        (optax.cosine_similarity, "grows as outputs approach.*cosine_distance"),
        (partial(optax.ctc_loss, blank_id=1), "ctc_loss"),
        (
            reversed_by_name,
            r"f\(targets, outputs\), but reversed_by_name takes \(logits, labels\).*Swap",
        ),
        (partial(reversed_by_name), "reversed_by_name"),
        (lambda y_pred, y_true: (y_pred - y_true) ** 2, r"takes \(y_pred, y_true\)"),
    ],
)
def test_what_is_no_function_of_targets_and_outputs_is_refused_by_name(function, message):
    with pytest.raises(ValueError, match=message):
        tnt.Model(nn.Dense(3)).compile("sgd", loss=function)


def test_metrics_in_the_order_of_optax_are_refused_as_losses_are():
    with pytest.raises(ValueError, match="Swap its arguments"):
        tnt.Model(nn.Dense(3)).compile("sgd", "mse", metrics=[reversed_by_name])


@pytest.mark.parametrize(
    ("function", "targets", "message"),
    [
        (optax.softmax_cross_entropy, LABELS, "needs targets of the outputs' shape"),
        (optax.softmax_cross_entropy_with_integer_labels, ONE_HOT, "needs integer labels"),
        (
            optax.softmax_cross_entropy_with_integer_labels,
            LABELS + 1,
            r"integer labels in \[0, 3\)",
        ),
        (
            optax.sigmoid_binary_cross_entropy,
            LABELS[:, None] + np.zeros((16, 3)),
            r"targets in \[0, 1\]",
        ),
        (optax.squared_error, LABELS, "needs targets of the outputs' shape"),
    ],
)
def test_targets_that_a_loss_of_optax_cannot_take_are_refused(
    function, targets, message, use_ranks
):
    use_ranks(1)
    model = tnt.Model(nn.Dense(3))
    model.compile("sgd", function)
    with pytest.raises(ValueError, match=message):
        model.fit(X, targets, verbose=0)
