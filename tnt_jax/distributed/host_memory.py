"""Keeps memory that a step has freed, on CPUs."""

import ctypes
from collections.abc import Mapping

# glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST = 2**31 - 1
_GROWTH_BYTES = 64 * 2**20


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Makes the C library keep freed memory for later allocations; returns whether it does.

    XLA allocates the intermediate results of every step on CPUs anew. By default glibc returns such
    large blocks to the system, which clears them page by page for the next step. For a small
    Transformer that is a third of the step time (benchmarks/README.md). Kept memory belongs to the
    process until it ends.

    Does nothing if the C library is not glibc, or if the user has configured it.

    Args:
        environ: Variables of the environment. `MALLOC_*` counts as configured by the user.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name.startswith("MALLOC_") for name in environ):
        return False
    chosen = (
        (_M_MMAP_THRESHOLD, _LARGEST),
        (_M_TRIM_THRESHOLD, _LARGEST),
        (_M_TOP_PAD, _GROWTH_BYTES),
    )
    return [mallopt(name, value) for name, value in chosen] == [1, 1, 1]
