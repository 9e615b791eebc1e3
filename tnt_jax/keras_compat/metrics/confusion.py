"""Metrics counted from decisions at thresholds: precision, recall, area under a curve, and the four counts themselves.

What is summed are counts at each threshold, so results are exact over any parts of the data; a mean of the parts' precisions
would not be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tnt_jax.keras_compat.losses.base import EPSILON, at_least_float32, divide_no_nan, match_ranks
from tnt_jax.keras_compat.metrics.base import Metric

TRUE_POSITIVES, FALSE_POSITIVES = "true_positives", "false_positives"
TRUE_NEGATIVES, FALSE_NEGATIVES = "true_negatives", "false_negatives"


class ThresholdCounts(Metric):
    """Base class of metrics made of counts at thresholds; an output above a threshold is a positive decision.

    Args:
        name: Name of the metric.
        thresholds: In [0, 1], a number or several; the result has one entry for each of several. 0.5 by default.
        top_k: Only the `top_k` largest outputs of a row can be positive, and without thresholds all of them are.
        class_id: Only this entry of the last dimension counts.
        counts: Which of the four counts the metric needs.
    """

    def __init__(
        self,
        name: str | None,
        *,
        thresholds: float | Sequence[float] | None,
        top_k: int | None,
        class_id: int | None,
        counts: Sequence[str],
    ) -> None:
        super().__init__(name)
        default = 0.5 if top_k is None else -np.inf
        self.thresholds = np.atleast_1d(np.asarray(default if thresholds is None else thresholds, np.float32))
        if thresholds is not None and not np.all((self.thresholds >= 0) & (self.thresholds <= 1)):
            raise ValueError(f"thresholds must be in [0, 1], got {thresholds}.")
        self.top_k, self.class_id, self.counts = top_k, class_id, tuple(counts)

    @property
    def threshold(self) -> float | None:
        """The threshold if there is one, None if there are several."""
        return float(self.thresholds[0]) if len(self.thresholds) == 1 else None

    def increments(self, y_true: Any, y_pred: Any, weight: ArrayLike | None = None) -> dict[str, jax.Array]:
        """Returns the weighted counts at every threshold [thresholds].

        Args:
            y_true: Targets, 0 or not [rows, ...].
            y_pred: Probabilities [rows, ...].
            weight: Weights [rows], or one for each output.
        """
        true, pred, weights = aligned(y_true, y_pred, weight)
        if self.top_k is not None:
            pred = _keep_top_k(pred, self.top_k)
        if self.class_id is not None:
            true, pred, weights = (array[..., self.class_id] for array in (true, pred, weights))
        counted = counts_at(self.thresholds, true.reshape(-1), pred.reshape(-1), weights.reshape(-1))
        return {name: counted[name] for name in self.counts}

    def _result(self, values: jax.Array) -> jax.Array:
        return values[0] if len(self.thresholds) == 1 else values


class Precision(ThresholdCounts):
    """True positives / positive decisions; 0 if there are none."""

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        *,
        top_k: int | None = None,
        class_id: int | None = None,
        name: str | None = None,
    ) -> None:
        counts = (TRUE_POSITIVES, FALSE_POSITIVES)
        super().__init__(name, thresholds=thresholds, top_k=top_k, class_id=class_id, counts=counts)

    def compute(self, sums: dict[str, jax.Array]) -> jax.Array:
        """Returns the precision, one for each threshold if there are several."""
        return self._result(divide_no_nan(sums[TRUE_POSITIVES], sums[TRUE_POSITIVES] + sums[FALSE_POSITIVES]))


class Recall(ThresholdCounts):
    """True positives / positive targets; 0 if there are none."""

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        *,
        top_k: int | None = None,
        class_id: int | None = None,
        name: str | None = None,
    ) -> None:
        counts = (TRUE_POSITIVES, FALSE_NEGATIVES)
        super().__init__(name, thresholds=thresholds, top_k=top_k, class_id=class_id, counts=counts)

    def compute(self, sums: dict[str, jax.Array]) -> jax.Array:
        """Returns the recall, one for each threshold if there are several."""
        return self._result(divide_no_nan(sums[TRUE_POSITIVES], sums[TRUE_POSITIVES] + sums[FALSE_NEGATIVES]))


class _Count(ThresholdCounts):
    _counted: str

    def __init__(self, thresholds: float | Sequence[float] | None = None, *, name: str | None = None) -> None:
        super().__init__(name, thresholds=thresholds, top_k=None, class_id=None, counts=(self._counted,))

    def compute(self, sums: dict[str, jax.Array]) -> jax.Array:
        """Returns the weighted count, one for each threshold if there are several."""
        return self._result(sums[self._counted])


class TruePositives(_Count):
    """How many positive decisions are right."""

    _counted = TRUE_POSITIVES


class FalsePositives(_Count):
    """How many positive decisions are wrong."""

    _counted = FALSE_POSITIVES


class TrueNegatives(_Count):
    """How many negative decisions are right."""

    _counted = TRUE_NEGATIVES


class FalseNegatives(_Count):
    """How many negative decisions are wrong."""

    _counted = FALSE_NEGATIVES


class AUC(Metric):
    """Area under the ROC or precision-recall curve, from its points at thresholds.

    Args:
        num_thresholds: Number of thresholds, evenly from 0 to 1.
        curve: `"ROC"`: true over false positive rate; `"PR"`: precision over recall.
        summation_method: Height between two points: `"interpolation"` (their mean; for PR the interpolation of true positives
            of Davis and Goadrich 2006), `"minoring"` (the lower) or `"majoring"` (the higher).
        thresholds: Thresholds between 0 and 1 in place of `num_thresholds`; 0 and 1 are added.
        multi_label: Whether the result is the mean of the areas of each of the outputs [rows, labels].
        label_weights: Weights of that mean [labels].
        from_logits: Whether outputs are logits.
        name: Name of the metric.
    """

    def __init__(
        self,
        num_thresholds: int = 200,
        *,
        curve: str = "ROC",
        summation_method: str = "interpolation",
        thresholds: Sequence[float] | None = None,
        multi_label: bool = False,
        label_weights: Sequence[float] | None = None,
        from_logits: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if curve.upper() not in ("ROC", "PR"):
            raise ValueError(f"curve must be 'ROC' or 'PR', got {curve!r}. Pass keras.metrics.AUC(...) for 'PRGAIN'.")
        if summation_method not in _HEIGHTS:
            raise ValueError(f"summation_method must be one of {list(_HEIGHTS)}, got {summation_method!r}.")
        if label_weights is not None and not multi_label:
            raise ValueError(
                "label_weights need multi_label=True. Pass keras.metrics.AUC(...) to weigh the labels within one area."
            )
        if thresholds is None and num_thresholds < 2:
            raise ValueError(f"num_thresholds must be at least 2, got {num_thresholds}.")
        inner = np.arange(1, num_thresholds - 1) / (num_thresholds - 1) if thresholds is None else np.sort(thresholds)
        self.thresholds = np.array([-EPSILON, *inner, 1 + EPSILON])
        self.curve, self.summation_method = curve.upper(), summation_method
        self.multi_label, self.label_weights, self.from_logits = multi_label, label_weights, from_logits

    @property
    def expects_probabilities(self) -> bool:
        """Whether outputs must be in [0, 1]."""
        return not self.from_logits

    def increments(self, y_true: Any, y_pred: Any, weight: ArrayLike | None = None) -> dict[str, jax.Array]:
        """Returns the weighted counts at every threshold [thresholds], or [thresholds, labels]; see `ThresholdCounts`."""
        true, pred, weights = aligned(y_true, y_pred, weight)
        pred = jax.nn.sigmoid(pred) if self.from_logits else pred
        if self.multi_label:
            by_label = jax.vmap(lambda *columns: counts_at(self.thresholds, *columns), in_axes=1, out_axes=1)
            return by_label(true, pred, weights)
        return counts_at(self.thresholds, true.reshape(-1), pred.reshape(-1), weights.reshape(-1))

    def compute(self, sums: dict[str, jax.Array]) -> jax.Array:
        """Returns the area, for several labels their mean."""
        sums = jax.tree.map(jnp.asarray, sums)
        is_pr = self.curve == "PR"
        areas = _pr_area(sums) if is_pr and self.summation_method == "interpolation" else self._riemann_area(sums)
        if not self.multi_label:
            return areas
        weights = jnp.ones(areas.shape) if self.label_weights is None else jnp.asarray(self.label_weights)
        return divide_no_nan(jnp.sum(areas * weights), jnp.sum(weights))

    def _riemann_area(self, sums: dict[str, jax.Array]) -> jax.Array:
        recall = divide_no_nan(sums[TRUE_POSITIVES], sums[TRUE_POSITIVES] + sums[FALSE_NEGATIVES])
        if self.curve == "ROC":
            x, y = divide_no_nan(sums[FALSE_POSITIVES], sums[FALSE_POSITIVES] + sums[TRUE_NEGATIVES]), recall
        else:
            x, y = recall, divide_no_nan(sums[TRUE_POSITIVES], sums[TRUE_POSITIVES] + sums[FALSE_POSITIVES])
        return jnp.sum((x[:-1] - x[1:]) * _HEIGHTS[self.summation_method](y[:-1], y[1:]), axis=0)


_HEIGHTS = {"interpolation": lambda a, b: (a + b) / 2, "minoring": jnp.minimum, "majoring": jnp.maximum}


def _pr_area(sums: dict[str, jax.Array]) -> jax.Array:
    """Returns the area under the precision-recall curve with true positives interpolated between thresholds.

    Between two points, precision = (slope * p + intercept) / p for p positive decisions; its integral over recall is summed
    (Davis and Goadrich 2006, "The relationship between precision-recall and ROC curves").
    """
    true_positives = sums[TRUE_POSITIVES]
    positives = true_positives + sums[FALSE_POSITIVES]
    step = true_positives[:-1] - true_positives[1:]
    slope = divide_no_nan(step, jnp.maximum(positives[:-1] - positives[1:], 0))
    intercept = true_positives[1:] - slope * positives[1:]
    has_both = (positives[:-1] > 0) & (positives[1:] > 0)
    ratio = jnp.where(has_both, divide_no_nan(positives[:-1], positives[1:]), 1)
    return jnp.sum(
        divide_no_nan(slope * (step + intercept * jnp.log(ratio)), true_positives[1:] + sums[FALSE_NEGATIVES][1:]), axis=0
    )


def aligned(y_true: Any, y_pred: Any, weight: ArrayLike | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns targets as 0 or 1, outputs and weights, all of the outputs' shape; rows of weight 0 hold zeros."""
    y_pred, y_true = match_ranks(at_least_float32(y_pred), jnp.asarray(y_true))
    weight = jnp.ones(y_pred.shape[:1], y_pred.dtype) if weight is None else jnp.asarray(weight, y_pred.dtype)
    weight = weight[..., 0] if weight.ndim > y_pred.ndim else weight
    weight = jnp.broadcast_to(weight.reshape(weight.shape + (1,) * (y_pred.ndim - weight.ndim)), y_pred.shape)
    return (y_true != 0).astype(y_pred.dtype), jnp.where(weight == 0, 0, y_pred), weight


def counts_at(thresholds: np.ndarray, y_true: jax.Array, y_pred: jax.Array, weight: jax.Array) -> dict[str, jax.Array]:
    """Returns the weighted four counts at each threshold [thresholds], from flat arrays of decisions [n].

    Evenly spaced thresholds are counted in one pass, as a histogram that is summed from above; as in Keras, so that an output
    on a threshold falls on the same side.
    """
    positive, negative = y_true * weight, (1 - y_true) * weight
    even = np.linspace(0, 1, len(thresholds))
    if len(thresholds) >= 3 and np.allclose(thresholds, even, atol=EPSILON):
        is_widened = thresholds[0] < 0
        bucket = jnp.ceil(jnp.clip(y_pred, 0, 1) * (len(thresholds) - 1)) - 1
        # A segment number of len(thresholds) is dropped: the output is above no threshold.
        bucket = jnp.where(bucket < 0, 0 if is_widened else len(thresholds), bucket).astype(jnp.int32)
        above = [jax.ops.segment_sum(part, bucket, len(thresholds)) for part in (positive, negative)]
        true_positives, false_positives = (jnp.cumsum(part[::-1])[::-1] for part in above)
    else:
        is_above = y_pred > jnp.asarray(thresholds, y_pred.dtype)[:, None]
        true_positives, false_positives = (jnp.sum(jnp.where(is_above, part, 0), axis=1) for part in (positive, negative))
    return {
        TRUE_POSITIVES: true_positives,
        FALSE_POSITIVES: false_positives,
        TRUE_NEGATIVES: jnp.sum(negative) - false_positives,
        FALSE_NEGATIVES: jnp.sum(positive) - true_positives,
    }


def _keep_top_k(y_pred: jax.Array, k: int) -> jax.Array:
    """Returns outputs with all but the `k` largest of the last dimension set to -inf."""
    _, index = jax.lax.top_k(y_pred, k)
    is_kept = jnp.any(jax.nn.one_hot(index, y_pred.shape[-1], dtype=bool), axis=-2)
    return jnp.where(is_kept, y_pred, -jnp.inf)
