"""Metrics on decisions at thresholds: precision, recall, the four counts, constrained rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from tnt_jax.keras_compat.losses.arrays import divide_no_nan
from tnt_jax.keras_compat.metrics.base import Metric
from tnt_jax.keras_compat.metrics.counts import (
    ALL_COUNTS,
    FALSE_NEGATIVES,
    FALSE_POSITIVES,
    NOTHING,
    TRUE_NEGATIVES,
    TRUE_POSITIVES,
    aligned,
    counts_at,
    entry,
    keep_top_k,
)


class ThresholdCounts(Metric):
    """Base class of metrics made from counts at thresholds.

    An output above a threshold is a positive decision.

    Args:
        name: Name of the metric.
        thresholds: One or several numbers in [0, 1], by default 0.5; for several, the result has
            one entry each.
        top_k: Only the `top_k` largest outputs of a row can be positive; without thresholds all of
            them are.
        class_id: Only this entry of the last dimension counts.
        counts: The counts, of the four, that the metric needs.
        dtype: See `Metric`; as in Keras, counts are always float32.
    """

    def __init__(
        self,
        name: str | None,
        *,
        thresholds: float | Sequence[float] | None,
        top_k: int | None,
        class_id: int | None,
        counts: Sequence[str],
        dtype: Any = None,
    ) -> None:
        super().__init__(dtype, name)
        default = 0.5 if top_k is None else NOTHING
        self.init_thresholds = thresholds
        given = np.atleast_1d(
            np.asarray(default if thresholds is None else thresholds, object)
        ).tolist()
        invalid = [
            value
            for value in given
            if thresholds is not None and (value is None or not 0 <= value <= 1)
        ]
        if invalid:
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

    def increments(
        self, y_true: Any, y_pred: Any, weight: ArrayLike | None = None
    ) -> dict[str, jax.Array]:
        """Returns the weighted counts at every threshold [thresholds].

        Args:
            y_true: Targets, 0 or not [rows, ...].
            y_pred: Probabilities [rows, ...].
            weight: Weights [rows], or one for each output.
        """
        true, pred, weights = aligned(y_true, y_pred, weight)
        if self.top_k is not None:
            pred = keep_top_k(pred, self.top_k)
        if self.class_id is not None:
            true, pred, weights = (entry(array, self.class_id) for array in (true, pred, weights))
        counted = counts_at(
            self.thresholds, true.reshape(-1), pred.reshape(-1), weights.reshape(-1)
        )
        return {name: counted[name] for name in self.counts}

    def _result(self, values: jax.Array) -> jax.Array:
        return values[0] if len(self.thresholds) == 1 else values


class Precision(ThresholdCounts):
    """True positives / positive decisions; 0 if there are none."""

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        top_k: int | None = None,
        class_id: int | None = None,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        counts = (TRUE_POSITIVES, FALSE_POSITIVES)
        super().__init__(
            name, thresholds=thresholds, top_k=top_k, class_id=class_id, counts=counts, dtype=dtype
        )

    def compute(self, sums: dict[str, jax.Array]) -> jax.Array:
        """Returns the precision, one for each threshold if there are several."""
        return self._result(
            divide_no_nan(sums[TRUE_POSITIVES], sums[TRUE_POSITIVES] + sums[FALSE_POSITIVES])
        )


class Recall(ThresholdCounts):
    """True positives / positive targets; 0 if there are none."""

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        top_k: int | None = None,
        class_id: int | None = None,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        counts = (TRUE_POSITIVES, FALSE_NEGATIVES)
        super().__init__(
            name, thresholds=thresholds, top_k=top_k, class_id=class_id, counts=counts, dtype=dtype
        )

    def compute(self, sums: dict[str, jax.Array]) -> jax.Array:
        """Returns the recall, one for each threshold if there are several."""
        return self._result(
            divide_no_nan(sums[TRUE_POSITIVES], sums[TRUE_POSITIVES] + sums[FALSE_NEGATIVES])
        )


class _Count(ThresholdCounts):
    _counted: str

    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        name: str | None = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            name,
            thresholds=thresholds,
            top_k=None,
            class_id=None,
            counts=(self._counted,),
            dtype=dtype,
        )
        self.accumulator = getattr(self, self._counted)

    def compute(self, sums: dict[str, jax.Array]) -> jax.Array:
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
        thresholds = (
            [0.5]
            if num_thresholds == 1
            else [index / (num_thresholds - 1) for index in range(num_thresholds)]
        )
        super().__init__(
            name,
            thresholds=thresholds,
            top_k=None,
            class_id=class_id,
            counts=ALL_COUNTS,
            dtype=dtype,
        )
        self.value = value
        self.num_thresholds = num_thresholds

    def compute(self, sums: dict[str, jax.Array]) -> jax.Array:
        """Returns the largest rate at the thresholds that keep the constraint, 0 if none does."""
        rate, constrained = (
            divide_no_nan(sums[part], sums[part] + sums[rest]) for part, rest in self._rates
        )
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
