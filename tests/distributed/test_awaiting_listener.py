"""A process joins as soon as the coordinator listens, and is not held up by one that never does."""

import socket
import threading

import pytest

from tnt_jax.distributed.joining.join import await_listener


@pytest.fixture
def unheard():
    """Returns a socket whose port refuses connections, as it is bound and does not listen."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


def started(address, **options):
    thread = threading.Thread(target=await_listener, args=(address,), kwargs=options, daemon=True)
    thread.start()
    return thread


def test_it_waits_until_somebody_listens(unheard):
    waiting = started("127.0.0.1:{1}".format(*unheard.getsockname()), most_s=60)
    waiting.join(0.2)
    assert waiting.is_alive()
    unheard.listen()
    waiting.join(20)
    assert not waiting.is_alive()


def test_it_does_not_wait_for_ever(unheard):
    waiting = started("127.0.0.1:{1}".format(*unheard.getsockname()), most_s=0.1)
    waiting.join(20)
    assert not waiting.is_alive()


@pytest.mark.parametrize("address", ["nobody.invalid:1", "127.0.0.1", "127.0.0.1:-1", "[::1]"])
def test_what_is_wrong_with_an_address_is_left_to_jax(address):
    waiting = started(address, most_s=60)
    waiting.join(20)
    assert not waiting.is_alive()
