"""What holds on CPUs holds on GPUs, and what only GPUs have: asynchronous buckets, cuDNN.

These tests run where there are NVIDIA GPUs, and say elsewhere why they do not.
"""

import gzip
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from less_memory import assert_gives_way
from processes import SCRIPTS, environment, launch
from traces import sums_beside_kernels

from tnt_jax.cluster.devices import count_gpus

# As in device_networks.py, which is not imported: it starts JAX.
NETWORKS = (
    "linen", "resnet20", "nnx", "keras", "keras lstm", "keras gru", "decoder", "accumulated",
    "as many rows as fit", "several steps", "adam", "skip", "reproducible", "resumed", "own loop",
    "local steps", "mesh", "bfloat16",
)  # fmt: skip
# Those of run_with_less_memory.py.
ROWS = 131072
NUM_GPUS = count_gpus(os.environ)


def on_gpus(count):
    """Marks a test that needs a number of GPUs on this machine."""

    def mark(test):
        reason = f"needs {count} NVIDIA GPU(s) on this machine, which has {NUM_GPUS}"
        skipping = pytest.mark.skipif(count > NUM_GPUS, reason=reason)
        return pytest.mark.gpu(pytest.mark.multiprocess(skipping(test)))

    return mark


def run(*words, script="device_runs.py", platform="cuda", **extra):
    """Runs a script in a process of its own, as the tests' process is on CPUs."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / script, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment(JAX_PLATFORMS=platform, **extra),
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    return json.loads(last.removeprefix("RESULT "))


def as_array(found):
    return np.frombuffer(bytes.fromhex(found["weights"]), np.float32)


@on_gpus(1)
def test_a_reproducible_run_gives_the_same_bits_again():
    assert run("weights", 1, "reproducible") == run("weights", 1, "reproducible")


@on_gpus(2)
def test_a_reproducible_run_gives_the_same_bits_on_one_and_on_all_gpus():
    assert run("weights", 1, "reproducible") == run("weights", 2, "reproducible")


@on_gpus(2)
def test_several_gpus_train_as_one_does():
    one, two = run("weights", 1, "plain"), run("weights", 2, "plain")
    np.testing.assert_allclose(two["history"], one["history"], rtol=1e-4)
    np.testing.assert_allclose(as_array(two), as_array(one), atol=1e-4)


@on_gpus(1)
def test_a_gpu_trains_as_a_cpu_does():
    found, expected = run("weights", 1, "plain"), run("weights", 1, "plain", platform="cpu")
    # Products are computed in TF32, with 10 bits behind the point.
    np.testing.assert_allclose(found["history"], expected["history"], rtol=2e-2)


# How far a device's sums of products and means are from those of a CPU, where no error grows.
RTOL, ATOL = 1e-4, 2e-4
# Adam divides small gradients by their size; losses of half precision have 8 bits.
LOOSE = {"adam": 2e-3, "bfloat16": 1e-2, "resnet20": 5e-3}


@pytest.fixture(scope="module")
def networks():
    """Returns what small networks give on a GPU and on CPUs."""
    full = {"script": "device_networks.py", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}
    return [run(platform=platform, **full)["found"] for platform in ("cuda", "cpu")]


@on_gpus(1)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_network_trains_on_a_gpu_as_on_cpus(networks, name):
    found, expected = (results[name] for results in networks)
    assert not isinstance(expected, str), expected
    assert not isinstance(found, str), found
    np.testing.assert_allclose(found, expected, rtol=RTOL, atol=LOOSE.get(name, ATOL))


@on_gpus(1)
def test_a_step_that_finds_no_memory_on_a_gpu_gives_way_to_one_that_needs_less():
    script = SCRIPTS / "run_with_less_memory.py"
    result = launch(0, script, timeout_s=400, JAX_PLATFORMS="cuda", TNT_LOG_LEVEL="INFO")
    assert_gives_way(result, ROWS, rtol=1e-3, atol=1e-4)


@on_gpus(1)
def test_memory_that_other_arrays_take_is_left_to_them():
    found = run("beside")
    assert found["alone"]["rows"] is None
    assert 1 < found["beside"]["rows"] < found["num_rows"]
    np.testing.assert_allclose(found["beside"]["losses"], found["alone"]["losses"], rtol=1e-4)


@on_gpus(2)
def test_buckets_travel_while_kernels_compute(tmp_path):
    beside = sums_beside_kernels(run("trace", tmp_path)["trace"])
    assert beside, "The trace has no kernel of NCCL."
    assert any(beside)


@on_gpus(1)
def test_attention_in_half_precision_is_cudnns_and_agrees_with_xlas():
    found = run("attention")
    assert found["implementation"] == "cudnn"
    assert max(found["errors"]) < 2e-2


@pytest.mark.parametrize(
    ("device", "start", "expected"), [(1, 5, [True]), (2, 5, [False]), (1, 10, [False])]
)
def test_a_sum_is_beside_kernels_of_its_own_gpu_that_run_meanwhile(
    tmp_path, device, start, expected
):
    def kernel(pid, start, name):
        return {"ph": "X", "pid": pid, "tid": 1, "ts": start, "dur": 10, "name": name}

    named = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"/device:GPU:{pid}"}}
        for pid in (1, 2)
    ]
    host = kernel(3, 0, "fusion")
    events = [*named, kernel(1, 0, "ncclDevKernel_AllReduce"), kernel(device, start, "gemm"), host]
    path = tmp_path / "x.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    assert sums_beside_kernels(path) == expected
