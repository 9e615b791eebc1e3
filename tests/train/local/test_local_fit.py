"""Local steps by `fit`, in real processes, against one device, a plain loop, and `fit` itself."""

import shutil

import numpy as np
import optax
import pytest
from local_runs import run, train_plainly

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

TOLERANCE = 2e-6
DATA = {"rows": 43, "size": 9}  # Five steps an epoch, of 5 and 4 rows, the last of 4 and 3.
ONE_ROW = {"rows": 19, "size": 9}  # The third step of an epoch has a row in one group alone.
# So does that of these, and the ranks of a group, whose statistics are synchronized, have equally
# many rows in the others.
LIKE_RANKS = {"rows": 17, "size": 8, "batch_norm": True, "axis_name": "data"}
# One step of the first group, and three of the second.
BAD_ROWS = [2, 6, 15, 42]
EVERY_STEP = {"every": 1, "outer": "mean"}
STREAMING = {"every": 4, "outer": "nesterov", "fragments": 2, "delay": 1}

# It is killed after step 9 and resumes after step 8, when a fragment has been sent and one of the
# groups has skipped a step.
TO_BE_KILLED = DATA | {"momentum": 0.9, "dropout": 0.3, "bad_rows": [2]}
TO_BE_KILLED |= {"sync": STREAMING | {"compress": "int8"}}


def weights(result):
    return [result[name] for name in sorted(result) if name.startswith("[")]


def assert_close(found, expected, *, equal_nan=False):
    for name, value in expected.items():
        np.testing.assert_allclose(
            found[name], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name, equal_nan=equal_nan
        )


def assert_same_bits(found, expected):
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Runs of two processes, each a group, by recipe."""
    recipes = {
        "every step": DATA | {"sync": EVERY_STEP},
        "every step, dropout": DATA | {"sync": EVERY_STEP, "dropout": 0.3},
        "every step, statistics": DATA | {"sync": EVERY_STEP, "batch_norm": True},
        "every step, rate": DATA | {"sync": EVERY_STEP, "rate_falls": True},
        "every step, weights": DATA | {"sync": EVERY_STEP, "weights": True},
        "every step, one row": ONE_ROW | {"sync": EVERY_STEP, "dropout": 0.3},
        "plain, statistics": DATA | {"batch_norm": True},
        "plain": DATA | {"momentum": 0.9},
        "one group": DATA | {"momentum": 0.9, "sync": STREAMING | {"groups": [[0, 1]]}},
        "rounds": DATA | {"sync": {"every": 4, "outer": "nesterov"}, "shuffle": False},
        "fragments": DATA | {"sync": STREAMING, "shuffle": False},
        "int8": DATA | {"sync": STREAMING | {"compress": "int8"}, "shuffle": False},
        "bad rows": DATA | {"sync": STREAMING, "shuffle": False, "bad_rows": BAD_ROWS},
        "float4": DATA | {"sync": STREAMING | {"compress": "float4"}, "shuffle": False},
        "streaming": DATA | {"sync": STREAMING, "momentum": 0.9, "dropout": 0.3},
        "streaming, one row": LIKE_RANKS | {"sync": STREAMING},
        "streaming, one row, checked": LIKE_RANKS | {"sync": STREAMING, "on_nan": "raise"},
        "to be killed": TO_BE_KILLED,
    }
    return run(2, tmp_path_factory.mktemp("pairs"), recipes)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Runs of one process without the launcher and without local steps."""
    recipes = {
        "every step": DATA,
        "every step, dropout": DATA | {"dropout": 0.3},
        "every step, rate": DATA | {"rate_falls": True},
        "every step, weights": DATA | {"weights": True},
        "every step, one row": ONE_ROW | {"dropout": 0.3},
    }
    return run(0, tmp_path_factory.mktemp("alone"), recipes)


@pytest.mark.parametrize("variant", ["", ", dropout", ", rate", ", weights", ", one row"])
def test_an_update_by_the_mean_after_every_step_equals_one_device(pairs, alone, variant):
    for found in pairs[f"every step{variant}"]:
        assert_close(found, alone[f"every step{variant}"][0])


def test_statistics_become_the_mean_of_the_groups(pairs):
    for found, expected in zip(
        pairs["every step, statistics"], pairs["plain, statistics"], strict=True
    ):
        assert_close(found, expected)


def test_one_group_is_fit_without_sync(pairs):
    for found, expected in zip(pairs["one group"], pairs["plain"], strict=True):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("name", ["rounds", "fragments", "int8", "float4", "bad rows"])
def test_rounds_equal_a_plain_loop(pairs, name):
    if name == "rounds":
        options = {}
    else:
        # Of each dense layer the bias and the kernel, which are sorted so.
        options = {"fragments": [[0, 1], [2, 3]], "delay": 1}
    expected = train_plainly(
        **DATA,
        num_groups=2,
        every=4,
        outer=optax.sgd(0.7, momentum=0.9, nesterov=True),
        compress=name if name in ("int8", "float4") else "none",
        bad_rows=BAD_ROWS if name == "bad rows" else (),
        **options,
    )
    for result in pairs[name]:
        for found, leaf in zip(weights(result), expected, strict=True):
            np.testing.assert_allclose(found, leaf, rtol=1e-5, atol=1e-5)
        if name == "bad rows":
            assert result["history skipped_steps"].tolist() == [len(BAD_ROWS)] * 2


def test_a_group_names_the_row_for_which_it_raises(tmp_path):
    # Row 7 of the batch, the third of the second group.
    recipe = DATA | {"sync": STREAMING, "shuffle": False, "bad_rows": [7], "on_nan": "raise"}
    result = run(2, tmp_path, {"raises": recipe}, succeeds=False)
    assert "FloatingPointError: Step 1 of epoch 1 is not finite" in result
    assert "The data hold NaN or infinity in row 7 of the global batch of 9." in result
    assert "Rank 1 on localhost failed" in result


def test_a_step_of_a_group_without_rows_is_finite(pairs):
    for found, expected in zip(
        pairs["streaming, one row, checked"], pairs["streaming, one row"], strict=True
    ):
        assert_close(found, expected)


def test_all_groups_have_the_same_weights_logs_and_predictions(pairs):
    for first, second in pairs.values():
        assert_same_bits(first, second)


@pytest.mark.parametrize(
    ("processes", "num_devices"), [pytest.param(4, 1, marks=pytest.mark.long), (2, 2)]
)
def test_the_ranks_of_a_group_do_not_change_its_numbers(pairs, processes, num_devices, tmp_path):
    groups = [[0], [1]] if processes == 2 else [[0, 1], [2, 3]]
    sync = {"sync": STREAMING | {"groups": groups}}
    recipes = {
        "streaming": DATA | sync | {"momentum": 0.9, "dropout": 0.3},
        "streaming, one row": LIKE_RANKS | sync,
        "bad rows": DATA | sync | {"shuffle": False, "bad_rows": BAD_ROWS},
    }
    for name, results in run(processes, tmp_path, recipes, num_devices=num_devices).items():
        for found in results:
            # Predictions of the bad rows are.
            assert_close(found, pairs[name][0], equal_nan=name == "bad rows")


@pytest.fixture
def killed(tmp_path):
    """Returns the recipe of a run of two groups that was killed."""
    recipe = TO_BE_KILLED | {"resume": "kept", "save_freq": 3}
    run(2, tmp_path, {"killed": recipe | {"kill_after": 9}}, succeeds=False)
    return recipe


def test_a_run_that_resumes_within_a_round_gives_the_same_bits(killed, pairs, tmp_path):
    resumed = run(2, tmp_path, {"resumed": killed})["resumed"]
    for found, whole in zip(resumed, pairs["to be killed"], strict=True):
        expected = {name: x for name, x in whole.items() if name != "by_epoch"}
        assert_same_bits(found, expected)


@pytest.mark.long
def test_other_groups_go_on_with_the_outer_weights_and_one_group_is_refused(killed, tmp_path):
    shutil.copytree(tmp_path / "kept", tmp_path / "of two")
    first, *others = run(3, tmp_path, {"more": killed | {"resume": "of two"}})["more"]
    for other in others:
        assert_same_bits(other, first)
    assert len(first["history loss"]) == 2, "Of both epochs."
    one = killed | {"sync": killed["sync"] | {"groups": [[0, 1]]}}
    result = run(2, tmp_path, {"one group": one}, succeeds=False)
    assert "tnt_ignore_changes" in result
