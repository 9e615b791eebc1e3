"""Threads that read data ahead.

Such a thread may wait for a file or for a user's generator without an end, so the interpreter does
not wait for it as for other threads. It must not be in the middle of JAX or TensorFlow either when
the interpreter ends: Python ends a thread that then wants to go on, which aborts the process.
"""

import atexit
import threading
import time
from collections.abc import Callable

# Longer than putting a batch on the devices takes.
_PATIENCE_S = 5.0

# For the life of the process: a thread may outlive its job.
_running: dict[threading.Thread, threading.Event] = {}


def start_reader(read: Callable[[], None], name: str, stopped: threading.Event) -> None:
    """Starts a thread for which the end of the interpreter waits for some seconds.

    Args:
        read: What it runs.
        name: Its name, to which the package's is added.
        stopped: Set at the end of the interpreter, when `read` should return.
    """

    def run() -> None:
        try:
            read()
        finally:
            _running.pop(thread, None)

    thread = threading.Thread(target=run, name=f"tnt_jax-{name}", daemon=True)
    _running[thread] = stopped
    thread.start()


@atexit.register
def _stop_readers() -> None:
    end = time.monotonic() + _PATIENCE_S
    readers = list(_running.items())
    for _, stopped in readers:
        stopped.set()
    for thread, _ in readers:
        thread.join(max(0.0, end - time.monotonic()))
