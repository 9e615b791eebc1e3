"""Finds out whether the main thread waits for other processes, and in which call."""

import concurrent.futures
import os
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

import jax

from tnt_jax.distributed import stall

_OWN = str(Path(__file__).parents[1]) + os.sep
_JAX = str(Path(jax.__file__).parent) + os.sep
_THREADS = (threading.__file__, str(Path(concurrent.futures.__file__).parent))
# Files whose calls to compiled programs and to the coordination service wait for other processes.
_WAITING_FILES = {
    "trainer.py", "outputs.py", "execution.py", "step.py", "steps.py", "batch_sum.py",
    "collectives.py", "runtime.py", "joining.py", "reducer.py", "ring.py", "connection.py",
    "rendezvous.py", "host_exchange.py", "tuning.py",
}  # fmt: skip


def describe_wait() -> str | None:
    """Returns the call in which the main thread waits for other processes, or None.

    An example is `fit (train.py, line 7)`. The main thread waits where it says so
    (`stall.waiting`), where it takes data for which a thread waits, and where a program of tnt_jax
    runs or its result is read: below a file of tnt_jax there is nothing but JAX.
    """
    main = threading.main_thread().ident or 0
    frame = sys._current_frames().get(main)
    if frame is None:
        return None
    waits = (
        main in stall.here().waits
        or (bool(stall.here().waits) and _takes_data(frame))
        or _is_wait(frame)
    )
    return _describe(frame) if waits else None


def _takes_data(frame: FrameType) -> bool:
    files = [item.f_code.co_filename for item, _ in traceback.walk_stack(frame)]
    innermost = next((file for file in files if file.startswith(_OWN)), "")
    return os.path.basename(innermost) == "feed.py"


def _is_wait(frame: FrameType) -> bool:
    innermost: FrameType | None = frame
    is_in_jax = False
    while innermost is not None and (file := innermost.f_code.co_filename).startswith(
        (_JAX, *_THREADS)
    ):
        is_in_jax = is_in_jax or file.startswith(_JAX)
        innermost = innermost.f_back
    if innermost is None or not (file := innermost.f_code.co_filename).startswith(_OWN):
        return False
    return is_in_jax or os.path.basename(file) in _WAITING_FILES


def _describe(frame: FrameType) -> str:
    """Returns the outermost call of tnt_jax and its position in the user's code."""
    calls = list(traceback.walk_stack(frame))
    index = max(
        index for index, (item, _) in enumerate(calls) if item.f_code.co_filename.startswith(_OWN)
    )
    # The decorator of public calls stands around the call itself.
    is_decorator = index > 0 and calls[index][0].f_code.co_filename == stall.__file__
    name = calls[index - is_decorator][0].f_code.co_name
    if index + 1 == len(calls):
        return name
    caller, line = calls[index + 1]
    return f"{name} ({os.path.basename(caller.f_code.co_filename)}, line {line})"
