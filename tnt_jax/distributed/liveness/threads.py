"""Threads that look after the job beside the one that trains.

Nobody joins them while the job runs, so one that ends by an error says what no longer works.
"""

import threading
from collections.abc import Callable
from typing import Any

from tnt_jax.log import logger


def start_thread(run: Callable[..., Any], *args: Any, name: str, lost: str) -> threading.Thread:
    """Starts a thread for which the interpreter does not wait, and returns it.

    If it ends by an error, that is logged after `lost`, a sentence on what nobody does any more.
    """

    def run_and_tell() -> None:
        try:
            run(*args)
        except Exception:
            say_lost(lost)

    thread = threading.Thread(target=run_and_tell, name=f"tnt_jax-{name}", daemon=True)
    thread.start()
    return thread


def say_lost(lost: str) -> None:
    """Logs, on any process, the error that is being handled and what no longer works."""
    logger.error("%s", lost, exc_info=True, extra={"on_every_process": True})
