"""How a process asks for what another one posts, without a job: the service and the time are made up."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import jax
import pytest

from tnt_jax.distributed.liveness import phases, rendezvous


class Time:
    """Time that passes in waits alone, and what each question costs."""

    def __init__(self):
        self.now_s, self.pauses = 0.0, []

    def monotonic(self):
        return self.now_s

    def is_set(self):
        return False

    def wait(self, seconds):
        self.pauses.append(seconds)
        self.now_s += seconds


class Service:
    """Has a key from a certain time on. It offers no question that waits, which leaks memory."""

    def __init__(self, time, comes_at):
        self._time, self._comes_at = time, comes_at
        self.error = "NOT_FOUND: Config key not found."

    def key_value_try_get(self, key):
        if self._time.now_s < self._comes_at:
            raise jax.errors.JaxRuntimeError(self.error)
        return f"value of {key}"


@pytest.fixture
def time(monkeypatch):
    made_up = Time()
    monkeypatch.setattr(rendezvous, "time", made_up)
    monkeypatch.setattr(rendezvous, "_is_ending", made_up)
    return made_up


def serve(monkeypatch, time, comes_at):
    service = Service(time, comes_at)
    monkeypatch.setattr(rendezvous._jax, "coordination_client", lambda: service)
    return service


@pytest.mark.parametrize("comes_at", [0, 0.0001, 0.01, 1, 30])
def test_an_answer_is_seen_soon_after_it_comes(monkeypatch, time, comes_at):
    serve(monkeypatch, time, comes_at)
    assert rendezvous.read_key("k", "test") == "value of k"
    assert time.now_s - comes_at <= max(0.0005, min(comes_at / 8, 0.25))
    assert len(time.pauses) < 60 + 4 * comes_at


def test_large_jobs_ask_seldom(monkeypatch, time):
    serve(monkeypatch, time, 60)
    monkeypatch.setattr(jax, "process_count", lambda: 1000)
    assert rendezvous.read_key("k", "test") == "value of k"
    assert len(time.pauses) < 60
    assert max(time.pauses) == 5


def test_checks_run_each_second_and_end_the_wait(monkeypatch, time):
    serve(monkeypatch, time, 60)
    seen = []

    def check():
        seen.append(time.now_s)
        if len(seen) == 3:
            raise OSError("nobody comes")

    with pytest.raises(OSError, match="nobody comes"):
        rendezvous.read_key("k", "test", check=check)
    assert seen == pytest.approx([1, 2, 3], abs=0.75)
    assert phases.here().note().waits == ""


def test_who_is_forsaken_says_so(monkeypatch, time):
    serve(monkeypatch, time, 60)
    monkeypatch.setattr(phases.here(), "left_alone", "Process 1 has gone.")
    with pytest.raises(
        RuntimeError, match=r"Process 1 has gone\. Every process must make the same"
    ):
        rendezvous.read_key("k", "test")


def test_a_wait_that_is_over_asks_no_more(monkeypatch, time):
    serve(monkeypatch, time, 60)
    assert rendezvous.read_key("k", "test", is_over=lambda: time.now_s > 2) is None
    assert 2 < time.now_s <= 2.25


def test_another_error_of_the_service_is_raised(monkeypatch, time):
    serve(monkeypatch, time, 60).error = "UNAVAILABLE: connection reset"
    with pytest.raises(jax.errors.JaxRuntimeError, match="connection reset"):
        rendezvous.read_key("k", "test")


class Notes:
    """A service that keeps what threads, each of them as a process, post to it."""

    def __init__(self):
        self._notes = {}

    def key_value_set(self, key, value):
        self._notes[key] = value

    def key_value_delete(self, key):
        self._notes.pop(key, None)

    def key_value_dir_get(self, folder):
        return [(k, v) for k, v in dict(self._notes).items() if k.startswith(folder)]

    def key_value_try_get(self, key):
        if key not in self._notes:
            raise jax.errors.JaxRuntimeError("NOT_FOUND: Config key not found.")
        return self._notes[key]


def test_all_name_who_is_missing_and_what_the_others_have_called(monkeypatch):
    own, service = threading.local(), Notes()
    monkeypatch.setattr(rendezvous._jax, "coordination_client", lambda: service)
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(jax, "process_index", lambda: own.process)
    monkeypatch.setattr(rendezvous._numbers, "get", lambda: own.meetings)

    def error(process, call, timeout_s=None):
        own.process, own.meetings = process, Counter()
        with pytest.raises(RuntimeError) as raised:
            rendezvous.meet(call, timeout_s=timeout_s)
        return str(raised.value)

    with ThreadPoolExecutor() as pool:
        first = pool.submit(error, 0, "barrier", 0.4)
        second = pool.submit(error, 1, "all_reduce")
        texts = {"0 waited 0.4 s in barrier": first.result(), "1 waited": second.result()}
    for waited, text in texts.items():
        assert text.startswith(f"Process {waited}")
        assert "for process(es) 2 of 3. Every process must call it" in text
        assert "process(es) 0: barrier; process(es) 1: all_reduce" in text
    late = error(2, "barrier")
    assert "Process 2 came to barrier when the others had given up waiting for it" in late
