"""The folder of the compilation cache: only folders that nobody else can write to.

A compiled program in the cache is executed, so whoever can write to the cache decides what runs.
"""

import contextlib
import os
import stat
from collections.abc import Mapping


class UnsafeFolder(OSError):
    """A folder cannot be made, or is not the user's alone; the message says why."""


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
        and _is_own(os.stat(home), writable=stat.S_IWOTH)
    ):
        return os.path.join(home, ".cache")
    return private_folder(f"/tmp/tnt_jax-{os.geteuid()}")


def private_folder(path: str) -> str:
    """Returns the path of a folder that only the user can access, creating it if needed.

    Args:
        path: A path in a directory that others can write to.

    Raises:
        UnsafeFolder: If it cannot be created, or something else is there.
    """
    try:
        with contextlib.suppress(FileExistsError):  # What is there is examined below.
            os.mkdir(path, 0o700)
    except OSError as error:
        raise UnsafeFolder(f"{path} cannot be made ({error.strerror})") from error
    # Links are not followed: someone else could have created the link.
    if not _is_own(os.lstat(path), writable=stat.S_IWGRP | stat.S_IWOTH):
        raise UnsafeFolder(f"{path} is no directory that this user alone can write to")
    os.chmod(path, 0o700)
    return path


def _is_own(found: os.stat_result, *, writable: int) -> bool:
    """Returns whether a directory is the user's and has none of the permissions `writable`."""
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.geteuid()
        and not found.st_mode & writable
    )
