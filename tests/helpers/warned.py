"""Keeps the warnings of a job."""

import logging
from contextlib import contextmanager


class _Kept(logging.Handler):
    def __init__(self):
        super().__init__("WARNING")
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


@contextmanager
def kept_warnings():
    """Yields the list of tnt_jax's warnings, to which later ones are added."""
    handler = _Kept()
    logging.getLogger("tnt_jax").addHandler(handler)
    try:
        yield handler.texts
    finally:
        logging.getLogger("tnt_jax").removeHandler(handler)
