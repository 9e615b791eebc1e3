"""What a thread does in JAX, by the files of its stack."""

import os
from collections.abc import Iterable
from pathlib import Path
from types import FrameType

import jax

_FOLDER = str(Path(jax.__file__).parent) + os.sep
# Private. Checked with JAX 0.10.0 and 0.10.2. What traces, lowers and compiles; no public question
# exists before it is done. Without these files a long compilation counts as a step.
_COMPILING = (
    *(
        _FOLDER + os.path.join("_src", *parts)
        for parts in (
            ("compiler.py",),
            ("interpreters", "partial_eval.py"),
            ("interpreters", "mlir.py"),
        )
    ),
    str(Path(__file__).with_name("kept_programs.py")),
)


def is_of_jax(frame: FrameType) -> bool:
    """Returns whether a frame runs code of JAX."""
    return frame.f_code.co_filename.startswith(_FOLDER)


def compiles(frames: Iterable[FrameType]) -> bool:
    """Returns whether one of the frames of a stack traces, lowers or compiles a program."""
    return any(frame.f_code.co_filename in _COMPILING for frame in frames)
