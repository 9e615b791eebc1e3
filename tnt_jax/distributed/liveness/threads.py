"""Threads that look after the job beside the one that trains.

Nobody joins them while the job runs, so one that ends by an error says what no longer works.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import jax

from tnt_jax.distributed.elastic import Interrupted
from tnt_jax.job import Slot
from tnt_jax.log import logger

LONGEST_CALL_S = 2.0
"""The time limit for calls to the coordination service that do not wait."""


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


class Watcher:
    """The thread that asks the coordination service on behalf of all that look after the job.

    Each duty is a coroutine, which sleeps between its questions. These block the others: the
    service answers at once, or none of them.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        lost = "This process does not notice any more what happens to the others:"
        self._thread = start_thread(self._run, name="watch", lost=lost)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def begin(self, duty: Coroutine[Any, Any, None], *, lost: str) -> Future[None]:
        """Begins a duty; if it ends by an error, that is logged as by `start_thread`."""
        return asyncio.run_coroutine_threadsafe(_carry_out(duty, lost), self._loop)

    def end(self, duty: Future[None]) -> None:
        """Ends a duty; it is in no call to the service then, unless that does not answer."""
        duty.cancel()
        with contextlib.suppress(TimeoutError):
            # Comes after what was begun or cancelled before.
            asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(LONGEST_CALL_S)

    def close(self) -> None:
        """Ends the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LONGEST_CALL_S)


async def _carry_out(duty: Coroutine[Any, Any, None], lost: str) -> None:
    try:
        await duty
    except (jax.errors.JaxRuntimeError, Interrupted) as error:
        # The service has gone, and the job, or a generation of an elastic one, with it.
        logger.debug("%s %s", lost, error)
    except Exception:
        say_lost(lost)


watcher = Slot(Watcher, close=Watcher.close)
