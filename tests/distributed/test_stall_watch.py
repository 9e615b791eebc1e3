"""The threads that look after a job go on after an error or say what no longer works."""

import asyncio
import json
import threading

import jax
import numpy as np
import pytest

from tnt_jax.distributed.liveness import threads
from tnt_jax.distributed.liveness import watch as stall_watch
from tnt_jax.distributed.liveness.phases import busy
from tnt_jax.distributed.liveness.threads import start_thread, watcher
from tnt_jax.distributed.liveness.watch import Patience


class Service:
    """Stands in for the coordination service, and lets a test wait for a number of posts."""

    def __init__(self):
        self.posts = []
        self.changed = threading.Condition()

    def key_value_set(self, key, value, allow_overwrite=False):
        with self.changed:
            self.posts.append((key, value))
            self.changed.notify_all()

    def key_value_dir_get(self, key):
        return []

    def wait_for(self, is_there):
        with self.changed:
            assert self.changed.wait_for(is_there, timeout=20)


@pytest.fixture
def service(monkeypatch):
    made_up = Service()
    monkeypatch.setattr(stall_watch._jax, "coordination_client", lambda: made_up)
    return made_up


def watch():
    return stall_watch._Watch(Patience(0.1, 0), lambda cause, answers: None, lambda: False)


def test_a_look_that_fails_is_told_once_and_the_process_posts_on(monkeypatch, service, caplog):
    failures = [KeyError("odd frame"), OSError("again")]

    def compiles():
        if failures:
            raise failures.pop(0)
        return False

    monkeypatch.setattr(stall_watch, "compiles", compiles)
    own = watch()
    service.wait_for(lambda: len(service.posts) >= 3)
    own.stop()
    assert [json.loads(text)["posts"] for _, text in service.posts[:3]] == [1, 2, 3]
    (record,) = caplog.records
    assert "Process 0 failed to say where it is" in record.message
    assert "odd frame" in record.exc_text
    assert record.on_every_process


def test_a_judgement_that_fails_keeps_no_note_from_the_others(monkeypatch, service, caplog):
    monkeypatch.setattr(stall_watch, "find_cause", lambda *args: 1 / 0)
    own = stall_watch._Watch(Patience(0.1, 60), lambda cause, answers: None, lambda: False)
    service.wait_for(lambda: len(service.posts) >= 3)
    own.stop()
    assert "division by zero" in caplog.text


def test_a_service_that_does_not_answer_ends_the_process(monkeypatch, service):
    may_answer, ended = threading.Event(), threading.Event()
    monkeypatch.setattr(service, "key_value_set", lambda *_, **__: may_answer.wait(20))
    causes_found = []

    def end_job(cause, service_answers):
        causes_found.append((cause.process, cause.is_lost, service_answers))
        ended.set()

    own = stall_watch._Watch(Patience(0.1, 0.5), end_job, lambda: False)
    assert ended.wait(20)
    may_answer.set()
    own.stop()
    assert causes_found[0] == (0, True, False)


def test_time_in_which_the_process_was_stopped_hardly_counts(service):
    own = watch()
    own._count(1000.0)
    own.stop()
    assert 2 <= own._now_s < 20


def test_the_looks_end_with_the_service(monkeypatch, service, caplog):
    def gone(key):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE")

    monkeypatch.setattr(service, "key_value_dir_get", gone)
    own = watch()
    own._watching.result(20)
    assert len(service.posts) == 1
    own.stop()
    assert caplog.records == []


def test_a_thread_that_ends_by_an_error_says_what_is_lost(caplog):
    start_thread(divmod, 1, 0, name="division", lost="Nobody divides any more:").join(20)
    assert "Nobody divides any more:" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    (record,) = caplog.records
    assert record.on_every_process
    assert record.threadName == "tnt_jax-division"


def test_a_duty_that_ends_by_an_error_says_what_is_lost_and_leaves_the_others(caplog):
    gone_on = threading.Event()

    async def fail():
        raise KeyError("odd")

    async def go_on():
        await asyncio.sleep(0.01)
        gone_on.set()

    failing = watcher.get().begin(fail(), lost="Nobody asks any more:")
    watcher.get().begin(go_on(), lost="Nobody goes on any more:")
    assert gone_on.wait(20)
    assert failing.result(20) is None
    (record,) = caplog.records
    assert (record.message, record.on_every_process) == ("Nobody asks any more:", True)
    assert "odd" in record.exc_text


def test_a_duty_that_has_ended_is_in_no_call():
    calls, may_return = [], threading.Event()

    async def ask():
        while True:
            calls.append("begins")
            may_return.wait(20)
            calls.append("ends")
            await asyncio.sleep(0)

    duty = watcher.get().begin(ask(), lost="Nobody asks any more:")
    while not calls:
        pass
    threading.Timer(0.2, may_return.set).start()
    watcher.get().end(duty)
    assert calls[-1] == "ends"
    ended = len(calls)
    watcher.get().end(watcher.get().begin(asyncio.sleep(0), lost=""))
    assert len(calls) == ended


def test_a_service_that_does_not_answer_delays_the_end_of_a_duty_by_seconds(
    monkeypatch,
):
    monkeypatch.setattr(threads, "LONGEST_CALL_S", 0.1)
    is_asking, may_return = threading.Event(), threading.Event()

    async def ask():
        is_asking.set()
        may_return.wait(20)

    duty = watcher.get().begin(ask(), lost="Nobody asks any more:")
    assert is_asking.wait(20)
    watcher.get().end(duty)
    assert not may_return.is_set()
    may_return.set()


def test_a_limit_may_be_a_number_of_numpy(service):
    with busy("the export", limit_s=np.int64(60)):
        own = watch()
        service.wait_for(lambda: service.posts)
        own.stop()
    note = json.loads(service.posts[0][1])["note"]
    assert (note["what"], note["limit_s"]) == ("the export", 60)
