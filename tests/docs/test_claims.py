"""What the pages say of measurements is what the files of results hold, each with its command."""

import json
import re
import statistics

import pytest
from pages import PAGES, ROOT

RESULTS = ROOT / "benchmarks/results"
NOTEBOOK = (ROOT / "benchmarks/README.md").read_text()


def rows_below(text, heading):
    """Returns the cells of the first table below a line that starts with `heading`."""
    table = text[text.index(heading) :].split("\n\n")
    lines = next(part for part in table if part.startswith("| ") and "| --- |" in part)
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines.splitlines()[2:]]


def scaling():
    return json.loads((RESULTS / "scaling.json").read_text())["efficiencies"]


def shown(seconds):
    return f"{seconds * 1e3:.1f}"


def median_and_range(values):
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


@pytest.mark.parametrize(
    ("row", "model"), [(0, "mlp"), (1, "transformer_tiny"), (2, "resnet20")], ids=str
)
def test_the_table_beside_others_holds_the_measured_times(row, model):
    _, own, others, command = rows_below((ROOT / "README.md").read_text(), "## Beside others")[row]
    measured = {
        line["contender"]: shown(line["weak_s"][1])
        for line in scaling()
        if line["model"] == model and line["kind"] == "processes"
    }
    named = dict(re.findall(r"(PyTorch DDP|TensorFlow|Keras 3) ([\d.]+)", others))
    assert own == measured["tnt_jax"]
    assert named == {
        "PyTorch DDP": measured["PyTorch DDP"],
        "TensorFlow": measured["TensorFlow MultiWorkerMirrored"],
        "Keras 3": measured["Keras 3 DataParallel"],
    }
    assert command in ("`python benchmarks/scaling.py`", "the same")


def test_the_notebooks_table_of_scaling_holds_the_measured_times():
    measured = {
        (line["model"], line["contender"], line["kind"]): (
            *map(shown, line["weak_s"]),
            f"{line['weak']:.2f}",
            shown(line["strong_s"][0]),
            f"{line['strong']:.2f}",
        )
        for line in scaling()
    }
    rows = {tuple(row[:3]): tuple(row[3:]) for row in rows_below(NOTEBOOK, "## Scaling")}
    assert rows == measured


def test_the_notebooks_table_of_first_steps_holds_the_measured_seconds():
    networks = {"mlp": "MLP", "resnet20": "ResNet-20"}
    contenders = [
        "tnt_jax", "tnt_jax, joined XLA sums", "PyTorch DDP", "PyTorch DDP, torch.compile",
        "Keras 3 DataParallel",
    ]  # fmt: skip
    expected = {}
    for file in ("first_step", "first_step_8"):
        for row in json.loads((RESULTS / f"{file}.json").read_text())["rows"]:
            cold, *kept = (start["total"] for start in row["starts"])
            cells = expected.setdefault(
                (networks[row["model"]], str(row["processes"])), [""] * len(contenders)
            )
            cells[contenders.index(row["contender"])] = f"{cold:.1f}, {statistics.median(kept):.1f}"
    found = {
        tuple(row[:2]): row[2:]
        for row in rows_below(NOTEBOOK, "Seconds from the start of the processes")
    }
    assert found == expected


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("ray_steps_resnet20", "## Jobs in Ray"),
        ("ray_steps", "An MLP of 784-256-10, batches of 64"),
    ],
)
def test_the_notebooks_tables_of_ray_hold_the_measured_times(file, text):
    rounds = json.loads((RESULTS / f"{file}.json").read_text())["rounds"]
    measured = [
        [
            name,
            *(median_and_range([each[what] for each in found]) for what in ("start_s", "step_ms")),
        ]
        for name, found in rounds.items()
    ]
    rows = rows_below(NOTEBOOK, text)
    assert [[row[0].replace("`", ""), *row[1:]] for row in rows] == measured


def test_the_notebooks_table_of_fit_holds_the_measured_medians():
    names = (
        "hand-written loop", "tnt_jax fit", "tnt_jax fit, fused", "Keras 3 fit",
        "Keras 3 fit, fused", "Keras model in tnt_jax", "Keras model in tnt_jax, fused",
        "Keras 3 FlaxLayer",
    )  # fmt: skip
    files = ("1x64", "1x1024", "2x64", "2x1024", "resnet20", "resnet20_given_back",
             "transformer_tiny", "transformer_tiny_given_back")  # fmt: skip
    rows = rows_below(NOTEBOOK, "## The overhead of `fit`")
    for (_, *cells), file in zip(rows, files, strict=True):
        times = json.loads((RESULTS / f"fit_overhead_{file}.json").read_text())["us_per_step"]
        found = {n: int(cell) for n, cell in zip(names, cells, strict=True) if cell}
        expected = {n: pytest.approx(statistics.median(times[n]), abs=1) for n in found}
        assert found == expected, file


def test_each_benchmark_that_a_page_names_is_there():
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks/README.md", *PAGES]
    named = {
        name for page in pages for name in re.findall(r"\bbenchmarks/(\w+\.py)", page.read_text())
    }
    assert [name for name in sorted(named) if not (ROOT / "benchmarks" / name).exists()] == []


def test_each_file_of_results_comes_from_a_benchmark_that_a_page_names():
    pages = [ROOT / "README.md", ROOT / "benchmarks/README.md", *PAGES]
    text = " ".join(page.read_text() for page in pages)
    scripts = set(re.findall(r"\bbenchmarks/(\w+)\.py", text))
    unknown = [
        path.name
        for path in sorted(RESULTS.iterdir())
        if path.name not in text and not any(path.stem.startswith(name) for name in scripts)
    ]
    assert unknown == []
