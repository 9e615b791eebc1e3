"""Bars of tqdm: one line that fits a terminal of any width, or HTML in a notebook."""

import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from tnt_jax.log import logger

_LAYOUT = "{desc}: |{bar:WIDTH}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
_OPEN_LAYOUT = "{desc}: step {n_fmt} [{elapsed}{postfix}]"
_NARROW_LAYOUT = "{desc}: {n_fmt}/{total_fmt}"
_WIDEST_BAR, _NARROWEST_BAR = 20, 3


def new_bar(title: str, total: int | None) -> Any:
    """Returns a bar for the screen of this process, or None if it can show none.

    Args:
        title: What stands before the bar.
        total: Steps until the end; None if nobody knows.
    """
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
    """Draws a bar at a step, with the first items for which the terminal has room.

    An item is shown as a whole or not at all: half a number would be a wrong one.
    """
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
