"""How a process learns that all are to stop, without a job: the service is made up."""

import threading

import jax
import pytest

from tnt_jax.distributed import stopping
from tnt_jax.distributed.liveness import table
from tnt_jax.distributed.stopping import Agreement


class Service:
    """Holds keys; a question for one that is not there is an error, as is any other at first."""

    def __init__(self):
        self.values, self.errors, self.questions = {}, ["UNAVAILABLE: connection reset"], []
        self.changed = threading.Condition()

    def key_value_try_get(self, key):
        with self.changed:
            self.questions.append(key)
            self.changed.notify_all()
            if self.errors or key not in self.values:
                raise jax.errors.JaxRuntimeError(self.errors.pop() if self.errors else "NOT_FOUND")
            return self.values[key]

    def key_value_set(self, key, value):
        with self.changed:
            self.values[key] = value
            self.changed.notify_all()

    def wait_for(self, is_there):
        with self.changed:
            assert self.changed.wait_for(is_there, timeout=20)


@pytest.fixture
def service(monkeypatch):
    made_up = Service()
    monkeypatch.setattr(stopping._jax, "coordination_client", lambda: made_up)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    return made_up


def agree(answer):
    return Agreement("stop", answer, what="the end", lost="Nobody answers any more:")


def test_a_request_is_answered_though_the_service_did_not_answer_at_first(service):
    agreement = agree(lambda agreement, text: int(text) + 1)
    service.wait_for(lambda: len(service.questions) == 2)
    assert "stop/0" not in service.values
    service.key_value_set("stop/request", "4")
    service.key_value_set("stop/1", "7")
    service.wait_for(lambda: "stop/0" in service.values)
    assert service.values["stop/0"] == "5"
    agreement._agreeing.result(20)
    assert (agreement.end, agreement.answers) == (7, [5, 7])


def test_an_answer_waits_until_the_point_is_known(service):
    agreement = agree(lambda agreement, text: agreement.passed if agreement.passed else None)
    service.key_value_set("stop/request", "")
    service.wait_for(lambda: "stop/request" in service.questions)
    assert "stop/0" not in service.values
    assert not agreement.stops_here()
    service.wait_for(lambda: "stop/0" in service.values)
    assert service.values["stop/0"] == "1"
    agreement.leave(None)
    assert service.values["stop/0"] == "1"


def test_a_process_that_leaves_by_an_error_says_so_and_answers_no_more(service):
    agreement = agree(lambda agreement, text: 1)
    agreement.leave(None)
    asked = len(service.questions)
    service.key_value_set("stop/request", "")
    assert agreement._agreeing.cancelled()
    assert (service.values["stop/0"], len(service.questions)) == ("left", asked)


def test_a_service_that_has_ended_holds_nothing(service):
    service.errors = ["UNAVAILABLE", "NOT_FOUND"]
    assert [table.peek(service, "k"), table.peek(service, "k")] == [None, None]
    service.key_value_set("k", "value")
    assert table.peek(service, "k") == "value"
