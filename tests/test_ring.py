import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from ring import Ring


def make_rings(size):
    """Returns connected rings, one for each of `size` processes, all in this one."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(size)]
    addresses = [listener.getsockname()[:2] for listener in listeners]
    with ThreadPoolExecutor(size) as pool:
        rings = list(pool.map(lambda i: Ring.connect(i, addresses, listener=listeners[i], timeout_s=10), range(size)))
    for listener in listeners:
        listener.close()
    return rings


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_ring_sums_arrays_of_any_shape_in_order(size):
    rings = make_rings(size)
    rng = np.random.default_rng(0)
    shapes = [(1000,), (3, 5), (), (1,), (0,), (2, 70_001)]
    arrays = [[rng.normal(size=shape).astype(np.float32) for shape in shapes] for _ in rings]
    tickets = [[ring.start(array) for array in own] for ring, own in zip(rings, arrays, strict=True)]
    totals = [[ring.wait(ticket) for ticket in own] for ring, own in zip(rings, tickets, strict=True)]
    for index, shape in enumerate(shapes):
        expected = sum(own[index].astype(np.float64) for own in arrays)
        for own in totals:
            assert own[index].shape == shape
            np.testing.assert_allclose(own[index], expected, rtol=1e-5, atol=1e-6)
            np.testing.assert_array_equal(own[index], totals[0][index])
    for ring in rings:
        ring.close()


def test_an_array_may_be_changed_once_it_was_started():
    rings = make_rings(2)
    arrays = [np.ones(100_000), np.ones(100_000)]
    tickets = [ring.start(array) for ring, array in zip(rings, arrays, strict=True)]
    for array in arrays:
        array[:] = np.nan
    assert np.all(rings[0].wait(tickets[0]) == 2)
    for ring in rings:
        ring.close()


def test_a_lost_neighbour_is_an_error_of_the_sum():
    first, second = make_rings(2)
    second.close()
    with pytest.raises(ConnectionError, match="Process 0 lost a neighbour in the ring of 2"):
        first.wait(first.start(np.ones(10)))
    first.close()


def test_a_missing_process_is_named():
    listener = socket.create_server(("127.0.0.1", 0))
    with socket.create_server(("127.0.0.1", 0)) as closed:
        free = closed.getsockname()[:2]
    with pytest.raises(TimeoutError, match=rf"No process answers at 127.0.0.1:{free[1]}"):
        Ring.connect(0, [listener.getsockname()[:2], free], listener=listener, timeout_s=0.2)
    listener.close()
