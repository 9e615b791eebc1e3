"""Saves by the clock: on one process at once, on several after the same batch and with few words."""

import threading

import numpy as np
import pytest

from tnt_jax.keras_compat.callbacks import monitor as module
from tnt_jax.keras_compat.callbacks.monitor import SavingSeconds, SavingTimes, saving_times


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def due_times(times, clock, step_s, num_steps):
    """Returns the seconds after the start at which a save was due."""
    found = []
    start_s = clock.now_s
    for batch in range(num_steps):
        clock.now_s += step_s(batch) if callable(step_s) else step_s
        if times.is_due_after_batch(batch):
            found.append(clock.now_s - start_s)
    return found


def test_one_process_saves_after_the_first_step_past_the_interval():
    clock = Clock()
    times = SavingSeconds(10, alone=True, clock=clock)
    assert due_times(times, clock, 0.75, 50) == [10.5, 21.0, 31.5]


@pytest.mark.parametrize("step_s", [1e-4, 2e-3, 0.05, 0.7, 4.0, 30.0])
def test_several_processes_ask_the_first_seldom_and_in_time(monkeypatch, step_s):
    asked = []
    monkeypatch.setattr(module, "broadcast", lambda decided: asked.append(decided) or decided)
    clock = Clock()
    times = SavingSeconds(20, alone=False, clock=clock)
    due = due_times(times, clock, step_s, int(200 / step_s))
    waits = np.diff([0, *due])
    assert np.all(waits >= 20)
    assert np.all(waits <= 20 + max(1, 1.1 * step_s)), "A save may be late by a step, or 5 %."
    assert len(asked) <= 1.1 * sum(waits) + 20, "Once in a second."


@pytest.mark.parametrize("slower", [3, 10])
def test_steps_that_become_slow_delay_a_save_by_two_seconds_of_them(monkeypatch, slower):
    monkeypatch.setattr(module, "broadcast", lambda decided: decided)
    clock = Clock()
    times = SavingSeconds(20, alone=False, clock=clock)
    steps = lambda batch: 1e-3 * (1 if batch < 9000 else slower)  # noqa: E731
    [first, *_] = due_times(times, clock, steps, 20_000)
    assert 20 <= first <= 20 + 2.1 * slower


def test_all_processes_decide_alike_by_the_clock_of_the_first(monkeypatch):
    first = threading.local()
    told = []

    def broadcast(decided):
        if first.value:
            told.append(decided)
            return decided
        return told[first.asked]

    def run(is_first, step_s):
        first.value, first.asked = is_first, -1
        clock = Clock()

        def ask(decided):
            first.asked += 1
            return broadcast(decided)

        monkeypatch.setattr(module, "broadcast", ask)
        times = SavingSeconds(3, alone=False, clock=clock)
        return [
            batch
            for batch in range(2000)
            if [setattr(clock, "now_s", clock.now_s + step_s), times.is_due_after_batch(batch)][1]
        ]

    expected = run(True, 0.01)
    assert len(expected) == 6
    assert run(False, 0.03) == expected, "Its own clock runs three times as fast."


@pytest.mark.parametrize(
    ("save_freq", "interval_s"), [("30s", 30), ("0.5s", 0.5), ("5m", 300), ("1h", 3600)]
)
def test_times_have_a_unit(save_freq, interval_s):
    times = saving_times(save_freq, alone=True)
    assert isinstance(times, SavingSeconds)
    assert times.interval_s == interval_s


def test_batches_and_epochs_are_counted():
    for save_freq, counted in ((7, 7), ("epoch", "epoch"), ("7", 7)):
        times = saving_times(save_freq, alone=True)
        assert isinstance(times, SavingTimes)
        assert times.save_freq == counted


@pytest.mark.parametrize(
    "save_freq", ["", "0s", "s", "-1s", "30 s", "30d", "1e3s", "epochs", 0, 2.5]
)
def test_what_is_no_time_is_refused(save_freq):
    with pytest.raises(ValueError, match=r"(save_freq|How often to save) must be"):
        saving_times(save_freq, alone=True)
