"""The time of each phase, by samples, without the time in which the process waits for others."""

import random
import threading
import time

import pytest

from tnt_jax.distributed.liveness.phases import Here
from tnt_jax.distributed.liveness.watch import OwnTimes


def test_time_counts_under_the_phase_of_the_sample_unless_the_process_waits():
    here = Here()
    times = OwnTimes(here, 60.0, lambda: False)
    here.doing = ("data", "")
    times.sample(2.0)
    here.doing = ("callback", "Act.on_epoch_end")
    times.sample(3.0)
    here.waits[1] = "sum of gradients"
    times.sample(50.0)
    assert times.seconds == {"data": 2.0, "callback": 3.0}


def test_a_thread_that_reads_ahead_waits_for_itself_until_its_data_is_needed():
    here = Here()
    times = OwnTimes(here, 60.0, lambda: False)
    here.readers.add(7)
    here.waits[7] = "data of process 1"
    here.doing = ("callback", "")
    times.sample(1.0)
    here.doing = ("data", "")
    times.sample(10.0)
    assert times.seconds == {"callback": 1.0, "data": 0.0}


def test_the_thread_counts_all_time_that_passes():
    here, stopped, passed = Here(), threading.Event(), []
    here.doing = ("step", "")
    times = OwnTimes(here, 1.0, lambda: False)
    thread = threading.Thread(target=times.run, args=(stopped, passed.append))
    start_s = time.monotonic()
    thread.start()
    while times.seconds.get("step", 0.0) < 0.1:
        assert time.monotonic() - start_s < 10
        stopped.wait(0.01)
    stopped.set()
    thread.join()
    assert times.seconds["step"] == pytest.approx(time.monotonic() - start_s, abs=0.2)
    assert times.seconds["step"] <= time.monotonic() - start_s
    assert sum(passed) == pytest.approx(times.seconds["step"])


def test_the_random_numbers_of_the_user_are_left_alone():
    random.seed(3)
    expected = random.getstate()
    stopped = threading.Event()
    times = OwnTimes(Here(), 0.2, lambda: False)
    thread = threading.Thread(target=times.run, args=(stopped, lambda passed_s: None))
    thread.start()
    time.sleep(0.05)
    stopped.set()
    thread.join()
    assert random.getstate() == expected
