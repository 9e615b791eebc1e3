"""Files in folders that others may write to, or whose contents came from elsewhere.

It uses only the standard library.
"""

import contextlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UnsafeFolder(OSError):
    """A folder cannot be made, or is not the user's alone; the message says why."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path to write to, which replaces `path` when the block ends without an error.

    Until then a file at `path` does not change, even if the process dies. The yielded path has the
    same name, in a new folder that only this user can enter: nobody can plant a link there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory, but must be a file. Choose another name.")
    with tempfile.TemporaryDirectory(prefix=".tnt_jax-", dir=path.parent) as folder:
        temporary = Path(folder, path.name)
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)


def read_regular(path: Path) -> bytes:
    """Returns the content of a regular file.

    Raises:
        OSError: If it cannot be read, or is a link, a pipe or a device, which may have no end.
    """
    # Without O_NONBLOCK, a pipe would be opened only once somebody writes to it.
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(file, "rb") as stream:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(f"{path} is not a regular file")
        return stream.read()


def irregular_entries(folder: Path) -> list[str]:
    """Returns what lies below a folder and is neither a regular file nor a folder, by name.

    Links are not followed.
    """
    found: list[str] = []
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            if entry.is_dir(follow_symlinks=False):
                found += [f"{entry.name}/{name}" for name in irregular_entries(Path(entry.path))]
            elif not entry.is_file(follow_symlinks=False):
                found.append(entry.name)
    return found


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
    if not is_own(os.lstat(path), writable=stat.S_IWGRP | stat.S_IWOTH):
        raise UnsafeFolder(f"{path} is no directory that this user alone can write to")
    os.chmod(path, 0o700)
    return path


def is_own(found: os.stat_result, *, writable: int) -> bool:
    """Returns whether a directory is the user's and has none of the permissions `writable`."""
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.geteuid()
        and not found.st_mode & writable
    )
