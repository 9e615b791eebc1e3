"""The notebooks run from top to bottom, and the outputs stored in them are those of their cells."""

import nbformat
import pytest
from nbclient import NotebookClient
from pages import ROOT

NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))
# These start processes, as tests of the launcher and of resumption do.
LONG = ("resume_and_devices", "several_processes")


def outputs(book):
    """Returns the kinds of outputs that each cell has, without bars and what goes to stderr, such
    as a warning that the machine is slow.
    """
    return [
        {
            "picture" if "image/png" in output.get("data", {}) else output["output_type"]
            for output in cell.outputs
            if "application/vnd.jupyter.widget-view+json" not in output.get("data", {})
            and output.get("name") != "stderr"
        }
        for cell in book.cells
        if cell.cell_type == "code"
    ]


def run(book, folder):
    """Runs a notebook, and raises what a cell raises."""
    return NotebookClient(book, timeout=300, resources={"metadata": {"path": folder}}).execute()


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.long) if path.stem in LONG else path
        for path in NOTEBOOKS
    ],
    ids=lambda path: path.stem,
)
def test_a_notebook_runs_and_holds_its_outputs(path, tmp_path, monkeypatch):
    # A notebook chooses its own devices.
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    stored = nbformat.read(path, as_version=4)
    done = run(nbformat.read(path, as_version=4), tmp_path)
    assert outputs(stored) == outputs(done)


def test_a_bar_of_a_notebook_is_html(tmp_path):
    pytest.importorskip("ipywidgets")
    book = nbformat.v4.new_notebook()
    book.cells = [
        nbformat.v4.new_code_cell(
            "from tnt_jax.keras_compat.callbacks import progbar as bars\n"
            "bar = bars.new_bar('Epoch 1/3', 100)\n"
            "bars.show_items(bar, 40, ['loss 0.1234', 'accuracy 0.9'])\n"
            "print([child.value for child in bar.container.children])\n"
            "bars.close(bar, 90)\n"
            "print(bar.container.layout.visibility)\n"
        )
    ]
    cell = run(book, tmp_path).cells[0]
    assert any(
        "application/vnd.jupyter.widget-view+json" in o.get("data", {}) for o in cell.outputs
    )
    printed = "".join(o["text"] for o in cell.outputs if o["output_type"] == "stream")
    assert "40.0" in printed
    assert "loss\\u20070.1234, accuracy\\u20070.9" in printed.replace(",\\u2007", ", ")
    assert "hidden" in printed
