"""The folder of the compilation cache: only folders that nobody else can write to.

A compiled program in the cache is executed, so whoever can write to the cache decides what runs.
"""

import os
import stat
from collections.abc import Mapping

from tnt_jax.files import UnsafeFolder, is_own, private_folder

__all__ = ["UnsafeFolder", "cache_dir", "private_folder"]


def cache_dir(environ: Mapping[str, str]) -> str:
    """Returns the user's cache directory (XDG base directory specification).

    For a user without a home directory it is a private folder in /tmp.

    Args:
        environ: Environment of the user's processes.

    Raises:
        UnsafeFolder: If there can be no private folder.
    """
    if environ.get("XDG_CACHE_HOME"):
        return environ["XDG_CACHE_HOME"]
    home = environ.get("HOME") or ""
    if (
        os.path.isdir(home)
        and os.access(home, os.W_OK)
        and is_own(os.stat(home), writable=stat.S_IWOTH)
    ):
        return os.path.join(home, ".cache")
    return private_folder(f"/tmp/tnt_jax-{os.geteuid()}")
