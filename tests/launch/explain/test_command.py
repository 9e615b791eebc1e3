"""`tnt-jax explain`: what it refuses, and whole runs of it."""

import json

import pytest
from processes import environment

import tnt_jax as tnt
from tnt_jax.launch.explanation import Explanation
from tnt_jax.launch.planning.options import Explain, parse_options

SCRIPT = """
import time
import flax.linen as nn, numpy as np, tnt_jax as tnt
class Sleeps(tnt.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.1)
model = tnt.Model(nn.Dense(4))
model.compile("sgd", loss="mse")
model.fit(np.ones((64, 8), "f4"), np.ones((64, 4), "f4"), batch_size=8, callbacks=[Sleeps()])
raise AssertionError("Training has ended.")
"""


def parse(*words):
    return parse_options(("explain", *words), version="1")


def test_options_of_explain():
    options = parse("-n", "4", "--steps", "5", "--rounds", "3", "--", "t.py")
    assert options.explain == Explain(5, 3)
    assert options.ends_early
    assert options.devices_per_node == 4
    with pytest.raises(ValueError, match="--max-restarts cannot be used with tnt-jax explain"):
        parse("--max-restarts", "1", "--", "t.py")
    with pytest.raises(ValueError, match="--elastic cannot be used with tnt-jax explain"):
        parse("--elastic", "-n", "2", "--", "t.py")
    with pytest.raises(ValueError, match="--run-timeout must be above 0, but is -1"):
        parse("--run-timeout", "-1", "--", "t.py")
    with pytest.raises(ValueError, match="--ray cannot be used with tnt-jax explain"):
        parse("--ray", "-n", "2", "--", "t.py")


@pytest.mark.multiprocess
def test_two_processes_are_explained(run, script, tmp_path):
    folder = tmp_path / "out"
    code, out, err = run(
        "explain", "-n", 2, "--no-gpu", "--steps", 3, "--rounds", 2, "--output", folder, "--",
        script(SCRIPT), timeout=300, environ=environment(),
    )  # fmt: skip
    assert code == 0, err
    lines = out.splitlines()
    assert lines[0].endswith("script.py: 2 rank(s) in 2 process(es) on cpu, global batch 8")
    assert lines[1].startswith("A step takes ")
    assert "callbacks and logs" in lines[1]
    assert any(line.startswith("- Sleeps holds steps up") for line in lines)
    assert (folder / "explain.html").read_text().startswith("<!doctype html>")
    explanation = Explanation.from_json((folder / "explain.json").read_text())
    assert explanation.text in out
    assert json.loads((folder / "explain.json").read_text())["shares"]["callbacks"] > 0.5


@pytest.mark.multiprocess
def test_a_script_without_fit_is_not_explained(run, script):
    code, out, err = run("explain", "--no-gpu", "--", script("print(1)"), timeout=60)
    assert (code, out) == (1, "")
    assert "nothing was measured: it has ended without a call of fit, or of" in err


def test_what_the_command_says_is_in_the_error(tmp_path):
    with pytest.raises(RuntimeError, match=r"(?s)Nothing was measured:\n.*none.py"):
        tnt.explain(tmp_path / "none.py", options=["--no-gpu"])
