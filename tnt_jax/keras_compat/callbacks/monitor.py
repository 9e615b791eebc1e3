"""Monitors a log: the direction of improvement, and whether a value is an improvement."""

import math
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from tnt_jax.distributed.runtime import is_master_rank

Mode = Literal["auto", "min", "max"]

# Parts of metric class names, classified as by Keras 3's attribute `_direction`.
_UP = (
    "accuracy", "auc", "precision", "recall", "specificity", "sensitivity", "iou", "fbetascore",
    "f1score", "cosinesimilarity",
    "r2score", "correlation",
)  # fmt: skip
_DOWN = ("error", "crossentropy", "divergence", "hinge", "poisson", "logcosh", "loss")


class Monitor:
    """Monitors one log.

    Args:
        name: Name of the log, such as `val_loss`.
        mode: Whether less (`"min"`) or more (`"max"`) is better; `"auto"` decides by the metric. As
            in Keras, an unknown mode is `"auto"`, with a warning.
        min_delta: Smallest change that counts as an improvement.
    """

    def __init__(self, name: str, *, mode: Mode = "auto", min_delta: float = 0.0) -> None:
        if mode not in ("auto", "min", "max"):
            warnings.warn(
                f"mode must be 'auto', 'min' or 'max', but is {mode!r}: it is treated as 'auto'.",
                stacklevel=3,
            )
            mode = "auto"
        self.name = name
        self._mode = mode
        self._min_delta = abs(min_delta)

    def resolve(self, model: Any) -> None:
        """Decides the direction of improvement by the model's metrics.

        Raises:
            ValueError: If the mode is `"auto"` and the metric does not tell.
        """
        if self._mode == "auto":
            found = direction(self.name, model)
            if found == "auto":
                raise ValueError(
                    f"Whether more or less of {self.name!r} is better is unknown. Pass mode='max' "
                    "or mode='min'; the logs are "
                    f"{', '.join(getattr(model, 'metrics_names', ()))}, and the same with val_."
                )
            self._mode = found

    def value(self, logs: Mapping[str, float] | None, *, who: str) -> float | None:
        """Returns the monitored value, or None, with a warning, if the logs do not hold it.

        Args:
            logs: Logs of an epoch.
            who: The callback that asks, for the warning.
        """
        if logs is None or self.name not in logs:
            if is_master_rank():
                warnings.warn(
                    f"{who} watches {self.name!r}, but the logs are: "
                    f"{', '.join(logs or ()) or 'none'}.",
                    stacklevel=3,
                )
            return None
        return logs[self.name]

    def is_better(self, value: float, than: float | None) -> bool:
        """Returns whether a value improves on another by more than the smallest change.

        Any value improves on None, and any number on NaN; in Keras an initial NaN stays the best
        value forever.
        """
        if than is None:
            return True
        if math.isnan(than):
            return not math.isnan(value)
        return (
            value - self._min_delta > than
            if self._mode == "max"
            else value + self._min_delta < than
        )


def direction(log: str, model: Any) -> Mode:
    """Returns whether less or more of a log is better, by the class of its metric.

    The result is `"auto"` if that is unknown.

    Args:
        log: Name of a log, with or without `val_`.
        model: Model with `metrics_by_log`, its metrics by log name; for other models the name of
            the log decides.
    """
    log = log.removeprefix("val_")
    metric = getattr(model, "metrics_by_log", {}).get(log)
    texts = [log] if metric is None else [*(cls.__name__ for cls in type(metric).__mro__), log]
    for text in texts:
        plain = text.lower().replace("_", "")
        if any(part in plain for part in _UP) or plain == "acc":
            return "max"
        if any(part in plain for part in _DOWN) or plain in ("mse", "mae", "mape", "msle"):
            return "min"
    return "auto"
