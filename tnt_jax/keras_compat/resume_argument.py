"""The argument `resume` of `fit`: the directory of its checkpoints, and the callback for it."""

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from tnt_jax.job import Slot
from tnt_jax.keras_compat.callbacks import BackupAndRestore, RayReport
from tnt_jax.keras_compat.callbacks.ray_report import backup_on_ray, ray_storage
from tnt_jax.keras_compat.hooks import flat
from tnt_jax.settings import read_settings

_DIR, _EVERY = "TNT_CHECKPOINT_DIR", "TNT_CHECKPOINT_EVERY"
# How many calls of `fit` have used a directory in this job.
_fits = Slot[Counter[Path]](Counter)


def choose_directory(resume: Any, callbacks: Any) -> Path | None:
    """Returns the directory for the checkpoints of this call of `fit`, or None for no checkpoints.

    The calls of a script are numbered in their order, so that each finds its own again.

    Args:
        resume: Argument of `fit`.
        callbacks: Callbacks, as the user passed them.

    Raises:
        ValueError: If `resume` is no directory, or comes with a `BackupAndRestore`.
    """
    if not (
        resume is None or isinstance(resume, os.PathLike) or (isinstance(resume, str) and resume)
    ):
        raise ValueError(f"resume must be None, 'auto' or a directory, but is {resume!r}.")
    directory = os.environ.get(_DIR)
    backs_up = any(_is_backup(getattr(given, "callback", given)) for given in flat(callbacks))
    if resume is None and not directory:
        return None if backs_up else _directory_on_ray(callbacks)
    if backs_up:
        if resume is None:
            return None
        raise ValueError(
            f"fit was given resume={os.fspath(resume)!r} and a BackupAndRestore, which does the "
            "same. Leave one of them out."
        )
    if resume is None or resume == "auto":
        base = Path(directory) if directory else Path("checkpoints", _script_name())
    else:
        base = Path(resume)
    base = base.absolute()
    return _next_of(base)


def _next_of(base: Path) -> Path:
    _fits.get()[base] += 1
    return base / f"fit-{_fits.get()[base]}"


def _directory_on_ray(callbacks: Any) -> Path | None:
    """Returns the directory of this call of `fit` that Ray stores; None outside of Ray."""
    storage = ray_storage()
    report = _ray_report(callbacks)
    if storage is None or (report is not None and report.save_freq is None):
        return None
    return _next_of(storage.folder)


def _ray_report(callbacks: Any) -> RayReport | None:
    """Returns the `RayReport` among the callbacks that the user passed."""
    plain = (getattr(given, "callback", given) for given in flat(callbacks))
    return next((item for item in plain if isinstance(item, RayReport)), None)


def with_backup(callbacks: Any, directory: Path | None) -> Any:
    """Returns callbacks with one that saves to a directory and resumes from there.

    It saves every minute, or as often as `TNT_CHECKPOINT_EVERY` says. In a process that Ray has
    started, one that reports to Ray follows it, unless the user has passed one.

    Args:
        callbacks: Callbacks, as the user passed them.
        directory: What `choose_directory` returned.
    """
    added: list[Any] = []
    report, storage = _ray_report(callbacks), ray_storage()
    if directory is not None:
        save_freq = read_settings({_EVERY: os.environ.get(_EVERY, "")}).checkpoint_every
        if report is not None and report.save_freq not in (None, "default"):
            save_freq = report.save_freq
        if storage is not None and directory.is_relative_to(storage.folder):
            added.append(backup_on_ray(directory, save_freq, storage))
        else:
            added.append(BackupAndRestore(directory, save_freq, delete_checkpoint=False))
    if report is None and storage is None:
        return [*flat(callbacks), *added] if added else callbacks
    # It reports what the others, and the backup, have done.
    others = [item for item in flat(callbacks) if getattr(item, "callback", item) is not report]
    return [*others, *added, report or RayReport()]


def _is_backup(callback: Any) -> bool:
    return any(cls.__name__ == "BackupAndRestore" for cls in type(callback).__mro__)


def _script_name() -> str:
    """Returns the name of the running script, or of the package that runs as one."""
    script = Path(sys.argv[0])
    if script.suffix != ".py":
        return script.name if script.name not in ("", "-c") else "interactive"
    return script.parent.name if script.name == "__main__.py" else script.stem
