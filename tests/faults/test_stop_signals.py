"""Which handlers stand beside those that ask a process to end, and what the second signal does."""

import signal
import subprocess
import sys
import textwrap

import pytest
from processes import environment

BEGIN = """
import os, signal, sys, time
from tnt_jax.distributed.stopping import StopSignals

def asked(signum):
    print("asked by", signal.Signals(signum).name, flush=True)

def own(signum, frame):
    print("own handler", flush=True)

def send(name):
    os.kill(os.getpid(), getattr(signal, name))
    time.sleep(0.3)

signals = StopSignals(asked)
"""


def run(script, **variables):
    """Runs a script after `BEGIN`; returns exit code and lines of output."""
    done = subprocess.run(
        [sys.executable, "-c", BEGIN + textwrap.dedent(script)],
        capture_output=True, text=True, timeout=60, env=environment(**variables),
    )  # fmt: skip
    return done.returncode, done.stdout.splitlines(), done.stderr


def test_second_signal_ends_at_once_though_the_main_thread_is_blocked():
    code, out, err = run("""
        import ctypes, threading
        signals.install()
        def twice():
            time.sleep(0.2); os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(2.2); os.kill(os.getpid(), signal.SIGUSR1)
        threading.Thread(target=twice).start()
        lock = ctypes.create_string_buffer(64)
        for _ in range(2):  # The second time it waits for ever, and no signal wakes it.
            ctypes.CDLL(None).pthread_mutex_lock(lock)
    """)
    assert (code, out) == (128 + signal.SIGUSR1, ["asked by SIGTERM"])
    assert "SIGUSR1 is the second signal" in err


def test_a_signal_that_comes_twice_within_a_second_is_one():
    code, out, _ = run("signals.install(); send('SIGTERM'); send('SIGTERM')")
    assert (code, out) == (0, ["asked by SIGTERM"])


@pytest.mark.parametrize(
    "order", ["signal.signal(signal.SIGTERM, own); signals.install()",
              "signals.install(); signal.signal(signal.SIGTERM, own)"],
    ids=["before", "after"],
)  # fmt: skip
def test_handler_of_the_script_stays(order):
    code, out, _ = run(f"{order}; send('SIGTERM'); send('SIGUSR2')")
    assert (code, out) == (0, ["own handler", "asked by SIGUSR2"])


def test_handler_of_the_script_can_call_the_one_that_it_replaces():
    code, out, _ = run("""
        signals.install()
        before = signal.getsignal(signal.SIGTERM)
        def both(signum, frame):
            own(signum, frame)
            before(signum, frame)
        signal.signal(signal.SIGTERM, both)
        send("SIGTERM")
    """)
    assert (code, out) == (0, ["own handler", "asked by SIGTERM"])


def test_signal_that_the_script_ignores_stays_ignored():
    ignore = "signal.signal(signal.{0}, signal.SIG_IGN); "
    script = ignore.format("SIGTERM") + ignore.format("SIGUSR1") + "signals.install(); {0}"
    code, out, _ = run(script.format("send('SIGTERM'); send('SIGUSR1'); send('SIGUSR2')"))
    assert (code, out) == (0, ["asked by SIGUSR2"])
    # Under the launcher every process ignores SIGUSR1 from the beginning.
    code, out, _ = run(script.format("send('SIGTERM'); send('SIGUSR1')"), TNT_JOB_ID="1")
    assert (code, out) == (0, ["asked by SIGUSR1"])


def test_signals_do_what_they_did_once_they_are_given_back():
    code, out, _ = run("signals.install(); signals.restore(); send('SIGTERM')")
    assert (code, out) == (-signal.SIGTERM, [])


def test_process_made_by_fork_takes_signals_as_before_and_its_parent_none_of_them():
    code, out, _ = run("""
        signals.install()
        child = os.fork()
        if child == 0:
            time.sleep(60)
        time.sleep(0.3)
        os.kill(child, signal.SIGTERM)
        print("child ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        time.sleep(0.3)
    """)
    assert (code, out) == (0, [f"child ended with {-signal.SIGTERM}"])


def test_event_loop_that_has_the_pipe_of_signals_keeps_it():
    code, out, _ = run("""
        import socket
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno())
        signals.install()
        send("SIGTERM")
        print("loop read", ours.recv(9)[0])
        print("kept", signal.set_wakeup_fd(-1) == theirs.fileno())
    """)
    assert code == 0
    assert sorted(out) == ["asked by SIGTERM", "kept True", f"loop read {int(signal.SIGTERM)}"]
