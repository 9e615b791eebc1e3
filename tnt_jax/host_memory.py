"""What becomes of memory that a step has freed, on CPUs."""

import ctypes
from collections.abc import Mapping

# glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_LARGEST = 2**31 - 1
_GROWTH_BYTES = 64 * 2**20


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Makes the C library keep freed memory for what the process allocates next; tells whether it does so from here on.

    XLA allocates the intermediate results of every step on CPUs anew. By default glibc gives such large blocks back to the system,
    which clears them page by page when the next step gets them: a third of the time of a small Transformer's step
    (docs/performance.md). Kept memory counts to the process until it ends.

    Nothing is done where the C library is not glibc, or the user chose how it allocates.

    Args:
        environ: Variables of the environment. `MALLOC_*` is the user's choice.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name.startswith("MALLOC_") for name in environ):
        return False
    chosen = ((_M_MMAP_THRESHOLD, _LARGEST), (_M_TRIM_THRESHOLD, _LARGEST), (_M_TOP_PAD, _GROWTH_BYTES))
    return [mallopt(name, value) for name, value in chosen] == [1, 1, 1]
