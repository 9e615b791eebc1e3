"""Finds the line of a script that takes most of the time between the steps of a custom loop."""

import linecache
import os
import sys
import sysconfig
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from tnt_jax.distributed.liveness import phases

_EVERY_S = 0.002
# Of the samples, so that a line is the one.
_MOST = 0.5
_LIBRARIES = (
    *(path + os.sep for path in sysconfig.get_paths().values()),
    str(Path(__file__).parents[3]) + os.sep,
    "<frozen",
)


class SampledLines:
    """Samples, within a block, where the main thread is in the body of its loop."""

    def __init__(self) -> None:
        self._lines: Counter[tuple[str, int]] = Counter()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="tnt_jax-lines", daemon=True)

    def __enter__(self) -> "SampledLines":
        """Begins to sample."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the thread that samples."""
        self._stopped.set()
        self._thread.join()

    def most(self) -> dict[str, Any] | None:
        """Returns the line in which most samples are, as JSON values; None if there is none."""
        if not self._lines:
            return None
        (file, number), samples = self._lines.most_common(1)[0]
        if samples < _MOST * self._lines.total():
            return None
        return {"file": file, "number": number, "text": linecache.getline(file, number).strip()}

    def _sample(self) -> None:
        main = threading.main_thread().ident
        while not self._stopped.wait(_EVERY_S):
            frame = sys._current_frames().get(main or 0)
            if phases.here().doing[0] == "loop" and (line := _line_of(frame)) is not None:
                self._lines[line] += 1


def _line_of(frame: FrameType | None) -> tuple[str, int] | None:
    """Returns file and line of the innermost call that is in no library."""
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None
