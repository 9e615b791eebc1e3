"""A process's line to the launcher: when waiting for others ends, and when a step comes first."""

import json
import socket
import threading
import time

import pytest

from tnt_jax.distributed import elastic
from tnt_jax.distributed.elastic import Interrupted, Link


class Launcher:
    """The other end of a line."""

    def __init__(self):
        self._socket, other = socket.socketpair()
        self.link = Link(other.detach(), rank=0, planned=2, joins=False)

    def interrupt(self, why, *, at_once, number=0):
        message = {"kind": "interrupt", "number": number, "why": why, "at_once": at_once}
        self._socket.sendall(json.dumps(message).encode() + b"\n")

    def close(self):
        self._socket.shutdown(socket.SHUT_WR)
        for thread in threading.enumerate():
            if thread.name == "tnt_jax-link":
                thread.join()
        self._socket.close()


@pytest.fixture
def launcher(monkeypatch):
    made = Launcher()
    monkeypatch.setattr(elastic, "link", lambda: made.link)
    yield made
    made.close()


def wait_for(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_process_that_joins_ends_no_waiting_but_the_next_step(launcher):
    cut = []
    launcher.link.when_ended(lambda: cut.append(1))
    launcher.interrupt("process 1 joins", at_once=False)
    wait_for(lambda: launcher.link.ends_after_step)
    elastic.raise_if_ended()
    assert elastic.unless_ended(lambda: 5) == 5
    with pytest.raises(Interrupted, match="process 1 joins"):
        elastic.raise_after_step()
    assert not cut


def test_a_loss_ends_what_waits_at_once(launcher):
    cut = []
    launcher.link.when_ended(lambda: cut.append(1))
    launcher.interrupt("process 1 joins", at_once=False)
    launcher.interrupt("process 1 was killed", at_once=True)
    wait_for(lambda: cut)
    with pytest.raises(Interrupted, match="process 1 was killed"):
        elastic.raise_if_ended()
    with pytest.raises(Interrupted, match="process 1 was killed"):
        elastic.raise_after_step()
    launcher.link.when_ended(lambda: cut.append(2))
    assert cut == [1, 2]


def test_a_step_after_which_nobody_joins_any_more_is_not_the_last(launcher):
    launcher.interrupt("process 1 joins", at_once=False)
    wait_for(lambda: launcher.link.ends_after_step)
    launcher.interrupt("", at_once=False)
    wait_for(lambda: not launcher.link.ends_after_step)
    elastic.raise_after_step()
    launcher.interrupt("process 1 was killed", at_once=True, number=5)
    launcher.interrupt("process 1 joins", at_once=False)
    wait_for(lambda: launcher.link.ends_after_step)
    assert not launcher.link.ended  # What was lost is of another generation.
