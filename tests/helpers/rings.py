"""Rings of several simulated processes, all in this one."""

from concurrent.futures import ThreadPoolExecutor

from tnt_jax.distributed.cpu_ring.connection import connect_neighbours, open_endpoint
from tnt_jax.distributed.cpu_ring.ring import Ring


def make_rings(size):
    """Returns connected rings, one for each of `size` processes, all in this one."""
    listeners, endpoints = zip(*(open_endpoint("127.0.0.1") for _ in range(size)), strict=True)

    def connect(process):
        return Ring(
            process,
            size,
            *connect_neighbours(process, endpoints, listener=listeners[process], timeout_s=10),
        )

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(connect, range(size)))
