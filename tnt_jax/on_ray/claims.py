"""Temporary folders of processes that may be killed: the next process on the machine removes them.

A folder belongs to the process that has claimed it, by a lock that ends with the process.
"""

import fcntl
import glob
import os
import shutil
import tempfile
from pathlib import Path

from tnt_jax.files import private_folder

_CLAIM = ".claim"


class Claim:
    """The claim of this process to a private folder, which it makes if it is not there."""

    def __init__(self, folder: Path) -> None:
        private_folder(str(folder))
        self._folder = folder
        new = folder / f"{_CLAIM}-{os.getpid()}"
        self._descriptor = os.open(new, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        # Nobody sees a claim that is not locked.
        new.rename(folder / _CLAIM)

    def remove(self) -> None:
        """Removes the folder."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._descriptor)


def remove_unclaimed(prefix: str) -> None:
    """Removes temporary folders with a prefix whose claims are of processes that ended."""
    for found in glob.glob(f"{glob.escape(tempfile.gettempdir())}/{glob.escape(prefix)}*"):
        try:
            descriptor = os.open(f"{found}/{_CLAIM}", os.O_RDWR)
        except OSError:  # Another user's, or not claimed yet.
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(found, ignore_errors=True)
        except BlockingIOError:  # Its process is alive.
            continue
        finally:
            os.close(descriptor)
