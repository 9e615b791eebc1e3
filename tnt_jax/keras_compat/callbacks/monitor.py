"""Monitors a log: the direction of improvement, and whether a value is an improvement."""

import math
import re
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import numpy as np

from tnt_jax.distributed.host.collectives import broadcast
from tnt_jax.distributed.joining.runtime import is_master_rank
from tnt_jax.keras_compat.keras_objects import snake_case
from tnt_jax.settings import parse_save_freq

SaveFreq = int | Literal["epoch"]

# Processes agree on the time in few steps: after half of what is left, at most so long after the
# last time. As the time of the first steps says little, at most twice as many steps follow as came
# before.
_LONGEST_WAIT_S = 2.0
# The last part of an interval is not halved any more.
_LAST_PART = 0.05


class SavingTimes:
    """Counts batches, whose numbers may jump if several run in one program, up to the next save."""

    def __init__(self, save_freq: SaveFreq) -> None:
        if save_freq != "epoch" and (
            not isinstance(save_freq, int) or isinstance(save_freq, bool) or save_freq < 1
        ):
            raise ValueError(
                f"save_freq must be 'epoch' or a number of batches from 1, but is {save_freq!r}."
            )
        self.save_freq = save_freq
        self._since_last = 0
        self._last_batch: int | None = None

    def is_due_after_batch(self, batch: int) -> bool:
        """Counts the batches up to number `batch` of the epoch; returns whether a save is due."""
        is_new_epoch = self._last_batch is None or batch <= self._last_batch
        self._since_last += batch + 1 if is_new_epoch else batch - (self._last_batch or 0)
        self._last_batch = batch
        if not isinstance(self.save_freq, int) or self._since_last < self.save_freq:
            return False
        self._since_last = 0
        return True

    def start_at(self, batch: int) -> None:
        """Starts to count after `batch` batches of an epoch, right after a save."""
        self._since_last = 0
        self._last_batch = batch - 1 if batch else None


class SavingSeconds:
    """Says every so many seconds that a save is due, on all processes after the same batch."""

    def __init__(
        self, interval_s: float, *, alone: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.interval_s = interval_s
        self._alone = alone
        self._clock = clock
        self.start_at(0)

    def is_due_after_batch(self, batch: int) -> bool:
        """Counts a call after a batch; returns whether a save is due."""
        if self._alone:
            is_due = self._clock() - self._last_s >= self.interval_s
        else:
            self._calls += 1
            if self._calls < self._wait:
                return False
            is_due = self._ask()
        if is_due:
            self._last_s = self._clock()
        return is_due

    def start_at(self, batch: int) -> None:
        """Starts to count, right after a save."""
        self._last_s = self._asked_s = self._clock()
        self._calls, self._wait, self._total = 0, 1, 0

    def _ask(self) -> bool:
        """Returns whether process 0 finds that a save is due, and learns when to ask again."""
        is_due, self._wait = map(int, broadcast(np.array(self._decide(), np.int64)))
        self._total += self._calls
        self._calls, self._asked_s = 0, self._clock()
        return bool(is_due)

    def _decide(self) -> tuple[bool, int]:
        """Returns whether a save is due, and after how many calls to decide again."""
        now_s = self._clock()
        left_s = self.interval_s - (now_s - self._last_s)
        is_due = left_s <= 0
        if is_due:
            left_s = self.interval_s
        part = 1.0 if left_s < _LAST_PART * self.interval_s else 0.5
        call_s = max((now_s - self._asked_s) / self._calls, 1e-6)
        calls = math.ceil(min(part * left_s, _LONGEST_WAIT_S) / call_s)
        return is_due, min(calls, 2 * (self._total + self._calls))


def saving_times(save_freq: SaveFreq | str, *, alone: bool) -> SavingTimes | SavingSeconds:
    """Returns what says when a save is due: epochs, batches, or a time such as `"30s"`."""
    if not isinstance(save_freq, str):
        return SavingTimes(save_freq)
    chosen = parse_save_freq(save_freq)
    return SavingSeconds(chosen, alone=alone) if isinstance(chosen, float) else SavingTimes(chosen)


Mode = Literal["auto", "min", "max"]

# Words in names of metrics, classified as by Keras 3's attribute `_direction`.
_WORDS = re.compile(
    r"""(?<![a-z0-9])(?:
    (?P<max>acc|accuracy|auc|precision|recall|specificity|sensitivity|io_?u|f_?beta_?score
    |f1_?score|cosine_?similarity|r2_?score|correlation)
    |(?P<min>error|cross_?entropy|divergence|hinge|poisson|log_?cosh|loss|mse|mae|mape|msle)
    )(?![a-z])""",
    re.VERBOSE,
)


class Monitor:
    """Monitors one log."""

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
        """Decides the direction of improvement by the model's metrics."""
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
        """Returns the monitored number, or None, with a warning, if the logs do not hold it."""
        value = None if logs is None else logs.get(self.name)
        if value is not None and np.ndim(value) == 0:
            return value
        if is_master_rank():
            problem = f"the logs are: {', '.join(logs or ()) or 'none'}"
            if value is not None:
                problem = (
                    f"its metric has {np.size(value)} results. Watch a log of one number, such as "
                    "that of a metric with an average"
                )
            warnings.warn(f"{who} watches {self.name!r}, but {problem}.", stacklevel=3)
        return None

    def is_better(self, value: float, than: float | None) -> bool:
        """Returns whether a value is better by more than the smallest change.

        Any value improves on None, and unlike in Keras any number on NaN.
        """
        if than is None:
            return True
        if math.isnan(than):
            return not math.isnan(value)
        if self._mode == "max":
            return value - self._min_delta > than
        return value + self._min_delta < than


def direction(log: str, model: Any) -> Mode:
    """Returns whether less or more of a log is better, by its metric; `"auto"` if nobody knows."""
    log = log.removeprefix("val_")
    metric = getattr(model, "metrics_by_log", {}).get(log)
    # What computes it, of Keras or the user's, tells more than its name.
    kinds = type(getattr(metric, "stateful", metric)).__mro__
    function = getattr(getattr(metric, "fn", None), "__name__", "")
    for text in (*(kind.__name__ for kind in kinds), function, log):
        # The last word decides: `iou_loss` is a loss.
        for found in reversed([*_WORDS.finditer(snake_case(re.sub(r"\W", "_", text)))]):
            return cast(Mode, found.lastgroup)
    return "auto"
