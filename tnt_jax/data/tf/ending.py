"""Ends passes over `tf.data` pipelines without waiting for TensorFlow."""

import threading
from collections.abc import Iterator
from typing import Any


def elements_of(stream: Any) -> Iterator[Any]:
    """Yields the elements of a `tf.data.Dataset` as NumPy arrays.

    An iterator whose pipeline has stages with `AUTOTUNE` waits at its end for the tuner, for up to
    seconds on a busy machine. It ends in a thread of its own, beside whatever comes next.
    """
    held = [stream.as_numpy_iterator()]
    try:
        yield from held[0]
    finally:
        try:
            threading.Thread(target=held.clear, name="tnt_jax-tf-data-end").start()
        except RuntimeError:
            held.clear()  # The interpreter ends, and starts no more threads.
