"""Identifies tnt_jax's own checkpoint folders; only these are read, counted and removed.

A folder counts as tnt_jax's own if it has such a name, for example `tnt_jax_step_120`, is not a
link, and its metadata hold tnt_jax's marker.
"""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tnt_jax.log import logger

# The marker that a checkpoint carries beside Orbax's own metadata, and where Orbax stores it.
MARK: dict[str, Any] = {"tnt_jax": {"format": 1}}
_METADATA = "_CHECKPOINT_METADATA"
_UNFINISHED = r"\.orbax-checkpoint-tmp.*"
# What a folder may contain while it is written.
_PARTS = (_METADATA, "state", "extra", "about")


class OwnFolders:
    """The names of checkpoints of one kind, as an `orbax.checkpoint.path.step.NameFormat`.

    Args:
        prefix: The beginning of the names, which a number follows.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix

    def build_name(self, step: int) -> str:
        """Returns the name of the folder with a number."""
        return f"{self.prefix}_{step}"

    def find_all(self, base_path: Any) -> Iterator[Any]:
        """Yields Orbax's metadata of each complete checkpoint."""
        for number, path in self.complete(Path(base_path)):
            yield _orbax_metadata(number, path)

    def find_step(self, base_path: Any, step: int) -> Any:
        """Returns Orbax's metadata of one complete checkpoint.

        Raises:
            ValueError: If it does not exist, as Orbax expects.
        """
        path = Path(base_path) / self.build_name(step)
        if not is_ours(path):
            raise ValueError(f"There is no checkpoint {path}.")
        return _orbax_metadata(step, path)

    def complete(self, directory: Path) -> list[tuple[int, Path]]:
        """Returns number and path of each complete checkpoint."""
        return [(number, path) for number, path in self._named(directory, "") if is_ours(path)]

    def taken(self, directory: Path) -> int:
        """Returns the largest number that a name of this kind has in a directory.

        Folders of other programs count, too. The result is -1 if there is none.
        """
        return max(
            (number for number, _ in self._named(directory, f"({_UNFINISHED})?")), default=-1
        )

    def remove_unfinished(self, directory: Path) -> None:
        """Removes the remains of checkpoints whose writing was interrupted."""
        for _, path in self._named(directory, _UNFINISHED):
            if _is_folder(path) and all(entry.name.startswith(_PARTS) for entry in path.iterdir()):
                _remove(path)

    def remove_all(self, directory: Path) -> None:
        """Removes all checkpoints of this kind, and the directory if nothing else is in it."""
        for _, path in self.complete(directory):
            _remove(path)
        self.remove_unfinished(directory)
        if _is_folder(directory) and not any(directory.iterdir()):
            directory.rmdir()

    def _named(self, directory: Path, ending: str) -> list[tuple[int, Path]]:
        pattern = re.compile(rf"{re.escape(self.prefix)}_(0|[1-9][0-9]*){ending}")
        entries = sorted(directory.iterdir()) if directory.is_dir() else []
        return [
            (int(match[1]), path) for path in entries if (match := pattern.fullmatch(path.name))
        ]


def is_ours(path: Path) -> bool:
    """Returns whether a folder is a complete checkpoint that tnt_jax wrote."""
    if not (_is_folder(path) and (path / _METADATA).is_file()):
        return False
    try:
        noted = json.loads((path / _METADATA).read_bytes())
    except ValueError:
        return False
    custom = noted.get("custom_metadata") if isinstance(noted, dict) else None
    return isinstance(custom, dict) and MARK.keys() <= custom.keys()


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        # The run does not depend on it, and the other processes continue.
        logger.warning("%s could not be removed: %s", path, error)


def _orbax_metadata(number: int, path: Path) -> Any:
    import orbax.checkpoint as ocp
    from etils import epath

    return ocp.path.step.Metadata(step=number, path=epath.Path(path))
