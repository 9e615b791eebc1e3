"""Threads that look after the job beside the one that trains.

Nobody joins them while the job runs, so one that ends by an error says what no longer works.
"""

import threading
from collections.abc import Callable
from typing import Any

from tnt_jax.log import logger


def start_thread(run: Callable[..., Any], *args: Any, name: str, lost: str) -> threading.Thread:
    """Starts a thread for which the interpreter does not wait, and returns it.

    Args:
        run: What it runs.
        *args: Arguments of `run`.
        name: Its name, to which the package's is added.
        lost: Sentence on what nobody does any more if it ends by an error, which is logged.
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
    """Logs, on any process, the error that is being handled and what no longer works.

    Args:
        lost: What no longer works, in a sentence.
    """
    logger.error("%s", lost, exc_info=True, extra={"on_every_process": True})
