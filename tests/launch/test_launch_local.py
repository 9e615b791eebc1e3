"""The local launcher, run as a user runs it: a program of its own, real processes, real signals."""

import os
import re
import signal
import socket
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tnt_jax.cluster.devices import count_cores
from tnt_jax.launch.processtree import descendants, processes_of_jobs

pytestmark = pytest.mark.multiprocess

STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
# A grandchild that hides: another session, no environment.
subprocess.Popen(["setsid", "env", "-i", "sleep", "600"])
print("up", flush=True)
time.sleep(600)
"""


def test_master_alone_is_shown_with_its_arguments_untouched(run, script):
    path = script(
        "import os, sys; print(os.environ['TNT_PROCESS_ID'], os.environ['TNT_NUM_PROCESSES'], "
        "sys.argv[1:])"
    )
    odd = ["a b", "'\"", "$HOME", "line\nbreak", "", "--", "-n"]
    code, out, err = run("-n", 3, "--no-gpu", "--", path, *odd)
    assert (code, out, err) == (0, f"0 3 {odd}\n", "")


@pytest.mark.skipif(count_cores() % 2, reason="needs an even number of processors")
def test_processes_run_on_processors_of_their_own(run, script):
    path = script("import os; print(*os.sched_getaffinity(0))")
    code, out, err = run("-n", 2, "--no-gpu", "--output-on-all-devices", "--", path)
    assert (code, err) == (0, "")
    first, second = (set(line.split("] ")[1].split()) for line in out.splitlines())
    assert len(first) == len(second) == count_cores() // 2
    assert first | second == set(map(str, os.sched_getaffinity(0)))


def test_each_line_carries_its_rank_where_all_print(run, script):
    path = script("import os; print('one\\ntwo', end=os.environ['TNT_PROCESS_ID'])")
    code, out, _ = run("-n", 2, "--no-gpu", "--output-on-all-devices", path)
    assert code == 0
    assert sorted(out.splitlines()) == [
        "[rank 0] one",
        "[rank 0] two0",
        "[rank 1] one",
        "[rank 1] two1",
    ]


def test_bytes_that_are_no_text_pass_unchanged(run, script):
    path = script("import sys; sys.stdout.buffer.write(bytes(range(256)) * 2000)")
    code, out, _ = run("-n", 1, "--no-gpu", path, text=False)
    assert (code, out) == (0, bytes(range(256)) * 2000)


def test_failing_rank_ends_the_others_and_gives_its_code_and_last_words(run, script):
    path = script(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.environ['TNT_PROCESS_ID'] == '2': print('the cause', file=sys.stderr); "
        "sys.exit(7)\n"
        "time.sleep(600)"
    )
    started = time.monotonic()
    code, _, err = run("-n", 3, "--no-gpu", path)
    assert code == 7
    assert "Rank 2 on localhost failed with exit code 7" in err
    assert "the cause" in err
    assert time.monotonic() - started < 15


def test_ranks_that_fail_together_are_all_reported(run, script):
    # Rank 0 ends first, but as a consequence: the reason is what rank 1 says.
    path = script(
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.environ['TNT_PROCESS_ID'] == '0': time.sleep(1); sys.exit(3)\n"
        "if os.environ['TNT_PROCESS_ID'] == '1': time.sleep(2); print('the reason', "
        "file=sys.stderr); sys.exit(4)\n"
        "time.sleep(600)"
    )
    code, _, err = run("-n", 3, "--no-gpu", path)
    assert code == 3
    assert "Rank 1 on localhost failed with exit code 4" in err
    assert "the reason" in err
    assert "Rank 2" not in err, "It was ended because of the others."


def test_rank_ended_by_a_signal_is_named_with_it(run, script):
    path = script(
        "import os, time\nif os.environ['TNT_PROCESS_ID'] == '1': os.abort()\ntime.sleep(600)"
    )
    code, _, err = run("-n", 2, "--no-gpu", path)
    assert code == 128 + signal.SIGABRT
    assert "Rank 1 on localhost was ended by signal 6" in err


@pytest.mark.parametrize("victim", ["launcher", "supervisor"])
def test_nothing_survives_when_a_part_of_the_launcher_is_killed(
    wait_until, tnt_jax, script, victim
):
    launcher = tnt_jax("-n", 2, "--no-gpu", script(STUBBORN))
    wait_until(
        lambda: len(descendants(launcher.pid)) == 5
    )  # The supervisor, two ranks, two grandchildren.
    everyone = [launcher.pid, *descendants(launcher.pid)]
    os.kill(everyone[0 if victim == "launcher" else 1], signal.SIGKILL)
    launcher.wait(15)
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in everyone))


@pytest.mark.parametrize(
    ("signum", "says"), [(signal.SIGINT, "caught SIGINT"), (signal.SIGTERM, "caught SIGTERM")]
)
def test_signal_reaches_the_script_which_may_end_well(tnt_jax, script, signum, says):
    path = script(
        "import signal, sys, time\n"
        "def end(signum, frame):\n"
        "    print('caught', signal.Signals(signum).name); sys.exit(0)\n"
        "for s in (signal.SIGINT, signal.SIGTERM): signal.signal(s, end)\n"
        "print('up', flush=True)\n"
        # A signal that comes just before one long sleep would wait for its end.
        "while True: time.sleep(0.1)"
    )
    launcher = tnt_jax("-n", 1, "--no-gpu", path)
    assert launcher.stdout.readline() == "up\n"
    launcher.send_signal(signum)
    out, _ = launcher.communicate(timeout=15)
    assert (launcher.returncode, out) == (0, says + "\n")


def test_ctrl_c_ends_a_script_that_does_not_handle_it(wait_until, tnt_jax, script, tmp_path):
    say_up = f"import os, pathlib, time; pathlib.Path({str(tmp_path)!r}, 'up' + os.environ['TNT_PROCESS_ID']).touch()"
    launcher = tnt_jax("-n", 2, "--no-gpu", script(f"{say_up}; time.sleep(600)"))
    # An interpreter that is still starting may lose the signal in an import.
    wait_until(lambda: len(list(tmp_path.glob("up?"))) == 2)
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate(timeout=15)
    assert launcher.returncode == 130
    assert "KeyboardInterrupt" in err


def test_script_that_ignores_the_signal_is_killed_after_the_grace_period(
    wait_until, tnt_jax, script
):
    launcher = tnt_jax("-n", 2, "--no-gpu", "--grace-period", 0.5, script(STUBBORN))
    assert launcher.stdout.readline() == "up\n"
    wait_until(lambda: len(descendants(launcher.pid)) == 5)
    everyone = descendants(launcher.pid)
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=15)
    assert launcher.returncode == 128 + signal.SIGTERM
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in everyone), timeout_s=2)


def test_missing_script_is_reported_at_once(run, tmp_path):
    code, _, err = run("-n", 2, "--", tmp_path / "nothing.py")
    assert code == 2
    assert f"no script {tmp_path}/nothing.py" in err


def test_missing_interpreter_is_reported_at_once(run, script):
    code, _, err = run("-n", 2, "--python-interpreter", "no_such_python -u", "--", script(""))
    assert code == 2
    assert "no interpreter no_such_python" in err


def test_script_is_a_program_itself_with_an_empty_interpreter(run, tmp_path):
    program = tmp_path / "program"
    program.write_text("#!/bin/sh\necho $TNT_PROCESS_ID $1\n")
    assert (
        "no permission to execute" in run("--no-gpu", "--python-interpreter", "", "--", program)[2]
    )
    program.chmod(0o755)
    assert run("--no-gpu", "--python-interpreter", "", "--", program, "x")[:2] == (0, "0 x\n")


def test_exported_variables_refer_to_others_in_the_process(run, script):
    path = script("import os; print(os.environ['A'], os.environ['B'], repr(os.environ['C']))")
    code, out, _ = run(
        "-n", 1, "--no-gpu", "-x", "A=1 =2", r"B=${A}/$TNT_PROCESS_ID/\$A", "C=", "--", path
    )
    assert (code, out) == (0, "1 =2 1 =2/0/$A ''\n")


def test_log_dir_gets_a_file_for_each_rank(run, script, tmp_path):
    path = script(
        "import os, sys; print('out', os.environ['TNT_PROCESS_ID']); print('err', file=sys.stderr)"
    )
    assert run("-n", 2, "--no-gpu", "--log-dir", "logs", path, cwd=tmp_path)[0] == 0
    assert sorted((tmp_path / "logs" / "rank1.log").read_text().split()) == ["1", "err", "out"]


def test_a_job_goes_on_without_a_log_for_which_the_disk_has_no_space(run, script, tmp_path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "rank1.log").symlink_to("/dev/full")
    path = script("import os; print('out', os.environ['TNT_PROCESS_ID'])")
    code, out, err = run("-n", 2, "--no-gpu", "--log-dir", "logs", path, cwd=tmp_path)
    assert (code, out) == (0, "out 0\n")
    assert (tmp_path / "logs" / "rank0.log").read_text() == "out 0\n"
    assert err.count("rank1.log ends here: [Errno 28] No space left on device.") == 1


def test_process_that_is_shown_alone_on_a_terminal_sees_a_terminal(tnt_jax, script, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # It would count for more than the terminal.
    path = script(
        "import os, sys; columns = sys.stdout.isatty() and os.get_terminal_size(1).columns; "
        "print(sys.stdout.isatty(), sys.stderr.isatty(), columns, end='\\r\\n')"
    )
    reading, writing = os.openpty()
    termios.tcsetwinsize(writing, (24, 123))
    launcher = tnt_jax("-n", 2, "--no-gpu", path, stdout=writing)
    _, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == 0, errors
    shown = b""
    while not shown.endswith(b"\n"):
        shown += os.read(reading, 1000)
    assert shown == b"True False 123\r\r\n"  # The outer terminal puts its own \\r before each \\n.
    os.close(reading)
    os.close(writing)


def test_slow_reader_loses_nothing(tnt_jax, script):
    path = script("for i in range(50000): print(i)")  # Several times what a pipe holds.
    launcher = tnt_jax("-n", 1, "--no-gpu", path)
    time.sleep(1.5)
    out, _ = launcher.communicate(timeout=60)
    assert out.splitlines() == [str(i) for i in range(50000)]


def test_dry_run_starts_nothing(run, script, tmp_path):
    path = script(f"open({str(tmp_path / 'mark')!r}, 'w')")
    code, out, _ = run("-n", 2, "--no-gpu", "--dry-run", path)
    assert code == 0
    assert "rank 1 on localhost" in out
    assert not (tmp_path / "mark").exists()


def test_more_processes_than_there_are_cannot_be_asked_for(run, script):
    words = ("-n", 2, "--no-gpu", "--elastic", "--min-processes", 3, "--dry-run")
    code, _, err = run(*words, script(""))
    assert code == 2
    assert "--min-processes (3) must not be above the number of processes, which is 2" in err


SLEEPER = "import os, time; print(os.environ['TNT_JOB_ID'], flush=True); time.sleep(600)"


def test_cleanup_of_one_job_leaves_the_other_alone(tnt_jax, run, script):
    launchers = [tnt_jax("-n", 2, "--no-gpu", script(SLEEPER)) for _ in range(2)]
    ended, other = (launcher.stdout.readline().strip() for launcher in launchers)
    listed = run("--cleanup")[1]
    assert f"job {ended}" in listed
    assert f"job {other}" in listed
    code, out, _ = run("--cleanup", ended)
    assert (code, out) == (0, "localhost: 2 of 2 process(es) ended\n")
    assert "was ended by signal 15" in launchers[0].communicate(timeout=15)[1]
    assert [job for _, job in processes_of_jobs() if job in (ended, other)] == [other] * 2
    launchers[1].terminate()
    launchers[1].communicate(timeout=15)


def test_cleanup_kills_what_does_not_listen_only_by_force(tnt_jax, run, script):
    launcher = tnt_jax(
        "-n",
        1,
        "--no-gpu",
        script("import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEPER),
    )
    job_id = launcher.stdout.readline().strip()
    code, out, _ = run("--cleanup", job_id)
    assert code == 1
    assert "0 of 1 process(es) ended" in out
    assert "--force kills it" in out
    assert run("--cleanup", job_id, "--force")[:2] == (0, "localhost: 1 of 1 process(es) ended\n")
    assert launcher.wait(15) == 137


def test_busy_port_is_reported_at_once(run, script):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        code, _, err = run("-n", 2, "--no-gpu", "--port", port, script(""))
    assert code == 2
    assert f"localhost: port {port} cannot be used" in err
    assert "Leave --port out" in err


def test_start_is_timed_by_phase(run, script):
    _, _, err = run("-n", 1, "--no-gpu", "--log-level", "DEBUG", script(""))
    phases = re.findall(r"Start-up: (.*) took [\d.]+ s", err)
    assert phases == ["connecting to the hosts", "planning", "starting the processes"]


def test_launcher_never_imports_jax(run, script):
    check = (
        "import sys; from tnt_jax.launch.command import main; import tnt_jax.launch.supervisor\n"
        f"code = main(['-n', '1', '--no-gpu', {str(script('print(1)'))!r}])\n"
        "heavy = {'jax', 'jaxlib', 'flax', 'numpy', 'optax'} & set(sys.modules)\n"
        "assert not heavy, heavy; sys.exit(code)"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", check], env=environ, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


ALL_REDUCE = """
import os
import jax, jax.numpy as jnp
from jax.experimental import multihost_utils
jax.distributed.initialize(
    os.environ["TNT_COORDINATOR_ADDRESS"], int(os.environ["TNT_NUM_PROCESSES"]), int(os.environ["TNT_PROCESS_ID"]))
print(jax.device_count(), jax.local_device_count(), multihost_utils.process_allgather(jnp.ones(1) * jax.process_index()).ravel())
"""


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["-n", 2], "2 1 [0. 1.]", marks=pytest.mark.long),
        (["-n", 4, "--processes-per-node", 2], "4 2 [0. 1.]"),
    ],
)
def test_processes_meet_even_with_a_proxy_and_virtual_devices_in_the_environment(
    run, script, arguments, expected
):
    hostile = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    code, out, err = run(*arguments, "--no-gpu", script(ALL_REDUCE), environ={**hostile, **flags})
    assert code == 0, err
    assert expected in out.splitlines()
