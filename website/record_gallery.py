"""Runs the programs of the gallery, and keeps what they print and a picture of what they found.

    python website/record_gallery.py [NAME ...]

Texts and pictures go to `docs/gallery/`, which the pages of the site show (`website/gallery.py`).
"""

import contextlib
import importlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import gallery
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from repository import ROOT

import tnt_jax as tnt

TO = ROOT / "docs" / "gallery"
# Epochs that are shown of a long training.
FIRST, LAST = 2, 2


class Run:
    """What a program has done: its module, result, trained models, histories and drawn images."""

    def __init__(self, name: str) -> None:
        self.models: list[Any] = []
        self.histories: list[dict[str, list[float]]] = []
        self.images: list[np.ndarray] = []
        printed = io.StringIO()
        with self._followed(), contextlib.redirect_stdout(printed):
            self.program = importlib.import_module(name)
            self.result = self.program.main()
        self.text = printed.getvalue()

    @contextlib.contextmanager
    def _followed(self) -> Iterator[None]:
        digits = importlib.import_module("digits_data")
        model, as_text, run = tnt.Model, digits.as_text, self

        class Followed(model):
            def fit(self, *args: Any, **kwargs: Any) -> Any:
                history = super().fit(*args, **kwargs)
                run.models.append(self)
                run.histories.append(history.history)
                return history

        def shown(images: Any) -> str:
            run.images.append(np.asarray(images))
            return as_text(images)

        tnt.Model, digits.as_text = Followed, shown  # pyright: ignore
        yield
        tnt.Model, digits.as_text = model, as_text  # pyright: ignore


def short(text: str) -> str:
    """Returns what was printed, without what bars left and epochs between the first and last."""
    lines = [line for line in text.splitlines() if not line.startswith("  step ")]
    kept: list[str] = []
    for line in lines:
        place = re.match(r"Epoch (\d+)/(\d+) ", line)
        number, last = map(int, place.groups()) if place else (0, 0)
        if number <= FIRST or number > last - LAST:
            kept.append(line)
        elif number == FIRST + 1:
            kept.append("...")
    return "\n".join(kept) + "\n"


def panels(number: int, width: float = 3.2, height: float = 3) -> tuple[Figure, list[Any]]:
    """Returns a figure with panels of so many inches side by side."""
    size = (width * number, height)
    figure, axes = plt.subplots(1, number, figsize=size, layout="constrained")
    return figure, list(np.atleast_1d(axes))


def curves(run: Run) -> Figure:
    """Each number of the history by epoch."""
    names = [(h, name) for h in run.histories for name in h if not name.startswith("learning")]
    figure, axes = panels(len(names))
    for axis, (history, name) in zip(axes, names, strict=True):
        axis.plot(range(1, len(history[name]) + 1), history[name])
        axis.set(xlabel="epoch", title=name.replace("_", " "))
    return figure


def drawings(run: Run) -> Figure:
    """The images that the program has shown as text."""
    images = run.images[-1]
    figure, axes = panels(len(images), 1.6, 1.6)
    for axis, image in zip(axes, images, strict=True):
        axis.imshow(image, cmap="gray_r")
        axis.set_axis_off()
    return figure


def zero_shot(run: Run) -> Figure:
    """How near the mean image of each digit is to its names in all languages."""
    module, variables, program = run.models[0].module, run.models[0].variables, run.program
    images, labels = program.load()[1]
    names = [name for language in program.NAMES for name in language]
    words = np.stack([program.spelled(name) for name in names])
    image, _ = module.apply(variables, images, np.zeros((len(images), 8), np.int32))
    _, text = module.apply(variables, np.zeros((len(words), 8, 8, 1), np.float32), words)
    nearness = np.stack(
        [np.asarray(image[labels == digit] @ text.T).mean(0) for digit in range(10)]
    )
    figure, (axis,) = panels(1, 9)
    axis.imshow(nearness, aspect="auto")
    axis.set_xticks(range(len(names)), names, rotation=90)
    axis.set(yticks=range(10), ylabel="digit", title="images (rows) and names (columns)")
    return figure


def taught(run: Run) -> Figure:
    """The test accuracy of the student alone, and of the one with a teacher."""
    figure, (axis,) = panels(1, 4)
    bars = axis.bar(["alone", "with a teacher"], run.result, width=0.5)
    axis.bar_label(bars, fmt="%.3f")
    axis.set(ylim=(0, 1.05), title="test accuracy of the student")
    return figure


def routed(run: Run) -> Figure:
    """To which expert the test images of each digit go."""
    model, (images, labels) = run.models[0], run.program.load()[1]
    _, state = model.module.apply(model.variables, images, capture_intermediates=True)
    (scores,) = state["intermediates"]["Experts_0"]["router"]["__call__"]
    shares = np.zeros((10, run.program.NUM_EXPERTS))
    np.add.at(shares, (labels, np.argmax(scores, axis=-1)), 1)
    figure, (axis,) = panels(1, 4)
    axis.imshow(shares / shares.sum(1, keepdims=True), cmap="Blues")
    axis.set(xlabel="expert", ylabel="digit", yticks=range(10), title="where test images go")
    return figure


def segmented(run: Run) -> Figure:
    """Scenes, and the class of each pixel."""
    scenes, _ = run.program.scenes(*run.program.load()[1], 1)
    found = np.argmax(run.models[0].predict(scenes[:3], verbose=0), axis=-1)
    figure, axes = panels(6, 1.6, 1.6)
    for scene, classes, left, right in zip(scenes, found, axes[::2], axes[1::2], strict=False):
        left.imshow(scene[..., 0], cmap="gray_r")
        right.imshow(classes, cmap="tab20", vmin=0, vmax=19)
        for axis in (left, right):
            axis.set_axis_off()
    return figure


def forecast(run: Run) -> Figure:
    """Forecasts one after another, with the measurements that followed."""
    program = run.program
    series = np.fromfile(program.get_sample_data("eeg.dat", asfileobj=False)).reshape(800, 4)
    series = ((series - series[:600].mean(0)) / series[:600].std(0)).astype(np.float32)
    past, future = program.windows(series[600 - program.PAST :])
    each = slice(None, 96, program.FUTURE)
    low, median, high = np.moveaxis(run.models[0].predict(past[each], verbose=0), -1, 0)
    figure, (axis,) = panels(1, 8)
    measured = future[each, :, 0].ravel()
    steps = np.arange(len(measured))
    axis.fill_between(steps, low[..., 0].ravel(), high[..., 0].ravel(), alpha=0.3, label="80 %")
    axis.plot(steps, median[..., 0].ravel(), label="median")
    axis.plot(steps, measured, "k.", markersize=4, label="measured")
    axis.set(xlabel="measurement", title=f"an electrode, {program.FUTURE} steps ahead")
    axis.legend(ncols=3)
    return figure


PICTURES: dict[str, Callable[[Run], Figure]] = {
    "clip": zero_shot,
    "distillation": taught,
    "experts": routed,
    "forecasting": forecast,
    "gan": drawings,
    "keras_hub_bert": curves,
    "packed_language_model": curves,
    "segmentation_unet": segmented,
    "variational_autoencoder": drawings,
    "vision_transformer": curves,
}


def main() -> None:
    """Records the programs that the command names, or all."""
    os.chdir(ROOT)
    sys.path.insert(0, str(gallery.PROGRAMS))
    TO.mkdir(exist_ok=True)
    for name in sys.argv[1:] or gallery.names():
        run = Run(name)
        TO.joinpath(f"{name}.txt").write_text(short(run.text))
        PICTURES[name](run).savefig(TO / f"{name}.png", dpi=80)
        print(f"{name}: {run.text.splitlines()[-1]}", flush=True)


if __name__ == "__main__":
    main()
