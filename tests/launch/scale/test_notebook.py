"""`tnt.scaling`: what it passes on, and what it says when nothing was measured."""

import pytest
from processes import environment

import tnt_jax as tnt
from tnt_jax.launch import notebook

SCRIPT = """
import sys
import flax.linen as nn, numpy as np, tnt_jax as tnt
assert sys.argv[1:] == ["--rows", "40"]
model = tnt.Model(nn.Dense(4))
model.compile("sgd", loss="mse")
model.fit(np.ones((40, 3), "f4"), np.ones((40, 4), "f4"), batch_size=8)
"""


def test_virtual_devices_of_a_notebook_are_its_own():
    flags = "--xla_force_host_platform_device_count=8"
    assert notebook._environment({"XLA_FLAGS": f"{flags} --xla_a=1", "A": "1"}) == {
        "XLA_FLAGS": "--xla_a=1",
        "A": "1",
    }
    assert notebook._environment({"XLA_FLAGS": flags}) == {}


def test_what_the_command_says_is_in_the_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"Nothing was measured:\n.*no such script|not"):
        tnt.scaling(tmp_path / "none.py", ranks=[1], options=["--no-gpu"])
    with pytest.raises(RuntimeError, match="each number once, but got 1 1"):
        tnt.scaling(tmp_path / "none.py", ranks=[1, 1])


@pytest.mark.multiprocess
@pytest.mark.long
def test_a_script_is_measured_from_python(tmp_path, monkeypatch):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(notebook.os, "environ", environment())
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    result = tnt.scaling(
        script, ranks=[1, 2], rounds=1, steps=4, arguments=["--rows", "40"], options=["--no-gpu"]
    )
    assert [point.ranks for point in result.points] == [1, 2]
    assert [run.rows for run in result.runs] == [32, 32]
    assert "strong scaling" in repr(result)
