"""Local steps by `fit`, in real processes, against one device, a plain loop, and `fit` itself."""

import shutil

import numpy as np
import optax
import pytest
from local_runs import run, train_plainly

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

TOLERANCE = 2e-6
DATA = {"rows": 45, "size": 9}  # Five steps an epoch, of 5 and 4 rows.
ONE_ROW = {"rows": 19, "size": 9}  # The third step of an epoch has a row in one group alone.
# So does that of these, and the ranks of a group, whose statistics are synchronized, have equally
# many rows in the others.
LIKE_RANKS = {"rows": 17, "size": 8, "batch_norm": True, "axis_name": "data"}
# One step of the first group, and three of the second.
BAD_ROWS = [2, 6, 15, 42]
EVERY_STEP = {"every": 1, "outer": "mean"}
# The last step has 4 and 3 rows.
OF_ONE_DEVICE = {"rows": 43, "size": 9, "rate_falls": True, "weights": True, "evaluates": True}
STREAMING = {"every": 4, "outer": "nesterov", "fragments": 2, "delay": 1}

# It is killed after step 9 and resumes after step 8, when a fragment has been sent and one of the
# groups has skipped a step.
TO_BE_KILLED = DATA | {"momentum": 0.9, "dropout": 0.3, "bad_rows": [2]}
TO_BE_KILLED |= {"sync": STREAMING | {"compress": "int8"}}
RESUMES = TO_BE_KILLED | {"resume": "kept", "save_freq": 3}
# What the ranks of a group must not change.
OF_GROUPS = {
    "bad rows": DATA | {"momentum": 0.9, "dropout": 0.3, "shuffle": False, "bad_rows": BAD_ROWS},
    "one row": LIKE_RANKS | {"evaluates": True},
}


def weights(result):
    return [result[name] for name in sorted(result) if name.startswith("[")]


def assert_close(found, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)


def assert_same_bits(found, expected):
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where `pairs` writes, the last of which is killed and leaves a checkpoint."""
    return tmp_path_factory.mktemp("pairs")


@pytest.fixture(scope="module")
def pairs(folder):
    """Runs of two processes, each a group, by recipe."""
    plain = DATA | {"batch_norm": True, "evaluates": True}
    in_order = DATA | {"shuffle": False}
    recipes = {
        "every step": OF_ONE_DEVICE | {"sync": EVERY_STEP},
        "every step, one row": ONE_ROW | {"sync": EVERY_STEP, "dropout": 0.3},
        "every step, statistics": plain | {"sync": EVERY_STEP},
        "one group": plain | {"sync": STREAMING | {"groups": [[0, 1]]}},
        "plain": plain,
        "rounds": in_order | {"sync": {"every": 4, "outer": "nesterov"}},
        "int8": in_order | {"sync": STREAMING | {"compress": "int8"}},
        "float4": in_order | {"sync": STREAMING | {"compress": "float4"}},
        "bad rows": in_order | {"sync": STREAMING, "bad_rows": BAD_ROWS},
        "groups, bad rows": OF_GROUPS["bad rows"] | {"sync": STREAMING},
        "groups, one row": OF_GROUPS["one row"] | {"sync": STREAMING, "on_nan": "raise"},
        "to be killed": TO_BE_KILLED,
        "killed": RESUMES | {"kill_after": 9},
    }
    return run(2, folder, recipes, fails_with=["signal 9 (SIGKILL)"])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Runs of one process without the launcher and without local steps."""
    recipes = {
        "every step": OF_ONE_DEVICE,
        "every step, one row": ONE_ROW | {"dropout": 0.3},
    }
    return run(0, tmp_path_factory.mktemp("alone"), recipes)


@pytest.mark.parametrize("name", ["every step", "every step, one row"])
def test_an_update_by_the_mean_after_every_step_equals_one_device(pairs, alone, name):
    for found in pairs[name]:
        assert_close(found, alone[name][0])


def test_statistics_become_the_mean_of_the_groups(pairs):
    for found, expected in zip(pairs["every step, statistics"], pairs["plain"], strict=True):
        assert_close(found, expected)


def test_one_group_is_fit_without_sync(pairs):
    for found, expected in zip(pairs["one group"], pairs["plain"], strict=True):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("name", ["rounds", "int8", "float4", "bad rows"])
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


def test_all_groups_have_the_same_weights_logs_and_predictions(pairs):
    for first, second in pairs.values():
        assert_same_bits(first, second)


@pytest.mark.parametrize(
    ("processes", "num_devices"), [pytest.param(4, 1, marks=pytest.mark.long), (2, 2)]
)
def test_the_ranks_of_a_group_do_not_change_its_numbers(pairs, processes, num_devices, tmp_path):
    groups = [[0], [1]] if processes == 2 else [[0, 1], [2, 3]]
    sync = {"sync": STREAMING | {"groups": groups}}
    recipes = {name: recipe | sync for name, recipe in OF_GROUPS.items()}
    for name, results in run(processes, tmp_path, recipes, num_devices=num_devices).items():
        for found in results:
            # A run that raises where a step is not finite has the same numbers: that of a group
            # without rows is.
            assert_close(pairs[f"groups, {name}"][0], found)


@pytest.fixture
def killed(pairs, folder, tmp_path):
    """Returns the recipe of a run of two groups that was killed."""
    shutil.copytree(folder / "kept", tmp_path / "kept")
    return RESUMES


def test_a_run_resumes_within_a_round_with_the_same_bits_and_one_that_fails_names_the_row(
    killed, pairs, tmp_path
):
    # Row 7 of the batch, the third of the second group.
    fails = DATA | {"sync": STREAMING, "shuffle": False, "bad_rows": [7], "on_nan": "raise"}
    texts = [
        "FloatingPointError: Step 1 of epoch 1 is not finite",
        "The data hold NaN or infinity in row 7 of the global batch of 9.",
        "Rank 1 on localhost failed",
    ]
    resumed = run(2, tmp_path, {"resumed": killed, "fails": fails}, fails_with=texts)["resumed"]
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
    run(2, tmp_path, {"one group": one}, fails_with=["tnt_ignore_changes"])
