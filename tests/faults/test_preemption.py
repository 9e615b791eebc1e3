"""Signals to the launcher and to processes of real jobs: what is saved, and how they end."""

import signal
import time

import pytest
from preemptions import LAUNCHER, PREEMPTED, Run, digests, preempt

TERM, USR1, USR2 = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2


@pytest.mark.multiprocess
def test_preempted_runs_end_with_75_and_go_on_bit_for_bit(tmp_path):
    # In the first fit, with arrays; then in the second one, while a process waits for its data.
    code, ended_at, err = preempt(tmp_path, "callback", TERM, LAUNCHER)
    assert code == PREEMPTED, err
    assert len(ended_at) == 2
    assert ended_at[0] == ended_at[1] >= 9
    code, ended_at, err = preempt(tmp_path, "data", USR1, 1)
    assert code == PREEMPTED, err
    assert len(ended_at) == 2
    assert 18 < ended_at[0] == ended_at[1] < 36
    resumed, uninterrupted = digests(tmp_path, UNINTERRUPTED="1")
    assert resumed == uninterrupted


@pytest.mark.multiprocess
def test_second_signal_ends_at_once(tmp_path):
    run = Run(tmp_path, "callback", variables={"PAUSE_S": "60"})
    run.wait_for_pause()
    began = time.monotonic()
    run.send(TERM, LAUNCHER)
    time.sleep(1.5)
    run.send(TERM, LAUNCHER)
    code, _, err = run.end()
    assert code == 128 + TERM
    assert "SIGTERM is the second signal: ending at once" in err
    assert time.monotonic() - began < 15
    assert not run.ended_at()


PHASES = ["begin", "compile", "callback", "validation", "save", "epoch_end", "between", "data"]
SENDERS = [(TERM, LAUNCHER), (TERM, 1), (USR1, 0), (USR2, LAUNCHER), (USR1, LAUNCHER), (USR2, 1)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return digests(tmp_path_factory.mktemp("uninterrupted"))


# 96 runs. The short test above has two of them.
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
