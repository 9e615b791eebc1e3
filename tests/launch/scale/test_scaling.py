"""Tables and efficiencies against numbers worked out by hand, and results as text and back."""

import json
from dataclasses import asdict

import pytest

from tnt_jax.launch.scale.scaling import Run, Scaling, Shares, Spread, as_line, read_line, read_run


def run(ranks, round, seconds, *, rows=1000, **changes):
    fields = {
        "hosts": 1, "processes": ranks, "device": "cpu", "global_batch": 100, "steps": 10,
        "shares": Shares(0.5, 0.25, 0.125, 0.125), "compile_s": 1.5, "memory_bytes": 3 * 2**20,
        "memory_of": "process", "gradient_bytes": 4096, "versions": {"jax": "1"},
    }  # fmt: skip
    return Run(ranks=ranks, round=round, rows=rows, seconds=seconds, **(fields | changes))


RUNS = [
    run(1, 0, 1.0), run(2, 0, 0.625), run(1, 1, 2.0), run(2, 1, 1.0), run(1, 2, 4.0),
    run(2, 2, 2.5),
]  # fmt: skip


def test_efficiency_is_that_of_a_rank_against_the_first_number_in_the_same_round():
    # 1000 rows in 1, 2 and 4 s; with two ranks in 0.625, 1 and 2.5 s: a slow round hits both.
    one, two = Scaling("train.py", False, RUNS).points
    assert one.efficiency == Spread(1, 1, 1)
    assert two.efficiency == pytest.approx((0.8, 0.8, 1.0))
    assert two.examples_per_s == pytest.approx((1000, 400, 1600))
    assert two.step_s == pytest.approx((0.1, 0.0625, 0.25))


def test_weak_scaling_compares_rows_not_steps():
    # Twice the rows in the same time is an efficiency of 1.
    runs = [run(2, 0, 1.0), run(4, 0, 1.0, rows=2000, global_batch=200)]
    points = Scaling("train.py", True, runs).points
    assert [point.efficiency.median for point in points] == [1, 1]
    assert [point.global_batch for point in points] == [100, 200]


def test_a_table_has_a_line_for_each_number_of_ranks_and_says_what_did_not_run():
    lines = Scaling("train.py", False, RUNS, {4: "it was out of memory."}, ["R."]).table.split("\n")
    assert lines[0] == "train.py on cpu; strong scaling: the global batch stays the same"
    assert lines[1].split() == [
        "ranks", "batch", "examples", "per", "s", "ms/step", "efficiency", "compute", "exchange", "data",
        "host", "compile", "s", "MiB",
    ]  # fmt: skip
    assert lines[3].split("  ")[-1].strip() == "3"
    assert "0.80 (0.80 to 1.00)" in lines[3]
    assert "50 %" in lines[3]
    assert len({len(line) for line in lines[1:4]}) == 1
    assert "4 rank(s) did not run: it was out of memory." in lines
    assert lines[-1] == "R."


@pytest.mark.parametrize(
    ("is_weak", "batches", "note"),
    [
        (False, (100, 100), None),
        (True, (100, 200), None),
        (False, (100, 200), "it is 200 on 2: this is no strong scaling."),
        (True, (100, 400), "it is 400 on 2: with --strong it is then that of weak scaling."),
    ],
)
def test_a_script_that_chooses_its_batch_by_the_ranks_is_noticed(is_weak, batches, note):
    runs = [run(n, 0, 1.0, global_batch=size) for n, size in zip((1, 2), batches, strict=True)]
    table = Scaling("train.py", is_weak, runs).table
    assert ("from the number of ranks" in table) == (note is not None)
    assert (note or "") in table


def test_results_are_the_same_after_they_were_text():
    scaling = Scaling("train.py", True, RUNS, {4: "why"}, ("a remark",))
    again = Scaling.from_json(scaling.to_json())
    assert again == scaling
    assert json.loads(scaling.to_json())["points"][1]["efficiency"]["highest"] == pytest.approx(1)


@pytest.mark.parametrize("text", ["[]", '{"format": 0}'])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="not that of tnt-jax scale"):
        Scaling.from_json(text)


def test_a_line_of_a_process_is_read_as_it_was_written():
    measured = asdict(RUNS[1])
    del measured["round"], measured["hosts"]
    assert read_line(as_line(measured), round=0, hosts=1) == RUNS[1]
    with pytest.raises(ValueError, match="A run must have"):
        read_run({"ranks": 1})


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    figure = Scaling("train.py", False, RUNS).plot(tmp_path / "s.png")
    speed, shares = figure.axes
    assert [list(line.get_xdata()) for line in speed.lines[:1]] == [[1, 2]]
    assert [bar.get_height() for bar in shares.patches[:2]] == [0.5, 0.5]
    assert (tmp_path / "s.png").stat().st_size > 1000
    assert Scaling("train.py", False, RUNS)._repr_png_().startswith(b"\x89PNG")
