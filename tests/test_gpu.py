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
from processes import SCRIPTS, environment
from traces import sums_beside_kernels

from tnt_jax.cluster.devices import count_gpus

NUM_GPUS = count_gpus(os.environ)


def on_gpus(count):
    """Marks a test that needs a number of GPUs on this machine."""

    def mark(test):
        reason = f"needs {count} NVIDIA GPU(s) on this machine, which has {NUM_GPUS}"
        skipping = pytest.mark.skipif(count > NUM_GPUS, reason=reason)
        return pytest.mark.gpu(pytest.mark.multiprocess(skipping(test)))

    return mark


def run(*words, platform="cuda"):
    """Runs `device_runs.py` in a process of its own, as the tests' process is on CPUs."""
    done = subprocess.run(
        [sys.executable, SCRIPTS / "device_runs.py", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment(JAX_PLATFORMS=platform),
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
