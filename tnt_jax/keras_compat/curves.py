"""Plots of logs."""

import math
import os
from collections.abc import Mapping, Sequence

# Size of one plot, in inches.
_WIDTH, _HEIGHT = 5.0, 3.4
_COLUMNS = 3


def draw_curves(
    path: str | os.PathLike[str],
    history: Mapping[str, Sequence[float]],
    epochs: Sequence[int] | None = None,
) -> None:
    """Draws one plot for each log, with its `val_` curve."""
    if not history:
        raise ValueError("There are no logs to draw.")
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Drawing curves needs matplotlib: pip install matplotlib."
        ) from error
    names = [
        name
        for name in history
        if not name.startswith("val_") or name.removeprefix("val_") not in history
    ]
    columns = min(len(names), _COLUMNS)
    rows = math.ceil(len(names) / columns)
    # A separate figure, without pyplot: nothing stays open and no screen is needed.
    figure = Figure(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
    for index, name in enumerate(names):
        axes = figure.add_subplot(rows, columns, index + 1)
        for log in (name, f"val_{name}"):
            if history.get(log):
                axes.plot(
                    _places(len(history[log]), epochs, len(history[name])),
                    history[log],
                    label=log,
                    marker=".",
                )
        axes.set_xlabel("epoch")
        axes.set_title(name)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path)


def _places(count: int, epochs: Sequence[int] | None, num_epochs: int) -> list[float]:
    """Returns the positions of a log's values: their epochs, from 1, or evenly spaced.

    They are spaced evenly up to the last epoch if some epochs have no value.
    """
    numbers = [epoch + 1 for epoch in (epochs or range(num_epochs))]
    if count == len(numbers):
        return [float(number) for number in numbers]
    first = numbers[0] - 1
    return [first + (numbers[-1] - first) * (index + 1) / count for index in range(count)]
