"""Processes that no longer hold the same training state are found."""

import pytest
from processes import SCRIPTS, launch

from tnt_jax.keras_compat.fit.start_check import describe_drift


@pytest.mark.parametrize(
    ("alike", "sums", "expected"),
    [
        ([[0], [1]], {0: [1, 2, 3], 1: [1, 2, 4]}, "c on rank 1 (process 1) differ from rank 0 (process 0)"),
        # Of most ranks it is believed that they are right.
        ([[0], [1, 2, 3]], {0: [0, 2, 0], 1: [1, 2, 3]}, "a, c on rank 0 (process 0) differ from ranks 1, 2, 3 (processes 1, 2)"),
        (
            [[0, 2], [1], [3]],
            {0: [1, 2, 3], 1: [1, 5, 3], 3: [0, 2, 3]},
            "b on rank 1 (process 1); a on rank 3 (process 2) differ from ranks 0, 2 (processes 0, 2)",
        ),
    ],
)  # fmt: skip
def test_describe_drift(alike, sums, expected):
    process_of = {0: 0, 1: 1, 2: 2, 3: 2}
    assert describe_drift(["a", "b", "c"], sums, alike, process_of) == expected


def test_only_some_of_many_arrays_are_named():
    names = [str(i) for i in range(10)]
    text = describe_drift(names, {0: [0] * 10, 1: [1] * 10}, [[0], [1]], {0: 0, 1: 1})
    assert text.startswith("0, 1, 2, 3 and 6 more on rank 1 ")


@pytest.mark.multiprocess
def test_a_callback_that_acts_on_one_process_ends_reproducible_training():
    done = launch(2, SCRIPTS / "change_one_rank.py", flags=["--output-on-all-devices"])
    assert done.returncode == 0, done.stdout + done.stderr
    rate = "opt_state/hyperparams/learning_rate on rank 1 (process 1) differ from rank 0"
    assert (
        done.stdout.count(
            f"At the end of epoch 1, the ranks do not hold the same training state: {rate}"
        )
        == 2
    )
    assert done.stdout.count("stop_training is True on the process(es) 1 and False on 0") == 2
