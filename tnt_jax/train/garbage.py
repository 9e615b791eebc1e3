"""Leaves garbage in cycles for later while models are traced.

Tracing makes many objects that stay, and Python's collector looks through them again and again.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collected_later() -> Iterator[None]:
    """Keeps the collector of garbage in cycles off within the block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
