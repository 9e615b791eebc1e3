"""What the threads of this process do at this moment, by their Python stacks."""

import os
import sys
import threading
import traceback
from pathlib import Path
from types import FrameType

from tnt_jax import _jax
from tnt_jax.distributed.stall import here

# Of a stack, the innermost calls; those of tnt_jax are left out where there are others.
_MOST_CALLS = 12
_OWN = (str(Path(__file__).parents[1]) + os.sep, threading.__file__)
_MOST_CHARACTERS = 3000


def compiles() -> bool:
    """Returns whether the main thread traces or compiles a program."""
    return _jax.compiles(frame for frame, _ in traceback.walk_stack(_frame_of_main()))


def reads_device() -> bool:
    """Returns whether the main thread is in JAX, which may wait for devices and other processes."""
    frame = _frame_of_main()
    return frame is not None and _jax.is_of_jax(frame)


def describe_stacks() -> str:
    """Returns the Python stack of the main thread, or of the threads that it waits for data of."""
    own, main = here(), threading.main_thread().ident or 0
    reads = own.doing[0] in ("", "data") and main not in own.waits
    readers = [*own.readers] if reads else []
    title = "the thread that reads its data" if readers else "its main thread"
    frames = sys._current_frames()
    stacks = [
        f"Python stack of {title} (innermost call last):\n{_describe(frames[thread])}"
        for thread in readers or [main]
        if thread in frames
    ]
    text = "\n".join(stacks)
    return text if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "..."


def _describe(frame: FrameType) -> str:
    calls = traceback.extract_stack(frame)
    shown = [
        call
        for index, call in enumerate(calls)
        if index + 1 == len(calls) or not call.filename.startswith(_OWN)
    ]
    return "".join(traceback.format_list(shown[-_MOST_CALLS:])).rstrip()


def _frame_of_main() -> FrameType | None:
    return sys._current_frames().get(threading.main_thread().ident or 0)
