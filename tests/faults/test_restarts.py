"""A job that fails is started again: the real launcher, real processes, real deaths."""

import os
import re
import runpy
import signal
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from processes import SCRIPTS, environment, launch

from tnt_jax.launch import run as run_module
from tnt_jax.launch.command import main
from tnt_jax.launch.remote.hosts import HostEntry
from tnt_jax.launch.remote.session import HostError
from tnt_jax.launch.run import Attempt, Ending, delay_before_restart, run_on_hosts_left

# What every script below knows of its job.
KNOWN = """
import os, pathlib, signal, sys, time
rank, restart = int(os.environ["TNT_PROCESS_ID"]), int(os.environ["TNT_RESTART_COUNT"])
"""


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "script.py"
        path.write_text(KNOWN + text)
        return path

    return write


@pytest.fixture
def start():
    """Starts the launcher, and returns its process."""
    started = []

    def start(*words):
        command = [sys.executable, "-m", "tnt_jax.launch", "-n", "2", "--no-gpu", *map(str, words)]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(subprocess.Popen(command, env=environment(), **streams))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def weights(path):
    with np.load(path) as arrays:
        return [arrays[name] for name in arrays]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "deaths",
    [
        ["1:9"],  # In the second epoch.
        # Rank 0 holds the coordination service. The launcher handles both deaths alike.
        pytest.param(["0:8", "1:3", "0:2"], marks=pytest.mark.long),
    ],
)
def test_training_whose_ranks_were_killed_gives_the_weights_of_one_process(
    tmp_path, monkeypatch, two_ranks, deaths
):
    train = SCRIPTS / "train_and_die.py"
    arguments = [tmp_path / "restarted.npz", tmp_path / "a", *deaths]
    done = launch(2, train, *arguments, flags=["--max-restarts", len(deaths)])
    assert done.returncode == 0, done.stderr
    for number, death in enumerate(deaths, 1):
        assert re.search(
            rf"Restart {number} of {len(deaths)} follows in .* Cause: Rank {death[0]} on "
            r"localhost was ended by signal 9 \(SIGKILL\)\. It was process \d+\.\n",
            done.stderr,
        )
    assert done.stderr.count("The last words.") == len(deaths)
    monkeypatch.setattr(sys, "argv", ["", str(tmp_path / "whole.npz"), str(tmp_path / "b")])
    runpy.run_path(str(train))
    expected = weights(tmp_path / "whole.npz")
    for one, other in zip(weights(tmp_path / "restarted.npz"), expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.multiprocess
def test_job_that_fails_at_once_uses_up_its_restarts_and_says_little(script, tmp_path):
    path = script(
        "launcher = pathlib.Path(f'/proc/{os.getppid()}/stat').read_text().split()[3]\n"
        "num_open = len(os.listdir(f'/proc/{launcher}/fd'))\n"
        "print('start', restart, os.environ['TNT_JOB_ID'], num_open, flush=True)\n"
        "told = pathlib.Path(__file__).with_name(f'told{restart}')\n"
        "if rank == 0: told.touch(); time.sleep(30)\n"
        "while not told.exists(): time.sleep(0.01)\n"
        "print('the cause', restart, file=sys.stderr); sys.exit(3 + restart)"
    )
    started = time.monotonic()
    done = launch(2, path, flags=["--max-restarts", "2", "--log-dir", tmp_path / "logs"])
    assert time.monotonic() - started < 20
    # The code and the last words of the last attempt.
    assert done.returncode == 5
    assert "[tnt-jax]   the cause 2\n" in done.stderr
    assert "Restart 1 of 2 follows in 1 s" in done.stderr
    assert "Restart 2 of 2 follows in 2 s" in done.stderr
    assert done.stderr.splitlines()[-1] == "[tnt-jax] The job has failed after 2 restart(s)."
    assert len(done.stderr.splitlines()) == 3 * 2 + 2 * 2 + 1, done.stderr
    starts = [line.split() for line in done.stdout.splitlines()]
    assert [number for _, number, _, _ in starts] == ["0", "1", "2"]
    assert len({num_open for _, _, _, num_open in starts}) == 1, "Files are left open."
    (first, *others) = [job_id for _, _, job_id, _ in starts]
    assert others == [f"{first}.1", f"{first}.2"]
    # No attempt overwrites what another has logged.
    for number, name in enumerate(["rank1.log", "rank1.restart1.log", "rank1.restart2.log"]):
        assert f"the cause {number}" in (tmp_path / "logs" / name).read_text()


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("signum", "code", "is_ignored"),
    [(signal.SIGINT, 130, False), (signal.SIGINT, 130, True), (signal.SIGTERM, 75, False)],
)
def test_signal_before_a_restart_ends_the_launcher_at_once(start, script, signum, code, is_ignored):
    # A shell without job control starts what follows `&` with SIGINT ignored.
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN if is_ignored else signal.SIG_DFL)
    try:
        launcher = start("--max-restarts", 9, script("sys.exit(1)"))
    finally:
        signal.signal(signal.SIGINT, previous)
    for line in launcher.stderr:
        if "Restart 2 of 9 follows in 2 s" in line:
            break
    launcher.send_signal(signum)
    _, err = launcher.communicate(timeout=5)
    assert launcher.returncode == code
    assert "Restart 2 starts" not in err


PATIENT = """
def end(signum, frame):
    print("saved", flush=True)
    # What `fit` says, by which test_preempted_ranks.py recognises a preemption.
    name = signal.Signals(signum).name
    print(f"{name} came to process {rank}: the state after step 3 of epoch 1 is saved.", file=sys.stderr)
    sys.exit(75)
for signum in (signal.SIGTERM, signal.SIGUSR1): signal.signal(signum, end)
print(rank, restart, os.getpid(), flush=True)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_job_that_the_launcher_was_told_to_end_is_not_restarted(start, script, signum):
    launcher = start("--max-restarts", 3, script(PATIENT + "while True: time.sleep(0.1)"))
    launcher.stdout.readline()
    time.sleep(0.5)  # The other rank may need a moment more.
    launcher.send_signal(signum)
    out, err = launcher.communicate(timeout=15)
    assert launcher.returncode != 0
    assert "saved" in out
    assert "Restart" not in err


@pytest.mark.multiprocess
@pytest.mark.long
def test_rank_that_was_told_to_end_alone_is_restarted(start, script):
    text = PATIENT + "while restart == 0: time.sleep(0.1)\n"
    # The launcher expects the other rank to save its state, too, and gives it this long.
    launcher = start("--max-restarts", 3, "--grace-period", 2, script(text))
    rank, restart, pid = launcher.stdout.readline().split()
    assert (rank, restart) == ("0", "0")
    os.kill(int(pid), signal.SIGTERM)
    out, err = launcher.communicate(timeout=20)
    assert launcher.returncode == 0, err
    assert "Restart 1 of 3 follows in 1 s" in err
    assert "Cause: it was preempted: SIGTERM came to process 0, and the state is saved\n" in err
    assert re.search(r"^0 1 \d+$", out, re.MULTILINE)


@pytest.mark.multiprocess
def test_nothing_of_an_attempt_is_left_when_the_next_one_starts(script, tmp_path):
    # A worker of a data loader, which hides in a session of its own.
    path = script(
        "import subprocess\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "if restart == 0:\n"
        "    worker = subprocess.Popen(['setsid', 'sleep', '600'])\n"
        "    (folder / f'worker{rank}').write_text(str(worker.pid))\n"
        "    time.sleep(1 + rank)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "pids = [file.read_text() for file in folder.glob('worker?')]\n"
        "print('left:', [pid for pid in pids if os.path.exists(f'/proc/{pid}')])"
    )
    done = launch(2, path, flags=["--max-restarts", "1"])
    assert (done.returncode, done.stdout) == (0, "left: []\n"), done.stderr


# Which hosts.

HOSTS = [HostEntry(f"node{number}") for number in (1, 2, 3)]
WHOLE = Attempt("job", HOSTS, restart_count=1)


def hosts_with(*broken):
    """Returns what runs an attempt where the hosts in `broken` cannot take part."""
    attempts = []

    def run(attempt):
        attempts.append(attempt)
        found = [entry.name for entry in attempt.entries if entry.name in broken]
        if found:
            raise HostError(dict.fromkeys(found[:1], "it is off"))
        return Ending(0)

    return run, attempts


@pytest.mark.parametrize(
    ("broken", "min_hosts", "expected"),
    [
        ([], None, ["node1", "node2", "node3"]),
        ([], 1, ["node1", "node2", "node3"]),
        (["node2"], 2, ["node1", "node3"]),
        (["node1"], 1, ["node2", "node3"]),
        (["node1", "node3"], 1, ["node2"]),
    ],
)
def test_job_runs_on_the_hosts_that_are_left(broken, min_hosts, expected):
    run, attempts = hosts_with(*broken)
    assert run_on_hosts_left(WHOLE, min_hosts, run) == Ending(0)
    entries = [HostEntry(name) for name in expected]
    assert attempts[-1] == replace(
        WHOLE, entries=entries, left_out=dict.fromkeys(broken, "it is off")
    )
    assert len(attempts) == len(broken) + 1


@pytest.mark.parametrize(
    ("broken", "min_hosts"), [(["node2"], None), (["node2"], 3), (["node1", "node3"], 2)]
)
def test_job_does_not_run_on_too_few_hosts(broken, min_hosts):
    run, _ = hosts_with(*broken)
    with pytest.raises(HostError) as caught:
        run_on_hosts_left(WHOLE, min_hosts, run)
    assert caught.value.reasons == dict.fromkeys(broken, "it is off")


def test_more_hosts_than_there_are_cannot_be_required():
    with pytest.raises(ValueError, match=r"--min-hosts \(4\) must not be above .*, which is 3"):
        run_on_hosts_left(WHOLE, 4, hosts_with()[0])


def test_an_attempt_that_ran_for_long_begins_the_delays_anew(monkeypatch):
    slept, clock = [], SimpleNamespace(now_s=0.0)
    times = {"monotonic": lambda: clock.now_s, "sleep": slept.append, "time": time.time}
    times |= {"strftime": time.strftime, "localtime": time.localtime}
    monkeypatch.setattr(run_module, "time", SimpleNamespace(**times))
    hosts = [HostEntry("a", 1), HostEntry("b", 1)]
    # Seconds that each attempt ran, and the hosts that were lost.
    ends = iter([(1, ()), (1, ()), (61, ()), (1, ()), (1, ("b",)), (1, ())])

    def run(attempt):
        seconds, lost = next(ends)
        clock.now_s += seconds
        return Ending(3, because="it failed", silent_hosts=lost)

    options = SimpleNamespace(max_restarts=5, min_hosts=None)
    assert run_module._repeat(Attempt("job", hosts), options, run, lambda: hosts) == 3
    assert slept == [1, 2, 1, 2, 8]


def test_delays_double_up_to_a_minute_and_outlast_the_processes_of_a_lost_host():
    delays = [delay_before_restart(number, has_lost_hosts=False) for number in range(8)]
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60]
    assert delay_before_restart(10**6, has_lost_hosts=False) == 60
    assert [delay_before_restart(n, has_lost_hosts=True) for n in (0, 3, 4)] == [8, 8, 16]


def test_one_task_of_many_refuses_to_restart(monkeypatch, capsys):
    job = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    job |= {"SLURM_LOCALID": "0", "SLURM_STEP_NODELIST": "node[1-2]", "SLURM_STEP_NUM_NODES": "2"}
    job |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TNT_JOB_ID", raising=False)
    assert main(["--max-restarts", "1", "--", "train.py"]) == 2
    assert "Run tnt-jax once, in the batch script without srun or mpirun" in capsys.readouterr().err
