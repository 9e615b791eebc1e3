"""Processes that no longer hold the same training state are found."""

import os
import subprocess
import sys

import numpy as np
import pytest
from processes import SCRIPTS

from tnt_jax.keras_compat.divergence import differing

SCRIPT = SCRIPTS / "change_one_rank.py"


@pytest.mark.parametrize(
    ("digests", "expected"),
    [
        ([[1, 2, 3]], ""),
        ([[1, 2, 3], [1, 2, 3]], ""),
        ([[1, 2, 3], [1, 2, 3], [1, 5, 3], [0, 5, 3]], "a, b of the process(es) 2, 3"),
        ([[1, 2, 3], [1, 2, 4]], "c of the process(es) 1"),
    ],
)
def test_differing(digests, expected):
    assert differing(["a", "b", "c"], np.array(digests, np.uint32)) == expected


def test_only_some_of_many_arrays_are_named():
    assert differing([str(i) for i in range(10)], np.array([[0] * 10, [1] * 10])).startswith(
        "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
    )


@pytest.mark.multiprocess
def test_a_callback_that_acts_on_one_process_is_reported():
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("XLA_FLAGS", "PJRT_NPROC") and name[:4] != "TNT_"
    }
    launch = [sys.executable, "-m", "tnt_jax.launch", "-n", "2", "--no-gpu", "--", str(SCRIPT)]
    done = subprocess.run(
        launch, capture_output=True, text=True, timeout=240, env=kept | {"JAX_PLATFORMS": "cpu"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        done.stderr.count(
            "opt_state/hyperparams/learning_rate of the process(es) 1 differ from those of "
            "process 0"
        )
        == 1
    )
    assert "stop_training is True on the process(es) 1 and False on 0" in done.stdout
