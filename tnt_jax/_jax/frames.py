"""What a thread does in JAX, by the files of its stack."""

import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import FrameType

import jax

from tnt_jax._jax.fallbacks import or_plain

_FOLDER = str(Path(jax.__file__).parent) + os.sep
_KEPT = str(Path(__file__).with_name("kept_programs.py"))


@cache
@or_plain(
    lambda: (_KEPT,), lost="A long compilation counts as a step, and may be taken for a stall."
)
def _compiling() -> tuple[str, ...]:
    """Returns the files that trace, lower and compile programs."""
    # Private. Checked with JAX 0.10.0, 0.10.2 and 0.12.0; no public question exists before it is
    # done.
    parts = ("compiler.py",), ("interpreters", "partial_eval.py"), ("interpreters", "mlir.py")
    files = [_FOLDER + os.path.join("_src", *names) for names in parts]
    for file in files:
        if not os.path.exists(file):
            raise ImportError(f"{file} does not exist")
    return (*files, _KEPT)


def is_of_jax(frame: FrameType) -> bool:
    """Returns whether a frame runs code of JAX."""
    return frame.f_code.co_filename.startswith(_FOLDER)


def compiles(frames: Iterable[FrameType]) -> bool:
    """Returns whether one of the frames of a stack traces, lowers or compiles a program."""
    return any(frame.f_code.co_filename in _compiling() for frame in frames)
