"""The notebook that compares the histories of several runs: all its cells run."""

import json
from pathlib import Path

import numpy as np
import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "cifar10" / "analysis.ipynb"


def cells():
    book = json.loads(NOTEBOOK.read_text())
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert all(not cell["outputs"] for cell in book["cells"] if cell["cell_type"] == "code")
    return ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]


def write_run(folder, *, n_ranks, seconds, val_accuracy):
    folder.mkdir(parents=True)
    epochs = np.arange(1, len(val_accuracy) + 1)
    logs = {"loss": 2 / epochs, "val_loss": 2.2 / epochs, "accuracy": np.array(val_accuracy) + 0.05}
    np.savez(
        folder / "history.npz",
        n_ranks=n_ranks,
        time=[30.0, *[seconds] * (len(epochs) - 1)],
        val_accuracy=val_accuracy,
        **logs,
    )


def run_cells(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = []
    monkeypatch.setattr(plt, "show", lambda: shown.append(plt.gcf()))
    names = {}
    for number, cell in enumerate(cells()):
        exec(compile(cell, f"analysis.ipynb, cell {number}", "exec"), names)
    plt.close("all")
    return shown


def test_the_notebook_compares_runs_and_plots_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RUNS", str(tmp_path))
    write_run(tmp_path / "one", n_ranks=1, seconds=12.0, val_accuracy=[0.3, 0.6, 0.7])
    write_run(tmp_path / "four", n_ranks=4, seconds=4.0, val_accuracy=[0.2, 0.5, 0.6, 0.55])
    figures = run_cells(monkeypatch)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["one", "1", "3", "0.7000", "3", "12.00"] in rows
    assert ["four", "4", "4", "0.6000", "3", "4.00"] in rows
    assert ["four", "4", "3.00", "75%"] in rows
    # 0.6 is the best that both have reached, each in the time of its epochs so far.
    assert ["one", "2", "epochs", "42.0", "s"] in rows
    assert ["four", "3", "epochs", "38.0", "s"] in rows
    assert [len(figure.axes) for figure in figures] == [2, 1, 1]
    loss, accuracy = figures[0].axes
    assert [line.get_ydata()[0] for line in loss.lines] == [2.0, 2.2, 2.0, 2.2]
    assert len(accuracy.lines) == 4
    assert all(axis.get_xlabel() and axis.get_ylabel() for f in figures for axis in f.axes)


def test_a_folder_without_runs_is_explained(tmp_path, monkeypatch):
    monkeypatch.setenv("RUNS", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"holds no history\.npz\. Set RUNS"):
        run_cells(monkeypatch)
