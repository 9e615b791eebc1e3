"""Joining a job, choosing devices, and what is said when that cannot work."""

import logging
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import jax
import pytest
from processes import free_address

import tnt_jax as tnt
from tnt_jax.distributed.joining import join
from tnt_jax.log import configure_logging, logger
from tnt_jax.settings import Settings


@pytest.fixture(autouse=True)
def fresh():
    tnt.shutdown()
    yield
    tnt.shutdown()


def run(code, **environ):
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("TNT_") and name != "XLA_FLAGS"
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env=kept | environ,
    )


def test_every_device_of_a_single_process_is_a_rank():
    assert tnt.get_size() == len(jax.devices()) == 8
    assert (tnt.get_rank(), tnt.get_master_rank(), tnt.is_master_rank()) == (0, 0, True)
    assert (tnt.get_process_index(), tnt.get_process_count()) == (0, 1)
    tnt.barrier()


def test_devices_can_be_chosen_once():
    runtime = tnt.init(devices=[1, 3])
    assert [device.id for device in runtime.mesh.devices.flat] == [1, 3]
    assert tnt.init() is runtime
    assert tnt.init(devices=[1, 3]) is runtime
    with pytest.raises(
        ValueError, match=r"init\(devices=\[0\]\) came after an init with the devices \[1, 3\]"
    ):
        tnt.init(devices=[0])


@pytest.mark.parametrize("devices", [[], [8], [0, 0], [-1]])
def test_devices_that_are_not_there_are_refused(devices):
    with pytest.raises(ValueError, match="distinct indices from 0 to 7"):
        tnt.init(devices=devices)


def test_using_jax_before_joining_a_job_is_refused():
    code = "import jax; jax.devices(); import tnt_jax as tnt; tnt.init()"
    result = run(
        code, TNT_COORDINATOR_ADDRESS="127.0.0.1:1", TNT_NUM_PROCESSES="2", TNT_PROCESS_ID="0"
    )
    assert result.returncode == 1
    assert "JAX was used before tnt_jax could join it" in result.stderr
    assert "Call tnt_jax.init() at the top" in result.stderr


@pytest.mark.parametrize("how", [{"TNT_JOINED": "127.0.0.1:1 0 1"}, {"TNT_JOB_ID": "job"}])
def test_a_process_that_a_process_of_the_job_has_started_cannot_join_in_its_place(how):
    code = "import tnt_jax as tnt; tnt.init()"
    job = {
        "TNT_COORDINATOR_ADDRESS": "127.0.0.1:1",
        "TNT_NUM_PROCESSES": "2",
        "TNT_PROCESS_ID": "0",
    }
    result = run(code, **job, **how)
    assert result.returncode == 1
    assert "was started by process 0 of the job" in result.stderr
    assert "if __name__ == '__main__'" in result.stderr


def test_a_process_without_the_others_is_told_the_remedy():
    job = {"TNT_NUM_PROCESSES": "2", "TNT_INIT_TIMEOUT_S": "3", "http_proxy": "http://proxy:3128"}

    def start(process):
        job_of_one = job | {"TNT_COORDINATOR_ADDRESS": free_address(), "TNT_PROCESS_ID": process}
        return run("import tnt_jax as tnt; tnt.init()", **job_of_one)

    with ThreadPoolExecutor() as pool:
        coordinator, other = pool.map(start, ("0", "1"))
    assert coordinator.returncode != 0
    assert "Check that all 2 processes were started" in coordinator.stderr
    assert other.returncode != 0
    assert "could not start with the others within 3 s" in other.stderr
    assert "http_proxy" in other.stderr


def test_a_job_of_one_process_trains_alone_with_threads_enough_for_its_virtual_devices():
    code = """
import os
os.environ.pop("PJRT_NPROC")
import tnt_jax as tnt
from tnt_jax.distributed.joining import join
print(tnt.get_size(), tnt.get_process_count(), int(os.environ["PJRT_NPROC"]) >= 2 * tnt.get_size())
"""
    job = {"TNT_COORDINATOR_ADDRESS": "127.0.0.1:1", "TNT_NUM_PROCESSES": "1"}
    flags = "--xla_force_host_platform_device_count=6"
    result = run(code, **job, TNT_PROCESS_ID="0", XLA_FLAGS=flags)
    assert result.stdout.split() == ["6", "1", "True"], result.stderr


@pytest.mark.parametrize(
    ("settings", "is_master", "expected"),
    [
        (Settings(log_level="INFO"), True, ["[tnt_jax] INFO: seen", "[tnt_jax] WARNING: careful"]),
        (Settings(), True, ["[tnt_jax] WARNING: careful"]),
        (Settings(log_level="INFO"), False, []),
        (Settings(log_on_all_devices=True), False, ["[rank 3] [tnt_jax] WARNING: careful"]),
    ],
)
def test_only_the_master_logs_unless_told_otherwise(settings, is_master, expected, capsys):
    configure_logging(settings, rank=3, is_master=is_master)
    logger.info("seen")
    logger.warning("careful")
    assert capsys.readouterr().err.splitlines() == expected
    assert logger.level == logging.getLevelName(settings.log_level)


@pytest.mark.parametrize(
    ("platforms", "plugins", "gpus", "is_refused"),
    [
        (None, ["cuda"], 8, False),
        (None, [], 8, True),
        (None, ["cuda"], 0, True),
        ("cpu", ["cuda"], 8, True),
        ("cuda,cpu", ["cuda"], 8, False),
    ],
)
def test_loopback_host_names_are_refused_where_cpus_meet(
    monkeypatch, platforms, plugins, gpus, is_refused
):
    monkeypatch.setattr(join, "entry_points", lambda group: plugins)
    monkeypatch.setattr(join, "count_gpus", lambda environ: gpus)
    before = jax.config.jax_platforms
    jax.config.update("jax_platforms", platforms)
    try:
        with pytest.raises(RuntimeError, match="loopback") if is_refused else nullcontext():
            join._check_host_names({("a", "one", "127.0.1.1"), ("b", "two", "127.0.1.1")})
    finally:
        jax.config.update("jax_platforms", before)


def test_an_init_that_fails_does_so_again(monkeypatch, tmp_path):
    monkeypatch.setenv("TNT_TIMELINE", str(tmp_path / "missing" / "timeline.json"))
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match="missing"):
            tnt.init()
    (tmp_path / "missing").mkdir()
    assert tnt.init() is tnt.init()
