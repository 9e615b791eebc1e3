"""What metrics refuse, and how they say it."""

import logging

import jax.numpy as jnp
import numpy as np
import pytest

from tnt_jax.keras_compat import metrics


def test_errors_say_what_to_do():
    with pytest.raises(
        ValueError,
        match=r"Unknown metric 'acuracy'. Did you mean 'accuracy'\? Known names: acc, accuracy,",
    ):
        metrics.get("acuracy", (1,), (1, 2))
    with pytest.raises(ValueError, match="'accuracy' depends on the shapes"):
        metrics.get("accuracy")
    with pytest.raises(
        ValueError, match=r"must be a name, a Metric, a keras.metrics.Metric or a callable"
    ):
        metrics.get(3)
    with pytest.raises(ValueError, match=r"returned values of shape \(\) .*one value per row"):
        metrics.get(lambda y, p: jnp.mean(p)).increments(np.ones((4, 1)), np.ones((4, 1)))
    with pytest.raises(
        ValueError, match=r"Weights of shape \(3,\) do not fit values of shape \(4, 2\)"
    ):
        metrics.MeanMetricWrapper(lambda y, p: p).increments(
            np.ones((4, 2)), np.ones((4, 2)), np.ones(3)
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: metrics.Precision(1.5),
            r"Threshold values must be in \[0, 1\]. Received: \[1.5\]",
        ),
        (lambda: metrics.AUC(curve="XYZ"), r'Invalid AUC curve value: "XYZ". curve must be one of'),
        (lambda: metrics.AUC(summation_method="mean"), r'"mean". summation_method must be one of'),
        (
            lambda: metrics.AUC(num_labels=2),
            "`num_labels` is needed only when `multi_label` is True",
        ),
        (
            lambda: metrics.AUC(1),
            "`num_thresholds` must be an integer > 1. Received: num_thresholds=1",
        ),
        (
            lambda: metrics.check_outputs(metrics.AUC(), np.array([-2.0])),
            r"'auc' expects prob.*AUC\(from_logits=True\)",
        ),
    ],
)
def test_settings_out_of_range_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_check_outputs_refuses_logits_and_warns_about_thresholds(caplog):
    outputs = np.array([[-3.0, 4.0]])
    with pytest.raises(ValueError, match="expects probabilities"):
        metrics.check_outputs(metrics.SparseCategoricalCrossentropy(), outputs)
    with caplog.at_level(logging.WARNING, logger="tnt_jax"):
        metrics.check_outputs(metrics.BinaryAccuracy(threshold=0.0), outputs)
        assert not caplog.records
        metrics.check_outputs(metrics.BinaryAccuracy(), outputs)
    assert "range from -3 to 4: these look like logits" in caplog.text
