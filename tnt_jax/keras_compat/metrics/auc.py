"""Area under the ROC, precision-recall or precision-recall-gain curve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tnt_jax.keras_compat.configuration import config_of
from tnt_jax.keras_compat.losses.arrays import EPSILON, divide_no_nan
from tnt_jax.keras_compat.metrics.base import Metric
from tnt_jax.keras_compat.metrics.counts import (
    ALL_COUNTS,
    FALSE_NEGATIVES,
    FALSE_POSITIVES,
    TRUE_POSITIVES,
    aligned,
    counts_at,
)


class AUC(Metric):
    """Area under a curve.

    Args:
        num_thresholds: Number of evenly spaced thresholds from 0 to 1.
        curve: `"ROC"`: true over false positive rate; `"PR"`: precision over recall; `"PRGAIN"`:
            precision gain over recall gain (Flach and Kull 2015).
        summation_method: Height between two points: `"interpolation"` (their mean; for PR the
            interpolation of true positives of Davis and Goadrich 2006), `"minoring"` (the lower) or
            `"majoring"` (the higher).
        name: Name of the metric.
        dtype: See `Metric`; as in Keras, counts are always float32.
        thresholds: Thresholds between 0 and 1 instead of `num_thresholds`; 0 and 1 are added.
        multi_label: Whether the result is the mean over the areas of the outputs [rows, labels].
        num_labels: Number of labels, to create the variables before the first update.
        label_weights: Weights of the labels [labels], in that mean or otherwise in the counts.
        from_logits: Whether outputs are logits.
    """

    def __init__(
        self,
        num_thresholds: int = 200,
        curve: str = "ROC",
        summation_method: str = "interpolation",
        name: str | None = None,
        dtype: Any = None,
        thresholds: Sequence[float] | None = None,
        multi_label: bool = False,
        num_labels: int | None = None,
        label_weights: Sequence[float] | None = None,
        from_logits: bool = False,
    ) -> None:
        super().__init__(dtype, name)
        self.curve = str(getattr(curve, "value", curve)).upper()
        self.summation_method = str(getattr(summation_method, "value", summation_method)).lower()
        if self.curve not in _POINTS:
            raise ValueError(
                f'Invalid AUC curve value: "{curve}". curve must be one of {list(_POINTS)}.'
            )
        if self.summation_method not in _HEIGHTS:
            raise ValueError(
                f'Invalid AUC summation method value: "{summation_method}". summation_method '
                f"must be one of {list(_HEIGHTS)}."
            )
        if thresholds is None and num_thresholds <= 1:
            raise ValueError(
                "Argument `num_thresholds` must be an integer > 1. Received: "
                f"num_thresholds={num_thresholds}."
            )
        if num_labels and not multi_label:
            raise ValueError("`num_labels` is needed only when `multi_label` is True.")
        inner = (
            np.arange(1, num_thresholds - 1) / (num_thresholds - 1)
            if thresholds is None
            else np.sort(thresholds)
        )
        self._thresholds: list[float] = [-EPSILON, *inner.tolist(), 1 + EPSILON]
        self.num_thresholds = len(self._thresholds)
        self.multi_label = multi_label
        self.num_labels = num_labels
        self.from_logits = from_logits
        self.label_weights = (
            None if label_weights is None else np.asarray(label_weights, np.float32)
        )
        if num_labels or not multi_label:
            self._declare(
                dict.fromkeys(
                    ALL_COUNTS, (self.num_thresholds, *([num_labels] if num_labels else []))
                )
            )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make an equal metric."""
        return config_of(self, "name", "dtype", "num_thresholds", "curve", "summation_method")

    @property
    def thresholds(self) -> list[float]:
        """The thresholds, with ends slightly below 0 and above 1."""
        return self._thresholds

    @property
    def expects_probabilities(self) -> bool:
        """Whether outputs must be in [0, 1]."""
        return not self.from_logits

    def increments(
        self, y_true: Any, y_pred: Any, weight: ArrayLike | None = None
    ) -> dict[str, jax.Array]:
        """Returns the weighted counts at each threshold, [thresholds] or [thresholds, labels].

        See `ThresholdCounts`.
        """
        true, pred, weights = aligned(y_true, y_pred, weight)
        pred = jax.nn.sigmoid(pred) if self.from_logits else pred
        if self.multi_label and pred.ndim != 2:
            raise ValueError(
                f"`y_pred` must have rank 2 when `multi_label=True`, got the shape {pred.shape}."
            )
        if self.multi_label:
            by_label = jax.vmap(
                lambda *columns: counts_at(self.thresholds, *columns), in_axes=1, out_axes=1
            )
            return by_label(true, pred, weights)
        if self.label_weights is not None:
            weights = weights * self.label_weights
        return counts_at(self.thresholds, true.reshape(-1), pred.reshape(-1), weights.reshape(-1))

    def compute(self, sums: dict[str, jax.Array]) -> jax.Array:
        """Returns the area, or the mean area of several labels."""
        sums = jax.tree.map(jnp.asarray, sums)
        is_pr = self.curve == "PR"
        areas = (
            _pr_area(sums)
            if is_pr and self.summation_method == "interpolation"
            else self._riemann_area(sums)
        )
        return self._of_labels(areas)

    def interpolate_pr_auc(self) -> jax.Array:
        """Returns the area under the precision-recall curve of the state.

        True positives are interpolated between thresholds.
        """
        return self._of_labels(_pr_area(jax.tree.map(lambda variable: variable.value, self._sums)))

    def _of_labels(self, areas: jax.Array) -> jax.Array:
        if not self.multi_label:
            return areas
        weights = (
            jnp.ones(areas.shape) if self.label_weights is None else jnp.asarray(self.label_weights)
        )
        return divide_no_nan(jnp.sum(areas * weights), jnp.sum(weights))

    def _riemann_area(self, sums: dict[str, jax.Array]) -> jax.Array:
        x, y = _POINTS[self.curve](*(sums[name] for name in ALL_COUNTS))
        return jnp.sum((x[:-1] - x[1:]) * _HEIGHTS[self.summation_method](y[:-1], y[1:]), axis=0)


def _roc(tp: jax.Array, fp: jax.Array, tn: jax.Array, fn: jax.Array) -> tuple[jax.Array, jax.Array]:
    return divide_no_nan(fp, fp + tn), divide_no_nan(tp, tp + fn)


def _precision_recall(
    tp: jax.Array, fp: jax.Array, tn: jax.Array, fn: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return divide_no_nan(tp, tp + fn), divide_no_nan(tp, tp + fp)


def _gains(
    tp: jax.Array, fp: jax.Array, tn: jax.Array, fn: jax.Array
) -> tuple[jax.Array, jax.Array]:
    scale = divide_no_nan(tp + fn, tn + fp)
    recall = jnp.where(tp == 0, 0, 1 - scale * divide_no_nan(fn, tp))
    precision = jnp.where(tp == 0, 1, 1 - scale * divide_no_nan(fp, tp))
    return jnp.maximum(recall, 0), precision


_POINTS = {"ROC": _roc, "PR": _precision_recall, "PRGAIN": _gains}
_HEIGHTS = {
    "interpolation": lambda a, b: (a + b) / 2,
    "minoring": jnp.minimum,
    "majoring": jnp.maximum,
}


def _pr_area(sums: dict[str, jax.Array]) -> jax.Array:
    """Returns the area under the precision-recall curve.

    True positives are interpolated between thresholds. Between two points, precision = (slope * p +
    intercept) / p for p positive decisions; its integral over recall is summed (Davis and Goadrich
    2006, "The relationship between precision-recall and ROC curves").
    """
    true_positives = sums[TRUE_POSITIVES]
    positives = true_positives + sums[FALSE_POSITIVES]
    step = true_positives[:-1] - true_positives[1:]
    slope = divide_no_nan(step, jnp.maximum(positives[:-1] - positives[1:], 0))
    intercept = true_positives[1:] - slope * positives[1:]
    has_both = (positives[:-1] > 0) & (positives[1:] > 0)
    ratio = jnp.where(has_both, divide_no_nan(positives[:-1], positives[1:]), 1)
    return jnp.sum(
        divide_no_nan(
            slope * (step + intercept * jnp.log(ratio)),
            true_positives[1:] + sums[FALSE_NEGATIVES][1:],
        ),
        axis=0,
    )
