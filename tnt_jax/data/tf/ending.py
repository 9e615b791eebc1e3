"""Ends passes over `tf.data` pipelines without waiting for TensorFlow."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from sys import is_finalizing
from typing import Any

from tnt_jax.job import Slot

# The interpreter waits for its thread, and afterwards the executor refuses work: a thread that is
# started then would never run.
_endings = Slot(
    lambda: ThreadPoolExecutor(1, thread_name_prefix="tnt_jax-tf-data-end"),
    close=ThreadPoolExecutor.shutdown,
)


def elements_of(stream: Any) -> Iterator[Any]:
    """Yields the elements of a `tf.data.Dataset` as NumPy arrays.

    An iterator whose pipeline has stages with `AUTOTUNE` waits at its end for the tuner, for up to
    seconds on a busy machine. It ends in a thread, beside whatever comes next.
    """
    held = [stream.as_numpy_iterator()]
    try:
        yield from held[0]
    finally:
        _end(held)


def _end(held: list[Any]) -> None:
    if not is_finalizing():
        with suppress(RuntimeError):  # The interpreter is about to end.
            _endings.get().submit(held.clear)
            return
    held.clear()
