"""Sums in memory that processes share, in real jobs."""

import os
import re
import shutil
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from processes import SCRIPTS, environment, free_address, launch

from tnt_jax.distributed.shared_sums import joining

SCRIPT = SCRIPTS / "sum_in_memory.py"
TRAIN = """
import flax.linen as nn, numpy as np, tnt_jax as tnt
x = np.random.default_rng(0).normal(size=(24, 3)).astype("f4")
model = tnt.Model(nn.Dense(2), seed=0)
model.compile(tnt.optimizers.SGD(0.1), loss="mse")
loss = model.fit(x, x[:, :2], batch_size=8, epochs=2, verbose=0).history["loss"][-1]
print(f"loss {loss} by {'memory' if tnt.distributed.shared_sums.joining.are_open() else 'XLA'}")
"""


def succeed(num_processes, *words, **options):
    done = launch(num_processes, *words, flags=["--output-on-all-devices"], **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.long  # Other tests show nearly the same.
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("num_processes", "words"), [(2, ("many", "programs", "slow")), (4, ("part",))]
)
def test_sums_are_those_of_numpy(num_processes, words):
    output = succeed(num_processes, SCRIPT, "values", *words)
    assert output.count("values done") == num_processes


@pytest.mark.multiprocess
@pytest.mark.slow
def test_sums_of_two_jobs_of_a_machine_are_those_of_numpy():
    flag = "--xla_force_host_platform_device_count=2"
    words = SCRIPT, "values", "programs"
    with ThreadPoolExecutor() as pool:
        jobs = {
            3: pool.submit(succeed, 3, *words),
            2: pool.submit(succeed, 2, *words, XLA_FLAGS=flag),
        }
    for num_processes, job in jobs.items():
        assert job.result().count("programs done") == num_processes


@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize(("num_processes", "num_devices"), [(2, 1), (3, 1), (2, 2)])
def test_thousands_of_sums_of_all_sizes_are_right(num_processes, num_devices):
    flag = f"--xla_force_host_platform_device_count={num_devices}"
    output = succeed(num_processes, SCRIPT, "random_order", XLA_FLAGS=flag)
    assert output.count("random_order done") == num_processes


@pytest.mark.multiprocess
@pytest.mark.slow
def test_several_hosts_sum_within_each_first():
    assert succeed(3, SCRIPT, "values", "programs", TWO_HOSTS="1").count("programs done") == 3


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "num_processes"),
    [
        ("killed", 3),
        pytest.param("exits", 2, marks=pytest.mark.long),  # Nearly the same.
        ("stops", 2),
    ],
)
def test_a_process_that_ends_ends_the_sums_of_the_others_and_no_file_is_left(
    tmp_path, how, num_processes
):
    (tmp_path / "how").write_text(how)
    folders = [tmp_path / "temporary", tmp_path / "cache"]
    for folder in folders:
        folder.mkdir()
    began = time.monotonic()
    variables = {"TMPDIR": str(folders[0]), "XDG_CACHE_HOME": str(folders[1])}
    flags = ["--output-on-all-devices"]
    done = launch(num_processes, SCRIPT, "waits", tmp_path / "how", flags=flags, **variables)
    if how == "stops":  # It goes on after a while.
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.count("waits done") == num_processes
    else:
        assert done.returncode != 0
        assert "Rank 1 on localhost" in done.stderr
        assert time.monotonic() - began < 40
    assert not [name for name in os.listdir("/dev/shm") if "tnt" in name]
    assert os.listdir(folders[0]) == []
    kept = sorted(file.suffix for file in folders[1].rglob("*") if file.is_file())
    assert kept == [".lock", ".so"]


@pytest.mark.multiprocess
@pytest.mark.slow
def test_without_a_compiler_processes_sum_through_sockets(tmp_path, use_ranks):
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    variables = {"CC": "false", "XDG_CACHE_HOME": str(tmp_path), "TNT_LOG_LEVEL": "INFO"}
    output = succeed(2, script, **variables)
    assert "sum through sockets, because the C compiler (false) failed: exit status 1" in output
    assert output.count("through sockets") == 1
    losses = re.findall(r"loss (\S+) by XLA", output)
    assert len(losses) == 2
    use_ranks(1)
    exec(TRAIN, alone := {})
    np.testing.assert_allclose(np.float32(losses), alone["loss"], rtol=1e-6)


@pytest.mark.multiprocess
@pytest.mark.slow
def test_one_process_that_refuses_is_enough(tmp_path):
    script = tmp_path / "refuse.py"
    script.write_text(
        "import os, runpy, sys\n"
        "if os.environ['TNT_PROCESS_ID'] == '1': os.environ['TNT_SHARED_MEMORY'] = '0'\n"
        "del sys.argv[0]\n"
        "runpy.run_path(sys.argv[0])\n"
    )
    output = succeed(2, script, SCRIPT, "slow", TNT_LOG_LEVEL="INFO")
    assert "sockets, because TNT_SHARED_MEMORY is 0 in process 1" in output
    assert output.count("by XLA") == 2


@pytest.mark.long  # That a file that was not written so is not loaded shows nearly the same.
@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.parametrize("damage", ["truncated", "foreign", "a file", "open to others"])
def test_the_cache_may_be_damaged_or_not_be_ours(tmp_path, monkeypatch, damage):
    cache = tmp_path / "cache"
    folder = cache / "tnt_jax" / "native"
    if damage == "a file":
        cache.write_text("")
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        joining.load_library()
        (kept,) = folder.glob("*.so")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        if damage == "open to others":
            folder.chmod(0o777)
        kept.write_bytes(kept.read_bytes()[:1000] if damage == "truncated" else b"no library")
    output = succeed(2, SCRIPT, "slow", XDG_CACHE_HOME=str(cache))
    assert output.count("by memory") == 2


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The library that was written to a cache that had none."""
    cache = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        joining.load_library()
    (kept,) = cache.rglob("*.so")
    return cache, kept.read_bytes()


@pytest.mark.parametrize("damage", ["truncated", "foreign", "open to others"])
def test_a_file_that_was_not_written_so_is_not_loaded(tmp_path, monkeypatch, written, damage):
    cache, right = tmp_path / "cache", written[1]
    shutil.copytree(written[0], cache)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    (kept,) = cache.rglob("*.so")
    kept.unlink()
    damaged = right[:1000] if damage == "truncated" else b"no library"
    kept.write_bytes(damaged)
    if damage == "open to others":
        kept.parent.chmod(0o777)
    joining.load_library()
    (now,) = cache.rglob("*.so")
    # A folder that others can write to is left alone.
    assert now.read_bytes() == (damaged if damage == "open to others" else right)


def test_a_compiler_that_fails_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "false")
    with pytest.raises(OSError, match=r"the C compiler \(false\) failed: exit status 1"):
        joining.load_library()
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(OSError, match=r"there is no C compiler \(cc\)"):
        joining.load_library()
    assert list(tmp_path.rglob("*.so")) == []


@pytest.mark.long  # A hundred starts; most that it can show, the others show.
@pytest.mark.multiprocess
def test_no_memory_is_left_after_many_starts(tmp_path):
    (tmp_path / "how").write_text("killed")
    before = sorted(os.listdir("/dev/shm"))
    for _ in range(50):
        address = free_address()
        jobs = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), "waits", str(tmp_path / "how")],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env=environment(TNT_COORDINATOR_ADDRESS=address, TNT_NUM_PROCESSES="2",
                                TNT_PROCESS_ID=str(process)),
            )
            for process in range(2)
        ]  # fmt: skip
        assert all(job.wait(60) != 0 for job in jobs)
    assert sorted(os.listdir("/dev/shm")) == before
