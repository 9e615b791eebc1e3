import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tnt_jax.ring import Ring
from tnt_jax.ring_connection import Door, connect_neighbours, open_door


def make_rings(size):
    """Returns connected rings, one for each of `size` processes, all in this one."""
    listeners, doors = zip(*(open_door("127.0.0.1") for _ in range(size)), strict=True)

    def connect(process):
        return Ring(process, size, *connect_neighbours(process, doors, listener=listeners[process], timeout_s=10))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(connect, range(size)))


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_ring_sums_arrays_of_any_shape_in_order(size):
    rings = make_rings(size)
    rng = np.random.default_rng(0)
    starts = [[(1000,)], [(3, 5), (), (0,)], [(1,)], [(0,)], [(2, 70_001), (400_000,)]]
    arrays = [[[rng.normal(size=shape).astype(np.float32) for shape in shapes] for shapes in starts] for _ in rings]
    tickets = [[ring.start(start) for start in own] for ring, own in zip(rings, arrays, strict=True)]
    totals = [[ring.wait(ticket) for ticket in own] for ring, own in zip(rings, tickets, strict=True)]
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


def test_a_lost_neighbour_is_an_error_of_the_sum():
    first, second = make_rings(2)
    second.close()
    with pytest.raises(ConnectionError, match="Process 0 lost a neighbour in the ring of 2"):
        first.wait(first.start([np.ones(10)]))
    first.close()


def test_sums_that_differ_between_processes_are_refused_on_all():
    first, second = make_rings(2)
    tickets = [first.start([np.ones(10)]), second.start([np.ones(14)])]
    messages = []
    for ring, ticket in zip((first, second), tickets, strict=True):
        with pytest.raises(ConnectionError, match="ring of 2") as caught:
            ring.wait(ticket)
        messages.append(str(caught.value))
        ring.close()
    assert any("every process must start the same arrays" in message for message in messages)


def test_a_missing_process_is_named():
    listener, door = open_door("127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as closed:
        free = closed.getsockname()[1]
    with pytest.raises(TimeoutError, match=rf"No process answers at 127.0.0.1:{free}"):
        connect_neighbours(0, [door, Door("127.0.0.1", free, "")], listener=listener, timeout_s=0.2)


def test_strangers_are_not_let_in():
    listener, door = open_door("127.0.0.1")
    with ThreadPoolExecutor(1) as pool:
        stranger = socket.create_connection(door[:2], timeout=5)
        stranger.sendall(bytes(16))
        connected = pool.submit(connect_neighbours, 0, [door], listener=listener, timeout_s=10)
        to_next, from_previous = connected.result()
    assert stranger.recv(1) == b""
    assert from_previous.getpeername() == to_next.getsockname()
    for connection in (stranger, to_next, from_previous):
        connection.close()
