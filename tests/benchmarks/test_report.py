"""The report of all benchmarks: its quick form runs, and what fails or is left out is told."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest
import report
from choose_defaults import best_threshold, times_of
from machine import busy_processes, environment, free_addresses, on_cpus
from processes import environment as environment_of_one
from scaling import KINDS, environment_of, installed, kinds_of

ROOT = Path(__file__).parents[2]


def run_report(folder, *options):
    command = [sys.executable, "-m", "benchmarks", "--quick", "--output", folder, *options]
    return subprocess.run(
        command, cwd=ROOT, env=environment_of_one(), capture_output=True, text=True, timeout=600
    )


@pytest.mark.long
@pytest.mark.multiprocess
def test_the_quick_report_has_machine_versions_command_and_numbers(tmp_path):
    done = run_report(tmp_path, "--only", "fit_overhead")
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "report.md").read_text()
    for part in ("Machine:", "Devices: 1 cpu", "jax 0.", "Commit:", "tnt_jax fit", "Quick form"):
        assert part in text
    assert (tmp_path / "fit_overhead.json").exists()


@pytest.mark.long
@pytest.mark.multiprocess
def test_the_whole_quick_report_runs(tmp_path):
    done = run_report(tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert done.returncode == 0, text
    assert text.count("## ") == len(report.PARTS)
    assert "Failed" not in text


def test_a_benchmark_that_fails_is_told_with_its_last_words(tmp_path, monkeypatch):
    (tmp_path / "broken.py").write_text("raise RuntimeError('no such link')")
    monkeypatch.setattr(report, "__file__", str(tmp_path / "report.py"))
    args = argparse.Namespace(quick=False, platform=None, timeout=60)
    text, is_whole = report.run(report.Part("broken", "Broken"), args, tmp_path)
    assert not is_whole
    assert "no such link" in text


def test_what_a_benchmark_lacks_leaves_it_out_with_a_line(tmp_path):
    args = argparse.Namespace(quick=False, platform="cpu", timeout=60)
    part = next(part for part in report.PARTS if part.script == "gpu")
    text, is_whole = report.run(part, args, tmp_path)
    assert is_whole
    assert "Left out: it needs a GPU" in text


def test_contenders_that_are_not_installed_are_left_out_with_a_line(monkeypatch, capsys):
    monkeypatch.setattr("scaling.NEEDS", {"PyTorch DDP": ("no_such_library",)})
    assert installed(["tnt_jax", "PyTorch DDP"]) == ["tnt_jax"]
    assert "PyTorch DDP is left out: no_such_library must be installed." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("platform", "variable", "gpus", "expected"),
    [
        ("cpu", "", 8, True),
        (None, "cpu", 8, True),
        (None, "", 8, False),
        (None, "", 0, True),
        ("cuda", "cpu", 0, False),
    ],
)
def test_cpus_are_used_where_they_are_chosen_or_alone(
    monkeypatch, platform, variable, gpus, expected
):
    monkeypatch.setenv("JAX_PLATFORMS", variable)
    monkeypatch.setattr("machine.count_gpus", lambda environ: gpus)
    assert on_cpus(platform) is expected


def test_each_process_gets_a_gpu_of_its_own(monkeypatch):
    task = {"ranks": 4, "processes": 2, "contender": "tnt_jax", "kind": "processes"}
    chosen = environment_of("cuda", task, 1, ["a:1", "b:2"])
    assert chosen["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert chosen["JAX_PLATFORMS"] == "cuda"
    assert "JAX_NUM_CPU_DEVICES" not in chosen
    assert environment_of("cpu", task, 1, ["a:1", "b:2"])["CUDA_VISIBLE_DEVICES"] == "-1"


@pytest.mark.parametrize(
    ("contender", "kind", "ranks", "expected"),
    [
        # As of `tnt-jax -n 2`, of torchrun, and of a script that sets nothing.
        ("tnt_jax", "processes", 2, ("8", "8")),
        ("tnt_jax, sockets", "processes", 2, ("8", "8")),
        ("PyTorch DDP", "processes", 2, ("1", "1")),
        ("Keras 3 DataParallel", "processes", 2, (None, None)),
        ("tnt_jax", "processes, a core each", 2, ("1", "1")),
        ("Keras 3 DataParallel", "processes, a core each", 2, ("1", "1")),
        ("tnt_jax", "processes", 1, ("1", "1")),
    ],
)
def test_free_processes_have_the_threads_that_users_get(
    monkeypatch, contender, kind, ranks, expected
):
    monkeypatch.setattr("scaling.count_cores", lambda: 16)
    task = {"ranks": ranks, "processes": ranks, "contender": contender, "kind": kind}
    chosen = environment_of("cpu", task, 0, ["a:1", "b:2"])
    assert (chosen.get("OMP_NUM_THREADS"), chosen.get("PJRT_NPROC")) == expected


@pytest.mark.parametrize(
    ("platform", "contender", "ranks", "expected"),
    [
        ("cpu", "tnt_jax", 2, list(KINDS)),
        ("cpu", "PyTorch DDP", 2, list(KINDS[:2])),
        ("cuda", "tnt_jax", 2, [KINDS[0], KINDS[2]]),
        ("cpu", "tnt_jax", 1, [KINDS[0]]),
    ],
)
def test_ranks_are_of_the_kinds_that_a_contender_can_have(platform, contender, ranks, expected):
    args = argparse.Namespace(kinds=KINDS, platform=platform)
    assert kinds_of(args, contender, ranks) == expected


def test_busy_processes_end_with_the_block(monkeypatch):
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *a: started.append(popen(*a)) or started[-1])
    with pytest.raises(ValueError, match="stop"), busy_processes(2):
        raise_if_running(started)
    assert all(process.poll() is not None for process in started)


def raise_if_running(processes):
    assert [process.poll() for process in processes] == [None, None]
    raise ValueError("stop")


def test_addresses_are_free_and_differ():
    addresses = free_addresses("127.0.0.1", 3)
    assert len(set(addresses)) == 3


def test_the_environment_names_the_versions():
    assert environment()["versions"]["jax"]


TABLE = """8 rank(s) on gpu, 5 rounds of 20 steps each
way                                      median ms       min       max  of used
what it uses                                 {}     9.0      11.0    1.000
--fusion-threshold 25600                     {}     9.0      11.0    0.900
--fusion-threshold xla                       {}     9.0      11.0    1.200
Model(gradient_compression="bfloat16")       1.0     9.0      11.0    0.100  rounds what is sent
Use --fusion-threshold 25600
"""


def test_defaults_are_those_that_are_best_for_all_models():
    times = {
        "resnet50": times_of(TABLE.format(10.0, 9.0, 12.0)),
        "transformer": times_of(TABLE.format(10.0, 10.5, 20.0)),
    }
    assert set(times["resnet50"]) == {
        "what it uses", "--fusion-threshold 25600", "--fusion-threshold xla",
    }  # fmt: skip
    way, share = best_threshold(times)
    assert (way, round(share, 3)) == ("--fusion-threshold 25600", 0.975)
