"""Identifies tnt_jax's own checkpoint folders; only these are read, counted and removed.

A folder counts as tnt_jax's own if it has such a name, for example `tnt_jax_step_120`, is not a
link, and its metadata hold tnt_jax's marker or its checksums are there.
"""

import json
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tnt_jax.files import read_regular
from tnt_jax.log import logger

# Where the marker stands beside Orbax's own metadata.
METADATA, _MARK, _FORMAT = "_CHECKPOINT_METADATA", "tnt_jax", 1
_HANDLERS = "orbax.checkpoint._src.handlers"
_TMP = ".orbax-checkpoint-tmp"
_UNFINISHED = rf"{re.escape(_TMP)}.*"
# So much is written to see whether a disk is full.
_BLOCK_BYTES = 4096
FOLDER, FILES = "checksums", "files.json"
"""Name of the folder of checksums within a checkpoint, and of the list of files in it."""
# What a folder may contain while it is written.
_PARTS = (METADATA, "state", "extra", "about", FOLDER)


class OwnFolders:
    """The names of checkpoints of one kind: a prefix, which a number follows."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def build_name(self, step: int) -> str:
        """Returns the name of the folder with a number."""
        return f"{self.prefix}_{step}"

    def build_temporary_name(self, step: int) -> str:
        """Returns the name of the folder with a number while it is written."""
        return f"{self.build_name(step)}{_TMP}"

    def complete(self, directory: Path) -> list[tuple[int, Path]]:
        """Returns number and path of each complete checkpoint."""
        return [(number, path) for number, path in self._named(directory, "") if is_ours(path)]

    def remains(self, directory: Path) -> list[tuple[int, Path]]:
        """Returns number and path of each folder that has lost its files, as in a purge."""
        named = self._named(directory, "")
        return [(n, path) for n, path in named if not is_ours(path) and _holds_parts(path)]

    def taken(self, directory: Path) -> int:
        """Returns the largest number in a name of this kind, of any program; -1 without one."""
        return max(
            (number for number, _ in self._named(directory, f"({_UNFINISHED})?")), default=-1
        )

    def remove_unfinished(self, directory: Path) -> None:
        """Removes the remains of checkpoints whose writing was interrupted."""
        for _, path in self._named(directory, _UNFINISHED):
            if _holds_parts(path):
                remove(path)

    def remove_old(self, directory: Path, *, max_to_keep: int | None, ignored: set[int]) -> None:
        """Removes all checkpoints but the newest (`max_to_keep`) and the newest of the best."""
        if max_to_keep is None:
            return
        complete = dict(sorted(self.complete(directory)))
        sound = [number for number in complete if number not in ignored]  # Others are damaged.
        best = [number for number in sound if read_mark(complete[number]).get("is_best")]
        kept = {*sound[-max_to_keep:], *best[-1:]}
        removed = [path for number, path in complete.items() if number not in kept]
        for path in [*removed, *(path for _, path in self.remains(directory))]:
            _remove_at_once(path)

    def remove_all(self, directory: Path) -> None:
        """Removes all checkpoints of this kind, and the directory if nothing else is in it."""
        for _, path in [*self.complete(directory), *self.remains(directory)]:
            _remove_at_once(path)
        self.remove_unfinished(directory)
        if _is_folder(directory) and not any(directory.iterdir()):
            directory.rmdir()

    def _named(self, directory: Path, ending: str) -> list[tuple[int, Path]]:
        pattern = re.compile(rf"{re.escape(self.prefix)}_(0|[1-9][0-9]*){ending}")
        entries = sorted(directory.iterdir()) if directory.is_dir() else []
        return [
            (int(match[1]), path) for path in entries if (match := pattern.fullmatch(path.name))
        ]


def problem_of_folder(folder: Path) -> OSError | None:
    """Returns why nothing can be written to a folder that may not exist yet; None if it can."""
    place = folder.absolute()
    while not (place.exists() or place.is_symlink()):
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(bytes(_BLOCK_BYTES))
    except OSError as error:
        return OSError(
            f"Nothing can be saved in {folder}: {place}: {error.strerror}. Choose another path, or "
            "give this one space and permissions."
        )
    return None


def is_ours(path: Path) -> bool:
    """Returns whether a folder is a complete checkpoint that tnt_jax wrote, damaged or not."""
    return _is_folder(path) and (bool(read_mark(path)) or (path / FOLDER / FILES).is_file())


def write_mark(path: Path, items: Sequence[str], *, is_best: bool) -> None:
    """Writes Orbax's metadata of a checkpoint with trees of arrays, and tnt_jax's marker in it."""
    trees = f"{_HANDLERS}.pytree_checkpoint_handler.PyTreeCheckpointHandler"
    texts = f"{_HANDLERS}.json_checkpoint_handler.JsonCheckpointHandler"
    metadata = {
        "item_handlers": {"about": texts} | dict.fromkeys(items, trees),
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": time.time_ns(),
        "commit_timestamp_nsecs": time.time_ns(),
        "custom_metadata": {_MARK: {"format": _FORMAT, "is_best": is_best}},
    }
    (path / METADATA).write_text(json.dumps(metadata))


def read_mark(path: Path) -> dict[str, Any]:
    """Returns tnt_jax's marker of a checkpoint; nothing if it has none that can be read."""
    try:
        mark = json.loads(read_regular(path / METADATA))["custom_metadata"][_MARK]
    except (OSError, ValueError, RecursionError, LookupError, TypeError):
        return {}
    return mark if isinstance(mark, dict) else {}


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _holds_parts(path: Path) -> bool:
    """Returns whether a folder holds nothing but parts of a checkpoint, or nothing at all."""
    return _is_folder(path) and all(entry.name.startswith(_PARTS) for entry in path.iterdir())


def _remove_at_once(path: Path) -> None:
    """Removes a checkpoint so that no half of it stays if the process ends meanwhile."""
    try:
        remove(path.rename(path.with_name(f"{path.name}{_TMP}-removed")))
    except OSError as error:
        logger.warning("%s could not be removed: %s", path, error)


def remove(path: Path) -> None:
    """Removes a folder, with a warning if that fails."""
    try:
        shutil.rmtree(path)
    except OSError as error:
        # The run does not depend on it, and the other processes continue.
        logger.warning("%s could not be removed: %s", path, error)
