"""Training over several hosts through real ssh (`tests/helpers/hosts.py` says which)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hosts import HOSTS, finish, needs_hosts
from processes import SCRIPTS

pytestmark = [pytest.mark.multihost, needs_hosts]


def test_training_over_hosts_equals_one_process(multihost, script):
    path = script((SCRIPTS / "train_on_hosts.py").read_text())
    environ = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parents[2])}
    environ.pop("XLA_FLAGS", None)
    alone = subprocess.run(
        [sys.executable, path], env=environ, capture_output=True, text=True, timeout=120
    )
    assert alone.returncode == 0, alone.stderr
    _, *expected = json.loads(alone.stdout.splitlines()[-1])
    for hosts in (HOSTS[:2], HOSTS):
        code, out, err = finish(multihost(path, hosts=hosts), timeout=120)
        assert code == 0, err
        size, history, predictions = json.loads(out.splitlines()[-1])
        assert size == len(hosts)
        for name, values in expected[0].items():
            np.testing.assert_allclose(history[name], values, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(predictions, expected[1], rtol=1e-5, atol=1e-5)
