"""What the launcher does with the output of its processes and with signals that are not the first:
real processes, real pipes.
"""

import os
import pty
import signal
import sys
import time

import pytest

from tnt_jax.launch.processtree import is_handled
from tnt_jax.launch.remote.connection import Lines
from tnt_jax.launch.remote.screen import Screen, say
from tnt_jax.launch.remote.session import excerpt

GLOO = (
    "[Gloo] Rank {} is connected to {} peer ranks. Expected number of connected peer ranks is : {}"
)


@pytest.mark.parametrize(
    ("limit", "pieces", "expected", "rest"),
    [
        (None, [b"a\nb", b"c\n", b"\n", b"d"], [b"a\n", b"bc\n", b"\n"], [b"d"]),
        (None, [b"a\rb\x0bc\x85", b"\r\n"], [b"a\rb\x0bc\x85\r\n"], []),
        (
            4,
            [b"ab", b"cd", b"e", b"f\n", b"longer than four\n"],
            [b"abcd\n", b"ef\n", b"longer than four\n"],
            [],
        ),
        (4, [b"", b"abc"], [], [b"abc"]),
    ],
)
def test_lines_are_the_same_whatever_pieces_they_arrive_in(limit, pieces, expected, rest):
    lines = Lines(limit)
    assert [line for piece in pieces for line in lines.feed(piece)] == expected
    assert lines.flush() == rest
    assert lines.flush() == []


@pytest.mark.parametrize("limit", [None, 1 << 16])
def test_a_line_that_never_ends_costs_time_in_proportion_to_its_length(limit):
    lines, began = Lines(limit), time.process_time()
    taken = sum(len(line) for _ in range(8192) for line in lines.feed(b"x" * 4096))
    assert time.process_time() - began < 2, "Each piece was joined with all before it."
    kept = sum(map(len, lines.flush()))
    assert (taken, kept) == ((0, 1 << 25) if limit is None else ((1 << 25) + 512, 0))


def test_the_end_of_an_output_keeps_the_error_that_much_follows():
    trace = [
        "Traceback (most recent call last):",
        '  File "train.py", line 7, in <module>',
        "    read()",
    ]
    noise = [f"*** frame {number}" for number in range(100)]
    lines = [
        "Epoch 1",
        *trace,
        "  ",
        "KeyError: 'the reason'",
        *noise,
        *[f"  {line}" for line in trace],
        "  OSError: a consequence",
        *noise,
    ]
    shown = excerpt(lines)
    assert shown == [
        "KeyError: 'the reason'",
        "...",
        "  OSError: a consequence",
        "...",
        *noise[-30:],
    ]
    assert excerpt([*trace, "KeyError: 1"]) == [*trace, "KeyError: 1"]
    assert excerpt([*trace]) == trace


@pytest.mark.multiprocess
def test_failing_rank_is_reported_with_its_reason_although_a_long_dump_follows(run, script):
    path = script(
        "import os, sys, time\n"
        "if os.environ['TNT_PROCESS_ID'] == '0': time.sleep(600)\n"
        "try: raise KeyError('the reason')\n"
        "except KeyError: import traceback; traceback.print_exc()\n"
        "for number in range(300): print('*** a line of a dump', number, 'x' * 60, "
        "file=sys.stderr)\n"
        "os._exit(6)"
    )
    code, _, err = run("-n", 2, "--no-gpu", path)
    assert code == 6
    assert "[tnt-jax]   KeyError: 'the reason'" in err


@pytest.mark.multiprocess
def test_a_reader_that_goes_away_ends_the_job_without_a_traceback(tnt_jax, script):
    launcher = tnt_jax("-n", 2, "--no-gpu", script("while True: print('x' * 1000)"))
    assert launcher.stdout.read(10) == "x" * 10
    launcher.stdout.close()
    assert launcher.wait(15) == 128 + signal.SIGPIPE
    assert launcher.stderr.read() == ""


@pytest.mark.multiprocess
def test_greetings_of_gloo_are_hidden_and_nothing_else(run, script):
    alike = f"{GLOO.format(0, 1, 1)}, or is it"
    path = script(
        f"print('one'); print({GLOO.format(0, 1, 1)!r}); "
        f"print({alike!r})\nprint({GLOO.format(12, 15, 15)!r}, flush=True)"
    )
    for _ in range(
        3
    ):  # The last piece of output may be read when the process has ended, or before.
        assert run("-n", 1, "--no-gpu", path)[:2] == (0, f"one\n{alike}\n")


@pytest.mark.multiprocess
def test_a_second_sigterm_does_not_prolong_the_grace_period(tnt_jax, script):
    path = script(
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('up', "
        "flush=True)\ntime.sleep(600)"
    )
    launcher = tnt_jax("-n", 1, "--no-gpu", "--grace-period", 2, path)
    assert launcher.stdout.readline() == "up\n"
    began = time.monotonic()
    launcher.terminate()
    time.sleep(1.7)
    launcher.terminate()
    assert launcher.wait(15) == 128 + signal.SIGTERM
    assert time.monotonic() - began < 3.5


@pytest.mark.multiprocess
@pytest.mark.parametrize("handled", [False, True])
@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_a_user_signal_reaches_who_asks_for_it_and_ends_nobody(tnt_jax, script, handled, name):
    handler = (
        f"signal.signal(signal.{name}, lambda *_: print('caught', flush=True))\n" if handled else ""
    )
    path = script(
        f"import signal, time, os, pathlib\n{handler}print('up', flush=True)\n"
        "while not pathlib.Path(__file__).with_name('end').exists(): "
        "time.sleep(0.05)\nprint('done')"
    )
    launcher = tnt_jax("-n", 1, "--no-gpu", path)
    assert launcher.stdout.readline() == "up\n"
    launcher.send_signal(getattr(signal, name))
    if handled:
        assert launcher.stdout.readline() == "caught\n"
    else:
        time.sleep(0.5)
    path.with_name("end").touch()
    assert launcher.communicate(timeout=15)[0] == "done\n"
    assert launcher.returncode == 0


@pytest.mark.multiprocess
@pytest.mark.parametrize("moment", ["before it starts", "during its imports"])
def test_a_user_signal_is_kept_until_the_process_handles_it(tnt_jax, script, moment):
    handle = "signal.signal(signal.SIGUSR1, lambda *_: print('caught', flush=True))"
    path = script(
        "import signal, time\n"
        "print('up', flush=True)\n"
        f"time.sleep(1)\n{handle}\n"
        "time.sleep(2.5)\n"
        "print('done')\n"
    )
    launcher = tnt_jax("-n", 2, "--no-gpu", "--output-on-all-devices", path)
    if moment == "before it starts":
        while not is_handled(launcher.pid, signal.SIGUSR1):
            time.sleep(0.01)
    else:
        assert [launcher.stdout.readline()[-3:] for _ in range(2)] == ["up\n"] * 2
    launcher.send_signal(signal.SIGUSR1)
    out, _ = launcher.communicate(timeout=20)
    assert out.count("caught") == 2
    assert out.count("done") == 2
    assert launcher.returncode == 0


@pytest.mark.multiprocess
def test_orphans_that_end_leave_no_zombies_behind(run, script):
    # A daemon's way: the middle process ends at once, and the kernel looks for another parent of
    # the last one.
    path = script(
        "import os, pathlib, time\n"
        "for _ in range(5):\n"
        "    if os.fork() == 0:\n"
        "        if os.fork() == 0: time.sleep(0.2)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
        "time.sleep(1)\n"
        "states = [file.read_text().rpartition(')')[2].split()[:2] for file in "
        "pathlib.Path('/proc').glob('[0-9]*/stat')]\n"
        "print([state for state, parent in states if state == 'Z' and parent in "
        "(str(os.getpid()), str(os.getppid()))])"
    )
    assert run("-n", 1, "--no-gpu", path)[:2] == (0, "[]\n")


@pytest.mark.multiprocess
def test_a_task_of_a_cluster_does_not_become_the_parent_of_orphans(run, script):
    # Python waits for its own children alone: those that it inherits would be zombies for ever.
    path = script(
        "import ctypes; flag = ctypes.c_int(-1); ctypes.CDLL(None).prctl(37, ctypes.byref(flag), "
        "0, 0, 0); print(flag.value)"
    )
    job = {
        "TNT_COORDINATOR_ADDRESS": "127.0.0.1:1",
        "TNT_NUM_PROCESSES": "2",
        "TNT_PROCESS_ID": "0",
    }
    assert run("--no-gpu", path, environ=job)[:2] == (0, "0\n")


def test_output_to_a_closed_terminal_is_discarded(monkeypatch):
    terminal, slave = pty.openpty()
    with open(slave, "w") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        monkeypatch.setattr("sys.stderr", stream)
        os.close(terminal)
        Screen([]).write(0, "stdout", b"epoch 1\n")
        say("The job ends.")
        assert os.readlink(f"/proc/self/fd/{stream.fileno()}") == os.devnull


@pytest.mark.multiprocess
def test_a_script_below_a_shell_has_its_grace_period(tnt_jax, script, tmp_path):
    wrapper = script('#!/bin/sh\n"$@"\nexit $?\n', "wrapper.sh")
    wrapper.chmod(0o755)
    path = script(
        "import pathlib, signal, sys, time\n"
        "def save(*_): time.sleep(1); pathlib.Path('saved').touch(); sys.exit(75)\n"
        "signal.signal(signal.SIGTERM, save)\nprint('up', flush=True)\ntime.sleep(600)"
    )
    interpreter = f"{wrapper} {sys.executable}"
    launcher = tnt_jax(
        "-n", 1, "--no-gpu", "--python-interpreter", interpreter, "--", path, cwd=tmp_path
    )
    assert launcher.stdout.readline() == "up\n"
    launcher.terminate()
    assert launcher.wait(30) == 75
    assert (tmp_path / "saved").exists()
