"""Where two recordings differ, and why, with the recordings of small trainings by NumPy."""

import json

import numpy as np
import pytest

from tnt_jax.launch.verify.comparison import (
    Recording,
    Rounding,
    Step,
    compare,
    have_equal_bits,
    largest_difference,
    read_lines,
)
from tnt_jax.settings import RECORD_MARK
from tnt_jax.train.health.recording import describe_array

ROWS = 10


def record(
    *, ranks=1, error=0.0, rate=0.1, steps=4, start=None, first=0, num_rows=ROWS, added=None,
    rows=None, drawn=(), seed=0, name="params/kernel",
):  # fmt: skip
    """Returns the recording of a regression; `error` changes the weights, `added` each gradient."""
    rng = np.random.default_rng(0)
    data = rng.normal(size=(20, ROWS, 5))
    w = np.random.default_rng(seed).normal(size=5) * (1 + error) if start is None else start

    def arrays():
        kept = {name: describe_array(w.astype(np.float32)), "step": describe_array(np.array(1))}
        return kept

    facts = {"ranks": ranks, "unit": 2.0**-23, "drawn": list(drawn), "rows_of_rank": ROWS // ranks}
    begin = Step(first, {}, None, {}, arrays())
    done = []
    for number in range(first, first + steps):
        x = data[number]
        grad = x.T @ (x @ w - 1) / len(x)
        w = w - rate * (grad + (0 if added is None else added(number, grad)))
        place = {"epoch": 0, "batch": number, "num_rows": num_rows}
        of_batch = [[number * ROWS + i for i in range(ROWS)]] * 2
        metrics = {"loss": [float(np.mean((x @ w - 1) ** 2))]}
        done.append(Step(number + 1, place, rows(number) if rows else of_batch, metrics, arrays()))
    return Recording(facts, begin, tuple(done))


REFERENCE = record()
ROUNDED = record(error=3e-7)


def found(other, rounding=None):
    return compare(REFERENCE, other, rounding or Rounding(REFERENCE, ROUNDED))


def test_a_run_that_differs_by_rounding_is_the_same():
    noise = np.random.default_rng(1)
    other = record(ranks=2, added=lambda _, grad: 1e-7 * noise.normal(size=5))
    assert found(other) is None
    assert not have_equal_bits(REFERENCE, other)
    assert 0 < largest_difference(REFERENCE, other) < 1e-5
    assert found(record(ranks=2)) is None
    assert have_equal_bits(REFERENCE, record(ranks=2))
    assert largest_difference(REFERENCE, record(ranks=2)) == 0


def test_the_first_step_and_array_that_differ_are_named():
    def at_step_3(number, grad):
        return 0.05 * np.eye(5)[0] * np.linalg.norm(grad) if number == 2 else 0

    difference = found(record(ranks=2, added=at_step_3))
    assert difference.step == 3
    assert difference.what == "params/kernel"
    assert difference.where == "step 3 (batch 3 of epoch 1, 10 rows)"
    assert "(1 of 2 arrays); the update of params/kernel is off by" in difference.text
    assert difference.causes == []


def test_rounding_explains_what_a_trial_of_it_shows():
    """Adam makes whole steps of gradients that are zero but for rounding."""
    signs = np.random.default_rng(2)

    def noise(_, grad):
        return 0.5 * signs.choice([-1.0, 1.0], size=5) * np.linalg.norm(grad)

    wild = record(added=noise)
    assert found(record(ranks=2, added=noise)).step == 1
    assert found(record(ranks=2, added=noise), Rounding(REFERENCE, wild)) is None


def test_what_rounding_explains_does_not_depend_on_what_was_compared_before():
    """A late step, where rounding does much, does not excuse an early one of the next run."""
    late = record(added=lambda number, grad: 0.5 * grad if number == 3 else 0)
    rounding = Rounding(REFERENCE, late)
    early = record(ranks=2, added=lambda number, grad: 0.5 * grad[::-1] if number == 0 else 0)
    assert found(early, rounding).step == 1
    assert found(record(ranks=4, added=lambda n, g: 1e-6 * g), rounding) is None
    assert found(early, rounding).step == 1


def test_the_first_update_counts_among_the_differences():
    other = record(ranks=2, steps=1, added=lambda _, grad: 0.01 * grad)
    assert largest_difference(REFERENCE, other) == pytest.approx(0.01, rel=1e-3)


def test_a_rate_that_grows_with_the_ranks_is_named():
    difference = found(record(ranks=4, rate=0.4))
    assert difference.step == 1
    assert "updates are 4 times those of the reference" in difference.causes[0]


def test_draws_without_a_row_are_named():
    noise = np.random.default_rng(3)
    other = record(ranks=2, added=lambda _, g: noise.normal(size=5), drawn=[[5, 3]])
    assert "each rank draws the same numbers" in found(other).causes[0]


def test_a_loss_that_divides_by_its_own_rows_is_named_where_rows_are_uneven():
    noise = np.random.default_rng(3)
    other = record(ranks=4, added=lambda _, g: noise.normal(size=5))
    assert "10 rows are not shared evenly by 4 ranks: a loss" in found(other).causes[0]
    assert found(record(ranks=2, added=lambda _, g: noise.normal(size=5))).causes == []


@pytest.mark.parametrize(
    ("name", "traced", "cause"),
    [
        ("model_state/seen", ["model_state/seen"], "Statistics of each rank's own rows"),
        ("model_state/batch_stats/BatchNorm_0/var", [], None),
        ("batch_stats/BatchNorm_0/var", None, "a guess from the name alone"),
        ("norm/scale", None, None),
    ],
)
def test_statistics_are_named_as_traced_and_by_their_names_where_nothing_is(name, traced, cause):
    noise = np.random.default_rng(3)
    other = record(ranks=2, added=lambda _, g: noise.normal(size=5), name=name)
    if traced is not None:
        other.facts["own_statistics"] = traced
    reference = record(name=name)
    causes = compare(reference, other, Rounding(reference, None)).causes
    assert [cause in text for text in causes] == ([] if cause is None else [True])


def rows_of(change):
    def rows(number):
        inputs = [number * ROWS + i for i in range(ROWS)]
        return change(inputs, list(inputs)) if number == 1 else [inputs, inputs]

    return rows


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda x, y: [x[::-1], y[::-1]], "a shuffle without a seed"),
        (lambda x, y: [[i + 500 for i in x], y], "random augmentation"),
        (lambda x, y: [[*x[:5], *x[:5]], [*y[:5], *y[:5]]], "a loader that differs between proc"),
        (lambda x, y: [[i + 500 for i in x], [i + 500 for i in y]], "depend on the process or on"),
    ],
)
def test_other_rows_are_named_before_what_follows_from_them(change, cause):
    difference = found(record(ranks=2, rows=rows_of(change), rate=0.2 if not cause else 0.1))
    assert (difference.step, difference.what) == (2, "rows")
    assert cause in difference.causes[0]


def test_batches_of_another_size_are_named():
    difference = found(record(ranks=2, num_rows=20))
    assert (difference.step, difference.what) == (1, "rows")
    assert "20 rows" in difference.text
    assert "makes its batches from the number of ranks" in difference.causes[0]


def test_other_initial_weights_are_named():
    difference = found(record(ranks=2, seed=5))
    assert (difference.step, difference.what) == (0, "params/kernel")
    assert "seed what draws them" in difference.causes[0]


def test_a_resumed_run_is_compared_from_the_middle():
    half = np.random.default_rng(0).normal(size=5)
    data = np.random.default_rng(0).normal(size=(20, ROWS, 5))
    for x in data[:2]:
        half = half - 0.1 * (x.T @ (x @ half - 1) / len(x))
    assert found(record(start=half, first=2, steps=2)) is None
    wrong = found(record(start=half + 0.01, first=2, steps=2))
    assert (wrong.step, wrong.what) == (2, "params/kernel")
    assert "What was restored is not what was trained before the fault" in wrong.causes[0]


def test_a_loss_of_nan_is_the_same_as_nan_alone():
    broken = record(added=lambda number, grad: np.nan)
    assert found(broken).step == 1
    assert compare(broken, broken, Rounding(broken, None)) is None


def test_lines_are_read_as_they_are_told():
    array = describe_array(np.ones(3, np.float32))
    start = {"step": 0, "ranks": 2, "unit": 1e-7, "arrays": {"a": array}}
    one = {"step": 1, "epoch": 0, "batch": 0, "num_rows": 4, "rows": None, "metrics": {"loss": [1]}}
    lines = [
        RECORD_MARK + json.dumps(start),
        RECORD_MARK + json.dumps(one | {"arrays": {"a": array}}),
    ]
    assert all(line.startswith(RECORD_MARK) for line in lines)
    recording = read_lines(lines)
    assert (recording.ranks, recording.start.step, recording.steps[0].metrics) == (
        2,
        0,
        {"loss": [1]},
    )
    assert Recording.from_dict(json.loads(json.dumps(recording.to_dict()))) == recording
    assert read_lines([RECORD_MARK + '{"left_out": "why"}']).left_out == "why"
    assert read_lines([]).left_out == "No step was recorded."
