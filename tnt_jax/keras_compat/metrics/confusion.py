"""Precision, recall, F scores, AUC, counts and constrained rates of decisions at thresholds.

Counts at each threshold are summed, so results are exact for any split of the data.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tnt_jax.keras_compat.configuration import config_of
from tnt_jax.keras_compat.losses.base import EPSILON, at_least_float32, divide_no_nan, in_dtype
from tnt_jax.keras_compat.metrics.base import Metric, Sums
from tnt_jax.keras_compat.metrics.means import weigh
from tnt_jax.train.steps.epoch_sums import match_ranks

TRUE_POSITIVES, FALSE_POSITIVES = "true_positives", "false_positives"
TRUE_NEGATIVES, FALSE_NEGATIVES = "true_negatives", "false_negatives"
ALL_COUNTS = (TRUE_POSITIVES, FALSE_POSITIVES, TRUE_NEGATIVES, FALSE_NEGATIVES)
_CURVES = ["ROC", "PR", "PRGAIN"]
# Keras's threshold below all outputs, and its value for outputs that are not among the `top_k`.
NOTHING = -1e10


def aligned(
    y_true: Any, y_pred: Any, weight: ArrayLike | None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns targets as 0 or 1, outputs (0 if weighted 0) and weights, of the outputs' shape."""
    y_pred, y_true = match_ranks(at_least_float32(y_pred), jnp.asarray(y_true))
    weight = jnp.asarray(1 if weight is None else weight, y_pred.dtype)
    weight = weight[..., 0] if weight.ndim > y_pred.ndim else weight
    weight = jnp.broadcast_to(
        weight.reshape(weight.shape + (1,) * (y_pred.ndim - weight.ndim)), y_pred.shape
    )
    return (y_true != 0).astype(y_pred.dtype), jnp.where(weight == 0, 0, y_pred), weight


def counts_at(
    thresholds: Sequence[float], y_true: jax.Array, y_pred: jax.Array, weight: jax.Array
) -> Sums:
    """Returns the four weighted counts at each threshold [thresholds] for flat decisions [n]."""
    positive = y_true * weight
    negative = (1 - y_true) * weight
    even = np.linspace(0, 1, len(thresholds))
    if len(thresholds) >= 3 and np.allclose(thresholds, even, atol=EPSILON):
        # In one pass, as a histogram that is summed from above; as in Keras, an output on a
        # threshold thus falls on the same side.
        is_widened = thresholds[0] < 0
        bucket = jnp.ceil(jnp.clip(y_pred, 0, 1) * (len(thresholds) - 1)) - 1
        # A segment number of len(thresholds) is dropped: the output is above no threshold.
        bucket = jnp.where(bucket < 0, 0 if is_widened else len(thresholds), bucket)
        bucket, size = bucket.astype(jnp.int32), len(thresholds)
        above = [jax.ops.segment_sum(part, bucket, size) for part in (positive, negative)]
        true_positives, false_positives = (jnp.cumsum(part[::-1])[::-1] for part in above)
    else:
        is_above = y_pred > jnp.asarray(thresholds, y_pred.dtype)[:, None]
        true_positives, false_positives = (
            jnp.sum(jnp.where(is_above, part, 0), axis=1) for part in (positive, negative)
        )
    return {
        TRUE_POSITIVES: true_positives,
        FALSE_POSITIVES: false_positives,
        TRUE_NEGATIVES: jnp.sum(negative) - false_positives,
        FALSE_NEGATIVES: jnp.sum(positive) - true_positives,
    }


def entry(array: jax.Array, class_id: int) -> jax.Array:
    """Returns one entry of the last dimension of outputs [rows, ..., classes]."""
    if array.ndim == 1:
        raise ValueError(
            "When class_id is provided, y_pred must be a 2D array with shape (num_samples, "
            f"num_classes), found shape: {array.shape}."
        )
    return array[..., class_id]


def keep_top_k(y_pred: jax.Array, k: int) -> jax.Array:
    """Returns outputs with all but the `k` largest in the last dimension set to -1e10."""
    _, index = jax.lax.top_k(y_pred, k)
    is_kept = jnp.any(jax.nn.one_hot(index, y_pred.shape[-1], dtype=bool), axis=-2)
    return jnp.where(is_kept, y_pred, NOTHING)


class AUC(Metric):
    """Area under a curve.

    Args:
        num_thresholds: Number of evenly spaced thresholds from 0 to 1.
        curve: `"ROC"`: true over false positive rate; `"PR"`: precision over recall; `"PRGAIN"`:
            precision gain over recall gain (Flach and Kull 2015).
        summation_method: Height between two points: `"interpolation"` (their mean; for PR the
            interpolation of true positives of Davis and Goadrich 2006), `"minoring"` (the lower) or
            `"majoring"` (the higher).
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
        if self.curve not in _CURVES:
            raise ValueError(f'Invalid AUC curve value: "{curve}". curve must be one of {_CURVES}.')
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
            shape = (self.num_thresholds, *([num_labels] if num_labels else []))
            self._declare(dict.fromkeys(ALL_COUNTS, shape))

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

    def increments(self, y_true: Any, y_pred: Any, weight: ArrayLike | None = None) -> Sums:
        """Returns the weighted counts at each threshold, [thresholds] or [thresholds, labels]."""
        true, pred, weights = aligned(y_true, y_pred, weight)
        pred = jax.nn.sigmoid(pred) if self.from_logits else pred
        if self.multi_label and pred.ndim != 2:
            raise ValueError(
                f"`y_pred` must have rank 2 when `multi_label=True`, got the shape {pred.shape}."
            )
        if self.multi_label:
            of_label = partial(counts_at, self.thresholds)
            return jax.vmap(of_label, in_axes=1, out_axes=1)(true, pred, weights)
        if self.label_weights is not None:
            weights = weights * self.label_weights
        return counts_at(self.thresholds, true.reshape(-1), pred.reshape(-1), weights.reshape(-1))

    def compute(self, sums: Sums) -> jax.Array:
        """Returns the area, or the mean area of several labels."""
        sums = jax.tree.map(jnp.asarray, sums)
        if self.curve == "PR" and self.summation_method == "interpolation":
            return self._of_labels(_pr_area(sums))
        x, y = _points(self.curve, *(sums[name] for name in ALL_COUNTS))
        heights = _HEIGHTS[self.summation_method](y[:-1], y[1:])
        return self._of_labels(jnp.sum((x[:-1] - x[1:]) * heights, axis=0))

    def interpolate_pr_auc(self) -> jax.Array:
        """Returns the area under the precision-recall curve, with interpolated true positives."""
        return self._of_labels(_pr_area(jax.tree.map(lambda variable: variable.value, self._sums)))

    def _of_labels(self, areas: jax.Array) -> jax.Array:
        if not self.multi_label:
            return areas
        weights = jnp.ones(areas.shape) if self.label_weights is None else self.label_weights
        return divide_no_nan(jnp.sum(areas * weights), jnp.sum(weights))


def _points(
    curve: str, tp: jax.Array, fp: jax.Array, tn: jax.Array, fn: jax.Array
) -> tuple[jax.Array, jax.Array]:
    if curve == "ROC":
        return divide_no_nan(fp, fp + tn), divide_no_nan(tp, tp + fn)
    if curve == "PR":
        return divide_no_nan(tp, tp + fn), divide_no_nan(tp, tp + fp)
    scale = divide_no_nan(tp + fn, tn + fp)
    recall = jnp.where(tp == 0, 0, 1 - scale * divide_no_nan(fn, tp))
    precision = jnp.where(tp == 0, 1, 1 - scale * divide_no_nan(fp, tp))
    return jnp.maximum(recall, 0), precision


_HEIGHTS = {
    "interpolation": lambda a, b: (a + b) / 2,
    "minoring": jnp.minimum,
    "majoring": jnp.maximum,
}


def _pr_area(sums: Sums) -> jax.Array:
    """Returns the area under the precision-recall curve, with interpolated true positives."""
    # Between two points, precision = (slope * p + intercept) / p for p positive decisions; its
    # integral over recall is summed (Davis and Goadrich 2006, "The relationship between
    # precision-recall and ROC curves").
    true_positives = sums[TRUE_POSITIVES]
    positives = true_positives + sums[FALSE_POSITIVES]
    step = true_positives[:-1] - true_positives[1:]
    slope = divide_no_nan(step, jnp.maximum(positives[:-1] - positives[1:], 0))
    intercept = true_positives[1:] - slope * positives[1:]
    has_both = (positives[:-1] > 0) & (positives[1:] > 0)
    ratio = jnp.where(has_both, divide_no_nan(positives[:-1], positives[1:]), 1)
    integrals = slope * (step + intercept * jnp.log(ratio))
    positive_targets = true_positives[1:] + sums[FALSE_NEGATIVES][1:]
    return jnp.sum(divide_no_nan(integrals, positive_targets), axis=0)


class ThresholdCounts(Metric):
    """Base class of metrics made from counts at thresholds; outputs above are positive decisions.

    Args:
        name: See `Metric`.
        dtype: See `Metric`; as in Keras, counts are always float32.
        counts: The counts, of the four, that the metric needs.
        thresholds: One or several numbers in [0, 1], by default 0.5; for several, the result has
            one entry each.
        top_k: Only the `top_k` largest outputs of a row can be positive; without thresholds all of
            them are.
        class_id: Only this entry of the last dimension counts.
    """

    def __init__(
        self,
        name: str | None,
        dtype: Any,
        counts: Sequence[str],
        thresholds: float | Sequence[float] | None,
        top_k: int | None = None,
        class_id: int | None = None,
    ) -> None:
        super().__init__(dtype, name)
        default = 0.5 if top_k is None else NOTHING
        self.init_thresholds = thresholds
        chosen = default if thresholds is None else thresholds
        given = np.atleast_1d(np.asarray(chosen, object)).tolist()
        invalid = [value for value in given if value is None or not 0 <= value <= 1]
        if invalid and thresholds is not None:
            raise ValueError(f"Threshold values must be in [0, 1]. Received: {invalid}")
        self.thresholds: list[float] = given
        self.top_k = top_k
        self.class_id = class_id
        self.counts = tuple(counts)
        self._declare(dict.fromkeys(counts, (len(given),)))

    @property
    def threshold(self) -> float | None:
        """The threshold if there is one, otherwise None."""
        return float(self.thresholds[0]) if len(self.thresholds) == 1 else None

    def increments(self, y_true: Any, y_pred: Any, weight: ArrayLike | None = None) -> Sums:
        """Returns the weighted counts at every threshold [thresholds]."""
        true, pred, weights = aligned(y_true, y_pred, weight)
        if self.top_k is not None:
            pred = keep_top_k(pred, self.top_k)
        if self.class_id is not None:
            true, pred, weights = (entry(array, self.class_id) for array in (true, pred, weights))
        flat = (array.reshape(-1) for array in (true, pred, weights))
        counted = counts_at(self.thresholds, *flat)
        return {name: counted[name] for name in self.counts}

    def _result(self, values: jax.Array) -> jax.Array:
        return values[0] if len(self.thresholds) == 1 else values


class _Share(ThresholdCounts):
    _counts: tuple[str, str]

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        top_k: int | None = None,
        class_id: int | None = None,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(name, dtype, self._counts, thresholds, top_k, class_id)

    def compute(self, sums: Sums) -> jax.Array:
        """Returns the share, one for each threshold if there are several."""
        part, rest = (sums[name] for name in self._counts)
        return self._result(divide_no_nan(part, part + rest))


class Precision(_Share):
    """True positives / positive decisions; 0 if there are none."""

    _counts = (TRUE_POSITIVES, FALSE_POSITIVES)


class Recall(_Share):
    """True positives / positive targets; 0 if there are none."""

    _counts = (TRUE_POSITIVES, FALSE_NEGATIVES)


class _Count(ThresholdCounts):
    _counted: str

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(name, dtype, (self._counted,), thresholds)
        self.accumulator = getattr(self, self._counted)

    def compute(self, sums: Sums) -> jax.Array:
        """Returns the weighted count, one for each threshold if there are several."""
        return self._result(sums[self._counted])


class TruePositives(_Count):
    """Number of positive decisions that are right."""

    _counted = TRUE_POSITIVES


class FalsePositives(_Count):
    """Number of positive decisions that are wrong."""

    _counted = FALSE_POSITIVES


class TrueNegatives(_Count):
    """Number of negative decisions that are right."""

    _counted = TRUE_NEGATIVES


class FalseNegatives(_Count):
    """Number of negative decisions that are wrong."""

    _counted = FALSE_NEGATIVES


class _BestUnderConstraint(ThresholdCounts):
    _rates: tuple[tuple[str, str], tuple[str, str]]

    def __init__(
        self, value: float, num_thresholds: int, class_id: int | None, name: str | None, dtype: Any
    ) -> None:
        if not 0 <= value <= 1:
            argument = type(self).__name__.partition("At")[2].lower()
            raise ValueError(
                f"Argument `{argument}` must be in the range [0, 1]. Received: {argument}={value}"
            )
        if num_thresholds <= 0:
            raise ValueError(
                "Argument `num_thresholds` must be an integer > 0. Received: "
                f"num_thresholds={num_thresholds}"
            )
        thresholds = [0.5]
        if num_thresholds > 1:
            thresholds = [index / (num_thresholds - 1) for index in range(num_thresholds)]
        super().__init__(name, dtype, ALL_COUNTS, thresholds, class_id=class_id)
        self.value = value
        self.num_thresholds = num_thresholds

    def compute(self, sums: Sums) -> jax.Array:
        """Returns the largest rate at the thresholds that keep the constraint, 0 if none does."""
        parts = [(sums[part], sums[rest]) for part, rest in self._rates]
        rate, constrained = (divide_no_nan(part, part + rest) for part, rest in parts)
        return jnp.max(jnp.where(constrained >= self.value, rate, 0), initial=0)


_SENSITIVITY, _SPECIFICITY = (TRUE_POSITIVES, FALSE_NEGATIVES), (TRUE_NEGATIVES, FALSE_POSITIVES)
_PRECISION = (TRUE_POSITIVES, FALSE_POSITIVES)


class SensitivityAtSpecificity(_BestUnderConstraint):
    """Largest sensitivity at the thresholds whose specificity is at least `specificity`."""

    _rates = (_SENSITIVITY, _SPECIFICITY)

    def __init__(
        self,
        specificity: float,
        num_thresholds: int = 200,
        class_id: int | None = None,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(specificity, num_thresholds, class_id, name, dtype)
        self.specificity = specificity


class SpecificityAtSensitivity(_BestUnderConstraint):
    """Largest specificity at the thresholds whose sensitivity is at least `sensitivity`."""

    _rates = (_SPECIFICITY, _SENSITIVITY)

    def __init__(
        self,
        sensitivity: float,
        num_thresholds: int = 200,
        class_id: int | None = None,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(sensitivity, num_thresholds, class_id, name, dtype)
        self.sensitivity = sensitivity


class PrecisionAtRecall(_BestUnderConstraint):
    """Largest precision at the thresholds whose recall is at least `recall`."""

    _rates = (_PRECISION, _SENSITIVITY)

    def __init__(
        self,
        recall: float,
        num_thresholds: int = 200,
        class_id: int | None = None,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(recall, num_thresholds, class_id, name, dtype)
        self.recall = recall


class RecallAtPrecision(_BestUnderConstraint):
    """Largest recall at the thresholds whose precision is at least `precision`."""

    _rates = (_SENSITIVITY, _PRECISION)

    def __init__(
        self,
        precision: float,
        num_thresholds: int = 200,
        class_id: int | None = None,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(precision, num_thresholds, class_id, name, dtype)
        self.precision = precision


class FBetaScore(Metric):
    """(1 + beta^2) * precision * recall / (beta^2 * precision + recall), of [rows, classes].

    Args:
        average: None for one score per class; `"micro"`: of the counts of all classes; `"macro"`:
            mean of the scores; `"weighted"`: their mean weighted by how often a class occurs.
        beta: Weight of recall, positive.
        threshold: Outputs above it are positive, in (0, 1]; with None, the largest output of a row
            is.
    """

    def __init__(
        self,
        average: str | None = None,
        beta: float = 1.0,
        threshold: float | None = None,
        name: str | None = "fbeta_score",
        dtype: Any = None,
    ) -> None:
        super().__init__(dtype, name)
        if average not in (None, "micro", "macro", "weighted"):
            raise ValueError(
                "Invalid `average` argument value. Expected one of: {None, 'micro', 'macro', "
                f"'weighted'}}. Received: average={average}"
            )
        _check_float("beta", beta)
        if beta <= 0.0:
            raise ValueError(
                f"Invalid `beta` argument value. It should be > 0. Received: beta={beta}"
            )
        if threshold is not None:
            _check_float("threshold", threshold)
            if not 0.0 < threshold <= 1.0:
                raise ValueError(
                    "Invalid `threshold` argument value. It should verify 0 < threshold <= 1. "
                    f"Received: threshold={threshold}"
                )
        self.average = average
        self.beta = beta
        self.threshold = threshold
        self.axis = None if average == "micro" else 0

    def increments(self, y_true: Any, y_pred: Any, weight: ArrayLike | None = None) -> Sums:
        """Returns the weighted counts [classes], or their sums for `"micro"`."""
        y_true, y_pred = in_dtype(y_true, self.dtype), in_dtype(y_pred, self.dtype)
        if y_true.ndim != 2 or y_pred.ndim != 2:
            raise ValueError(
                "FBetaScore expects 2D inputs with shape (batch_size, output_dim), got "
                f"y_pred.shape={y_pred.shape} and y_true.shape={y_true.shape}."
            )
        weights = jnp.asarray(1 if weight is None else weight, y_pred.dtype)
        weights = jnp.broadcast_to(weights[:, None] if weights.ndim == 1 else weights, y_pred.shape)
        positive = self._decisions(jnp.where(weights == 0, 0, y_pred)).astype(y_pred.dtype)
        counts = {
            "true_positives": positive * y_true,
            "false_positives": positive * (1 - y_true),
            "false_negatives": (1 - positive) * y_true,
            "intermediate_weights": y_true,
        }
        return {
            name: jnp.sum(weigh(count, weights), axis=self.axis, dtype=jnp.float32)
            for name, count in counts.items()
        }

    def compute(self, sums: Sums) -> jax.Array:
        """Returns the score, or one score per class without an average."""
        right, support = sums["true_positives"], sums["intermediate_weights"]
        precision = right / (right + sums["false_positives"] + EPSILON)
        recall = right / (right + sums["false_negatives"] + EPSILON)
        squared = self.beta**2
        scores = precision * recall / (squared * precision + recall + EPSILON) * (1 + squared)
        if self.average == "weighted":
            scores = jnp.sum(scores * support / (jnp.sum(support) + EPSILON))
        elif self.average is not None:
            scores = jnp.mean(scores)
        return scores.astype(self.dtype)

    def _decisions(self, y_pred: jax.Array) -> jax.Array:
        if self.threshold is not None:
            return y_pred > self.threshold
        # A row of zeros decides for no class.
        return (y_pred >= jnp.max(y_pred, axis=-1, keepdims=True)) & (jnp.abs(y_pred) > 1e-9)


class F1Score(FBetaScore):
    """Harmonic mean of precision and recall, of [rows, classes]; see `FBetaScore`."""

    def __init__(
        self,
        average: str | None = None,
        threshold: float | None = None,
        name: str | None = "f1_score",
        dtype: Any = None,
    ) -> None:
        super().__init__(average, 1.0, threshold, name, dtype)


def _check_float(name: str, value: Any) -> None:
    if not isinstance(value, float):
        raise ValueError(
            f"Invalid `{name}` argument value. It should be a Python float. Received: "
            f"{name}={value} of type '{type(value)}'"
        )
