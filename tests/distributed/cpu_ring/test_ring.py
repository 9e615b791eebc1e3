import contextlib
import re
import socket
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from rings import make_rings

from tnt_jax.distributed.cpu_ring import ring as ring_module
from tnt_jax.distributed.cpu_ring.connection import Endpoint, connect_neighbours, open_endpoint
from tnt_jax.distributed.cpu_ring.ring import Tag


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_ring_sums_arrays_of_any_shape_in_order(size):
    rings = make_rings(size)
    rng = np.random.default_rng(0)
    starts = [[(1000,)], [(3, 5), (), (0,)], [(1,)], [(0,)], [(2, 70_001), (400_000,)]]
    arrays = [
        [[rng.normal(size=shape).astype(np.float32) for shape in shapes] for shapes in starts]
        for _ in rings
    ]
    tickets = [
        [ring.start(start) for start in own] for ring, own in zip(rings, arrays, strict=True)
    ]
    totals = [
        [ring.wait(ticket) for ticket in own] for ring, own in zip(rings, tickets, strict=True)
    ]
    for index, shapes in enumerate(starts):
        for position, shape in enumerate(shapes):
            expected = sum(own[index][position].astype(np.float64) for own in arrays)
            for own in totals:
                total = own[index][position]
                assert total.shape == shape
                np.testing.assert_allclose(total, expected, rtol=1e-5, atol=1e-6)
                np.testing.assert_array_equal(total, totals[0][index][position])
    for ring in rings:
        ring.close()


def test_arrays_may_be_changed_once_they_were_started():
    rings = make_rings(2)
    arrays = [np.ones(100_000), np.ones(100_000)]
    tickets = [ring.start([array]) for ring, array in zip(rings, arrays, strict=True)]
    for array in arrays:
        array[:] = np.nan
    assert np.all(rings[0].wait(tickets[0])[0] == 2)
    for ring in rings:
        ring.close()


def test_infinite_values_are_summed_without_a_warning(monkeypatch):
    # The threads of a ring warn on the screen: here a warning is an error of the ring.
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rings = make_rings(2)
        values = ([np.inf, np.inf, 3e38, 1], [np.inf, -np.inf, 3e38, 2])
        tickets = [
            ring.start([np.array(own, np.float32)]) for ring, own in zip(rings, values, strict=True)
        ]
        for ring, ticket in zip(rings, tickets, strict=True):
            np.testing.assert_array_equal(ring.wait(ticket)[0], [np.inf, np.nan, np.inf, 3])
    for ring in rings:
        ring.close()


def test_a_closed_ring_refuses_sums_and_those_that_others_never_start_fail(monkeypatch):
    monkeypatch.setattr(ring_module, "_DRAIN_S", 0.2)
    rings = make_rings(2)
    waiting = rings[0].start([np.ones(3)])
    rings[0].close()
    with pytest.raises(ConnectionError, match="closed while sums were on their way"):
        rings[0].wait(waiting)
    with pytest.raises(ConnectionError, match="closed while"):
        rings[0].wait(rings[0].start([np.ones(3)]))
    rings[1].close()
    rings = make_rings(2)
    for ring in rings:
        ring.close()
        with pytest.raises(ConnectionError):
            ring.wait(ring.start([np.ones(3)]))


def test_a_lost_neighbour_is_an_error_of_the_sum():
    first, second = make_rings(2)
    second.close()
    with pytest.raises(ConnectionError, match="Process 0 lost a neighbour in the ring of 2"):
        first.wait(first.start([np.ones(10)]))
    first.close()


def errors_of(rings, tickets):
    """Returns what each process is told of a ring that fails."""
    messages = []
    for ring, ticket in zip(rings, tickets, strict=True):
        with pytest.raises(ConnectionError, match=f"the ring of {len(rings)}") as caught:
            ring.wait(ticket)
        messages.append(str(caught.value))
    for ring in rings:
        ring.close()
    return messages


def test_sums_that_differ_between_processes_are_refused_on_all():
    rings = make_rings(2)
    messages = errors_of(
        rings, [ring.start([np.ones(size)]) for ring, size in zip(rings, (10, 14), strict=True)]
    )
    assert any("every process must start the same arrays" in message for message in messages)


BATCH = Tag(step=1)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize(
    ("first", "other"),
    [
        (Tag(1, 4), Tag(2, 1)),
        (Tag(1, 4), Tag(1, 3, 1)),
        (Tag(1, 4, 1), Tag(1, 3, 1)),
        (Tag(1, 4), BATCH),
    ],
    ids=["epochs", "end", "ends", "single batch"],
)
@pytest.mark.parametrize("nbytes", [8, 4_000_000])
def test_processes_at_different_places_are_told_who_was_where(size, first, other, nbytes):
    rings = make_rings(size)
    start = time.monotonic()
    tickets = [
        ring.start([np.ones(nbytes, np.int8)], tag=other if process == 1 else first)
        for process, ring in enumerate(rings)
    ]
    messages = errors_of(rings, tickets)
    assert time.monotonic() - start < 5
    for message in messages:
        assert f"process 1 {other}" in message
        assert re.search(rf"process [023] {re.escape(str(first))}", message)
        assert (other is BATCH) == ("at batch 1 of its own loop or of train_on_batch" in message)
        assert "every process must make the same calls, with equally many batches" in message
    if size == 2:
        assert len({message.split(": ", 1)[1] for message in messages}) == 1


def test_a_missing_process_is_named():
    listener, endpoint = open_endpoint("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        free = closed.getsockname()[1]
    with pytest.raises(TimeoutError, match=rf"No process answers at 127.0.0.1:{free}"):
        connect_neighbours(
            0, [endpoint, Endpoint("127.0.0.1", free, "")], listener=listener, timeout_s=0.2
        )


def test_the_port_is_open_at_one_address_only():
    listener, endpoint = open_endpoint("127.0.0.1")
    with listener, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", endpoint.port), timeout=5)
    with pytest.raises(
        OSError, match=r"Cannot listen at 192\.0\.2\.1, the address of this machine's own name"
    ):
        open_endpoint("192.0.2.1")


def test_peers_without_the_token_neither_come_in_nor_keep_anybody_out():
    listener, endpoint = open_endpoint("127.0.0.1")
    start = time.monotonic()
    peers = [socket.create_connection(endpoint[:2], timeout=5) for _ in range(300)]
    for peer in peers[200:]:
        peer.sendall(bytes.fromhex(endpoint.token) * 2)
    for peer in peers[100:200]:
        peer.sendall(endpoint.greeting()[:31])
    with ThreadPoolExecutor(1) as pool:
        connected = pool.submit(connect_neighbours, 0, [endpoint], listener=listener, timeout_s=10)
        to_next, from_previous = connected.result()
    assert time.monotonic() - start < 5
    assert from_previous.getpeername() == to_next.getsockname()
    for peer in peers:
        peer.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert peer.recv(1) == b""
    for connection in (*peers, to_next, from_previous):
        connection.close()


def test_a_token_may_come_in_pieces_and_be_followed_by_more():
    listener, endpoint = open_endpoint("127.0.0.1")
    with ThreadPoolExecutor(1) as pool, socket.create_server(("127.0.0.1", 0)) as other:
        next_endpoint = Endpoint("127.0.0.1", other.getsockname()[1], endpoint.token)
        connected = pool.submit(
            connect_neighbours, 0, [endpoint, next_endpoint], listener=listener, timeout_s=10
        )
        neighbour = socket.create_connection(endpoint[:2], timeout=5)
        token = endpoint.greeting()
        for piece in (token[:1], token[1:9], token[9:] + b"sum"):
            neighbour.sendall(piece)
            time.sleep(0.05)
        to_next, from_previous = connected.result()
    assert from_previous.recv(10) == b"sum"
    for connection in (neighbour, to_next, from_previous):
        connection.close()


def test_a_process_that_never_comes_is_named_and_other_peers_are_counted():
    listener, endpoint = open_endpoint("127.0.0.1")
    peer = socket.create_connection(endpoint[:2], timeout=5)
    with (
        peer,
        socket.create_server(("127.0.0.1", 0)) as other,
        pytest.raises(
            TimeoutError,
            match=r"Process 0 waited 0.3 s for process 1 .* 1 connection\(s\) came from elsewhere",
        ),
    ):
        connect_neighbours(
            0,
            [endpoint, Endpoint("127.0.0.1", other.getsockname()[1], "")],
            listener=listener,
            timeout_s=0.3,
        )
