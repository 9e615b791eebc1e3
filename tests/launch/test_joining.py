"""A script under the launcher is one process of the job whatever it does first with JAX."""

import sys

import pytest

pytestmark = pytest.mark.multiprocess

JAX_FIRST = """
import os, subprocess, sys
os.environ["JAX_ENABLE_X64"] = "1"  # As if nobody had imported JAX yet.
import jax, numpy as np, flax.linen as nn
module = nn.Dense(1)
variables = module.init(jax.random.key(0), np.zeros((1, 3)))
import tnt_jax as tnt
model = tnt.Model(module, variables=variables)
model.compile("sgd", loss="mse")
model.fit(np.ones((8, 3), "f4"), np.ones((8, 1), "f4"), batch_size=4, verbose=0)
other = subprocess.run([sys.executable, "-c", "import jax; print(len(jax.devices()), jax.process_count())"], capture_output=True)
print(tnt.get_rank(), tnt.get_size(), jax.process_count(), jax.numpy.ones(1, "f8").dtype, other.stdout.decode().split())
"""


@pytest.mark.parametrize("form", [pytest.param("script", marks=pytest.mark.long), "module"])
def test_a_script_that_uses_jax_first_trains_with_the_others(run, tmp_path, form):
    (tmp_path / "package").mkdir()
    path = tmp_path / "package" / "train.py"
    path.write_text(JAX_FIRST)
    command = [path] if form == "script" else ["-m", "package.train"]
    code, out, err = run(
        "-n", 2, "--no-gpu", "--output-on-all-devices", "--", *command, cwd=tmp_path
    )
    assert code == 0, err
    assert sorted(out.splitlines()) == [
        f"[rank {rank}] {rank} 2 2 float64 ['1', '1']" for rank in range(2)
    ]


def test_a_script_that_joins_by_itself_still_does(run, script):
    path = script(
        "import os, jax\n"
        "address, number, process = (os.environ['TNT_' + x] for x in ('COORDINATOR_ADDRESS', "
        "'NUM_PROCESSES', 'PROCESS_ID'))\n"
        "jax.distributed.initialize(address, int(number), int(process))\n"
        "import tnt_jax as tnt; print(len(jax.devices()), tnt.get_size())"
    )
    assert run("-n", 2, "--no-gpu", path)[:2] == (0, "2 2\n")


def test_what_keeps_a_process_from_joining_ends_it(run, script):
    path = script("import jax; jax.devices(); print('trains alone')")
    code, out, err = run("-n", 2, "--no-gpu", "-x", "TNT_HEARTBEAT_TIMEOUT_S=soon", "--", path)
    assert (code, out) == (1, "")
    assert "TNT_HEARTBEAT_TIMEOUT_S must be an integer of at least 1, but is 'soon'" in err


@pytest.mark.parametrize("words", [["-m"], ["--python-interpreter", "", "--", "-m", "package"]])
def test_a_module_needs_a_name_and_an_interpreter(run, words):
    code, _, err = run("-n", 2, *words) if "--" in words else run("-n", 2, "--", *words)
    assert code == 2
    assert "-m must be followed by a module" in err


def test_a_script_below_a_wrapper_is_a_process_of_the_job(run, script):
    wrapper = script(
        "import subprocess, sys; sys.exit(subprocess.run([sys.executable, *sys.argv[1:]]).returncode)",
        "wrapper.py",
    )
    path = script("import jax; print(len(jax.devices()), jax.process_count())")
    interpreter = f"{sys.executable} {wrapper}"
    result = run("-n", 2, "--no-gpu", "--python-interpreter", interpreter, "--", path)
    assert result[:2] == (0, "2 2\n"), result[2]
