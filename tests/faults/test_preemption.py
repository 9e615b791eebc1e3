"""Signals to the launcher and to processes of real jobs: what is saved, and how they end."""

import signal
import time

import pytest
from preemptions import LAUNCHER, PREEMPTED, Run, digests, preempt

TERM, USR1, USR2 = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2


@pytest.mark.multiprocess
def test_preempted_run_ends_with_75_and_goes_on_bit_for_bit(tmp_path):
    code, ended_at, err = preempt(tmp_path, "callback", USR1, 1)
    assert code == PREEMPTED, err
    assert len(ended_at) == 2
    assert ended_at[0] == ended_at[1] >= 9
    resumed, uninterrupted = digests(tmp_path, UNINTERRUPTED="1")
    assert resumed == uninterrupted


PHASES = ["begin", "compile", "callback", "validation", "save", "epoch_end", "between", "data"]
SENDERS = [(TERM, LAUNCHER), (TERM, 1), (USR1, 0), (USR2, LAUNCHER), (USR1, LAUNCHER), (USR2, 1)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return digests(tmp_path_factory.mktemp("uninterrupted"))


# 96 runs. The first test has two of them.
@pytest.mark.long
@pytest.mark.multiprocess
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("signum", "to"), SENDERS)
def test_signal_in_any_phase_saves_and_ends_with_75(tmp_path, uninterrupted, phase, signum, to):
    code, ended_at, err = preempt(tmp_path, phase, signum, to)
    assert code == PREEMPTED, err
    assert len(ended_at) == 2
    assert ended_at[0] == ended_at[1]
    assert digests(tmp_path) == uninterrupted


# The test of the second signal in test_stop_signals needs no job.
@pytest.mark.long
@pytest.mark.multiprocess
def test_second_signal_to_the_launcher_ends_at_once(tmp_path):
    run = Run(tmp_path, "callback", variables={"PAUSE_S": "60"})
    run.wait_for_pause()
    began = time.monotonic()
    run.send(TERM, LAUNCHER)
    time.sleep(2.5)
    run.send(TERM, LAUNCHER)
    code, _, err = run.end()
    assert code == 128 + TERM
    assert "SIGTERM is the second signal: ending at once" in err
    assert time.monotonic() - began < 15
    assert not run.ended_at()


@pytest.mark.long
@pytest.mark.multiprocess
def test_signal_without_a_directory_for_backups_does_what_it_did(tmp_path):
    run = Run(tmp_path, "callback", variables={"WITHOUT_BACKUP": "1"})
    run.wait_for_pause()
    run.send(USR1, LAUNCHER)
    time.sleep(0.3)
    run.send(TERM, LAUNCHER)
    code, _, err = run.end()
    assert code == 128 + TERM
    assert not run.ended_at()
    assert "SIGUSR1" not in err
