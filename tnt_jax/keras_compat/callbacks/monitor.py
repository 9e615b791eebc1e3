"""The log that a callback watches: which direction is better, and whether a value is an improvement."""

from collections.abc import Mapping
from typing import Any, Literal

from tnt_jax.log import logger

Mode = Literal["auto", "min", "max"]

# Parts of the class names of metrics, as Keras 3 sorts them by its attribute `_direction`.
_UP = (
    "accuracy", "auc", "precision", "recall", "specificity", "sensitivity", "iou", "fbetascore", "f1score", "cosinesimilarity",
    "r2score", "correlation",
)  # fmt: skip
_DOWN = ("error", "crossentropy", "divergence", "hinge", "poisson", "logcosh", "loss")


class Monitor:
    """Watches one log.

    Args:
        name: Name of the log, such as `val_loss`.
        mode: Whether less (`"min"`) or more (`"max"`) is better; `"auto"` follows from the metric.
        min_delta: Smallest change that counts as an improvement.

    Raises:
        ValueError: If the mode is unknown.
    """

    def __init__(self, name: str, *, mode: Mode = "auto", min_delta: float = 0.0) -> None:
        if mode not in ("auto", "min", "max"):
            raise ValueError(f"mode must be 'auto', 'min' or 'max', but is {mode!r}.")
        self.name = name
        self._mode, self._min_delta = mode, abs(min_delta)

    def resolve(self, model: Any) -> None:
        """Decides which direction is better, by the model's metrics.

        Raises:
            ValueError: If the mode is `"auto"` and the metric does not tell.
        """
        if self._mode == "auto":
            found = direction(self.name, model)
            if found == "auto":
                raise ValueError(
                    f"Whether more or less of {self.name!r} is better is unknown. Pass mode='max' or mode='min'; the logs are "
                    f"{', '.join(model.metrics_names)}, and the same with val_."
                )
            self._mode = found

    def value(self, logs: Mapping[str, float] | None, *, who: str) -> float | None:
        """Returns the watched value; None, with a warning, where the logs do not hold it.

        Args:
            logs: Logs of an epoch.
            who: The callback that asks, for the warning.
        """
        if logs is None or self.name not in logs:
            logger.warning("%s watches %r, but the logs are: %s.", who, self.name, ", ".join(logs or ()) or "none")
            return None
        return logs[self.name]

    def is_better(self, value: float, than: float | None) -> bool:
        """Tells whether a value improves on another by more than the smallest change; any value improves on None."""
        if than is None:
            return True
        return value - self._min_delta > than if self._mode == "max" else value + self._min_delta < than


def direction(log: str, model: Any) -> Mode:
    """Returns whether less or more of a log is better, by the class of its metric; `"auto"` if that is not known.

    Args:
        log: Name of a log, with or without `val_`.
        model: Model whose metrics are known by the names of their logs, in `metrics_by_log`.
    """
    log = log.removeprefix("val_")
    metric = model.metrics_by_log.get(log)
    texts = [log] if metric is None else [*(cls.__name__ for cls in type(metric).__mro__), log]
    for text in texts:
        plain = text.lower().replace("_", "")
        if any(part in plain for part in _UP) or plain == "acc":
            return "max"
        if any(part in plain for part in _DOWN) or plain in ("mse", "mae", "mape", "msle"):
            return "min"
    return "auto"
