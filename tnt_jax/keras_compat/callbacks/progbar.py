"""Progress output: a bar on a terminal or in a notebook, lines elsewhere; only the master shows."""

import importlib.util
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from tnt_jax.keras_compat.callbacks.base import Callback
from tnt_jax.log import beside_bars, logger

# Methods of dict that read its contents.
_READERS = """
    __contains__ __delitem__ __eq__ __getitem__ __ior__ __iter__ __len__ __ne__ __or__ __repr__
    __reversed__ __ror__ __setitem__ clear copy get items keys pop popitem setdefault update values
""".split()


class LazyLogs(dict[str, float]):
    """The logs of a step: a dict that waits for the devices, and computes them, on first access."""

    def __init__(self, read: Callable[[], dict[str, float]]) -> None:
        # json.dumps reads the size in C before it calls a method: an empty dict would be written as
        # {}.
        super().__init__(loss=0.0)
        self._read: Callable[[], dict[str, float]] | None = read

    def __bool__(self) -> bool:
        """Returns True: every step has a loss, so `logs or {}` need not wait."""
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies as a plain dict."""
        return dict, (dict(self),)

    def _fill(self) -> None:
        if self._read is not None:
            read, self._read = self._read, None
            dict.clear(self)
            dict.update(self, read())


def _filled_before(name: str) -> Callable:
    method = getattr(dict, name)

    def call(self: LazyLogs, *args: Any, **kwargs: Any) -> Any:
        self._fill()
        return method(self, *args, **kwargs)

    call.__name__ = name
    call.__doc__ = method.__doc__
    return call


for _name in _READERS:
    setattr(LazyLogs, _name, _filled_before(_name))


_LAYOUT = "{desc}: |{bar:WIDTH}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_OPEN_LAYOUT = "{desc}: step {n_fmt} [{elapsed}{postfix}]"
_NARROW_LAYOUT = "{desc}: {n_fmt}/{total_fmt}"
_WIDEST_BAR, _NARROWEST_BAR = 20, 3


def new_bar(title: str, total: int | None) -> Any:
    """Returns a bar for the screen of this process, or None if it can show none."""
    if _is_notebook():
        return _notebook_bar(title, total)
    if not sys.stdout.isatty():
        return None
    bar = tqdm(
        total=total,
        desc=title,
        bar_format=_OPEN_LAYOUT if total is None else _NARROW_LAYOUT,
        file=sys.stdout,
        leave=False,
        dynamic_ncols=True,
    )
    show_items(bar, 0, [])
    return bar


def show_items(bar: Any, step: int, items: Sequence[str]) -> None:
    """Draws a bar at a step, with the first items that fit: half a number would be a wrong one."""
    bar.n = step
    shown = bar.format_dict
    if not bar.gui:
        columns = shown["ncols"] or 10_000  # What is no device has no width.
        bar.bar_format, items = _fitting(shown, items, columns - 1)
    bar.set_postfix_str(", ".join(items), refresh=False)
    bar.refresh()


def close(bar: Any, step: int) -> None:
    """Removes a bar from the screen, at the step at which it ends."""
    bar.n = bar.total = step  # A bar of HTML that ends early would stay, in red.
    bar.close()


def _fitting(
    shown: dict[str, Any], items: Sequence[str], columns: int
) -> tuple[str, Sequence[str]]:
    """Returns the layout and the items that fit into a number of columns."""
    is_open = shown["total"] is None
    layout = _OPEN_LAYOUT if is_open else _LAYOUT.replace("{bar:WIDTH}", "")
    taken = len(tqdm.format_meter(**{**shown, "postfix": "", "bar_format": layout, "ncols": None}))
    left = columns - taken - (0 if is_open else _NARROWEST_BAR)
    if left < 0:
        return (layout if is_open else _NARROW_LAYOUT), []
    fitting = []
    for item in items:
        if len(item) + 2 > left:
            break
        fitting.append(item)
        left -= len(item) + 2
    width = min(_WIDEST_BAR, _NARROWEST_BAR + left)
    return (layout if is_open else _LAYOUT.replace("WIDTH", str(width))), fitting


def _is_notebook() -> bool:
    """Returns whether this process is the kernel of a notebook, which shows HTML."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and "IPKernelApp" in shell.config


def _notebook_bar(title: str, total: int | None) -> Any:
    if importlib.util.find_spec("ipywidgets") is None:
        logger.info("`pip install ipywidgets` shows a bar here instead of lines.")
        return None
    from tqdm.notebook import tqdm as html_bar

    layout = _OPEN_LAYOUT if total is None else _LAYOUT.replace("{bar:WIDTH}", "{bar}")
    return html_bar(total=total, desc=title, bar_format=layout, file=sys.stdout, leave=False)


# Seconds between two refreshes of a bar, and between two progress lines without a terminal.
_BAR_INTERVAL_S, _LINE_INTERVAL_S = 0.2, 10.0


class ProgbarLogger(Callback):
    """Shows step, examples/s, remaining time and running metrics.

    With `verbose=1` a bar moves during the epoch; with 2 there is one line per epoch. The bar fits
    the terminal's width, also after a resize: metrics for which there is no room are left out. In a
    notebook it is one of HTML, if ipywidgets is installed. If the output is neither, the bar
    becomes a line every ten seconds. A moving bar shows the metrics of the step before the last
    one, so that it need not wait for the devices; the line at the end of an epoch is exact.

    Args:
        verbose: 1 or 2.
    """

    def __init__(self, verbose: int = 1) -> None:
        super().__init__()
        self._verbose = verbose
        self._bar: Any = None
        self._show_warning: Any = None
        self._steps = self._rows = self._first_rows = 0
        self._start = self._shown = self._train_s = self._first_end = 0.0
        self._before: LazyLogs | Mapping[str, float] | None = None

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Starts the bar of an epoch."""
        self._begin(f"Epoch {epoch + 1}/{self.params['epochs']}", self.params.get("steps"))

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Shows that the step is being compiled, which takes a while."""
        if self._bar is not None and self.model.is_compiling:
            what = "compiling" if batch == 0 else "compiling for a batch of another size"
            show_items(self._bar, self._steps, [what])

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Moves the bar."""
        self._advance(logs)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Replaces the bar with the exact numbers of the epoch."""
        self._end(f"Epoch {epoch + 1}/{self.params['epochs']}", logs)

    def on_test_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Marks the end of the training steps, or starts the bar of a separate evaluation."""
        if self._is_training():
            self._train_s = time.perf_counter() - self._start
        else:
            self._begin("Evaluate", self.params.get("steps"))

    def on_test_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Moves the bar of an evaluation."""
        if not self._is_training():
            self._advance(logs)

    def on_test_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Shows the result of a separate evaluation."""
        if not self._is_training():
            self._end("Evaluate", logs)

    def on_predict_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Starts the bar of a prediction."""
        self._begin("Predict", self.params.get("steps"))

    def on_predict_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Moves the bar of a prediction."""
        self._advance(None)

    def on_predict_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Closes the bar of a prediction."""
        self._end("Predict", {})

    def clear(self) -> None:
        """Removes the bar, if there is one, and shows warnings as before it."""
        if self._bar is not None:
            close(self._bar, self._steps)
            self._bar = None
            warnings.showwarning = self._show_warning

    def _is_training(self) -> bool:
        return "epochs" in self.params

    def _begin(self, title: str, total: int | None) -> None:
        self._steps = self._rows = 0
        self._start = self._shown = time.perf_counter()
        self._train_s = 0.0
        self._before = None
        self._bar = new_bar(title, total) if self._verbose == 1 else None
        if self._bar is not None:
            # Warnings are printed on lines of their own, and the bar below them.
            self._show_warning = warnings.showwarning
            warnings.showwarning = beside_bars()(warnings.showwarning)

    def _advance(self, logs: Mapping[str, float] | None) -> None:
        self._steps += 1
        self._rows += self.model.rows_in_batch
        elapsed = time.perf_counter()
        if self._steps == 1:
            self._first_rows = self._rows
            self._first_end = elapsed
        interval = _BAR_INTERVAL_S if self._bar is not None else _LINE_INTERVAL_S
        if self._verbose == 1 and elapsed - self._shown >= interval:
            self._show(elapsed)
        self._before = logs

    def _show(self, moment: float) -> None:
        self._shown = moment
        rate = self._rate(moment)
        metrics = [f"{name} {_short(value)}" for name, value in (self._before or {}).items()]
        items = [f"{rate:,.0f} examples/s", *metrics]
        if self._bar is not None:
            show_items(self._bar, self._steps, items)
        else:
            total = self.params.get("steps")
            if total and rate:
                left_s = (total - self._steps) * self._rows / self._steps / rate
                items.append(f"{left_s:.0f} s left")
            done = f"  step {self._steps}" + (f"/{total}" if total else "")
            print(", ".join([done, *items]), flush=True)

    def _end(self, title: str, logs: Mapping[str, float] | None) -> None:
        self.clear()
        total_s = time.perf_counter() - self._start
        rate = self._rate(self._start + (self._train_s or total_s))
        values = "".join(f" - {name}: {_exact(value)}" for name, value in (logs or {}).items())
        took = f"{self._steps} steps - {total_s:.1f} s - {rate:,.0f} examples/s"
        print(f"{title} - {took}{values}", flush=True)

    def _rate(self, moment: float) -> float:
        """Returns the examples per second, without the first step, which compiles, if it can."""
        rows, start = self._rows, self._start
        if self._steps > 1:
            rows, start = rows - self._first_rows, self._first_end
        return rows / max(moment - start, 1e-9)


def _short(value: Any) -> str:
    return (
        f"{value:.4g}" if np.ndim(value) == 0 else np.array2string(np.asarray(value), precision=4)
    )


def _exact(value: Any) -> str:
    if np.ndim(value) > 0:
        return np.array2string(np.asarray(value), precision=4)
    return f"{value:.4f}" if abs(value) >= 1e-3 else f"{value:.4e}"
