"""Writes results to a folder of their own."""

import os
from importlib.util import find_spec
from pathlib import Path

from tnt_jax.launch.scale.scaling import Scaling

RESULTS = "scaling.json"
PICTURE = "scaling.png"


def check_folder(folder: Path) -> None:
    """Raises a ValueError unless results can be written to a folder without touching others."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        raise ValueError(
            f"--output {folder} exists already, and what it holds is kept. Name a new folder, or "
            "an empty one."
        )
    parent = next(parent for parent in folder.absolute().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"--output {folder} cannot be made: {parent} cannot be written to.")


def write_report(scaling: Scaling, folder: Path) -> list[str]:
    """Writes the results, and a picture if Matplotlib is installed; returns what to tell the user.

    Args:
        scaling: The results.
        folder: A folder that `check_folder` has accepted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RESULTS).write_text(scaling.to_json() + "\n")
    if find_spec("matplotlib") is None:
        return [
            f"Wrote {folder / RESULTS}; a picture needs Matplotlib: pip install 'tnt-jax[plots]'."
        ]
    scaling.plot(folder / PICTURE)
    return [f"Wrote {folder / RESULTS} and {folder / PICTURE}."]
