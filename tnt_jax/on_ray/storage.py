"""Checkpoints in the storage of a Ray run, and reports of metrics.

Ray takes a folder from one process, with the metrics of the moment, and copies it to its storage,
which may be a bucket; when it starts the run again, it offers the last one. Process 0 therefore
keeps the checkpoints of the job in a folder of its machine, which begins as a copy of what Ray
offers, and reports links to it. A process that is killed leaves its folder, which the next one on
the machine removes: a folder belongs to the process that holds its lock (`Claim`).

    storage = open_storage()
    ...  # Checkpoints are written below `storage.folder`.
    storage.report({"loss": 0.1}, checkpoints=["fit-1/tnt_jax_backup_120"])
"""

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tnt_jax.files import private_folder
from tnt_jax.on_ray.worker import TrainWorker, broadcast, import_ray, role, train_worker

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
        # It may be another user's, or not claimed yet, or its process may be alive.
        with contextlib.suppress(OSError), open(f"{found}/{_CLAIM}", "r+") as claim:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(found, ignore_errors=True)


_PREFIX = "tnt_jax-ray-"
_MARK = "tnt_jax.txt"
_TICK_S = 0.05


class RayStorage:
    """Reports of this process to Ray, and the `folder` where checkpoints lie before.

    It has the same path on every process. Process 0 writes to it, and the others see what Ray had
    stored when the job began. It ends with the training function, when `is_over` is set.
    """

    def __init__(self, folder: Path, claim: Claim | None, worker: TrainWorker | None) -> None:
        self.folder, self._claim, self._worker = folder, claim, worker
        self.name = "the Ray Tune trial" if worker is None else f"the Ray Train run {worker.run}"
        self._num_reports = 0
        self._pending: Path | None = None
        self._tick = threading.Event()
        self.is_over = False
        training = threading.current_thread()
        threading.Thread(target=self._clear_after, args=(training,), daemon=True).start()

    def report(self, metrics: Mapping[str, Any], *, checkpoints: Sequence[str] = ()) -> None:
        """Reports metrics, and checkpoints as one of Ray's; all processes call it together.

        Checkpoints are folders below `folder`; what Ray stores is a copy, made in the background.
        """
        leads = self._worker is None or self._worker.rank == 0
        linked = self._link(checkpoints) if checkpoints and leads else None
        ray_train = import_ray("RayReport", "ray.train")
        checkpoint = None if linked is None else ray_train.Checkpoint.from_directory(linked)
        if self._worker is None:
            import_ray("RayReport", "ray.tune").report(dict(metrics), checkpoint=checkpoint)
            if linked is not None:
                shutil.rmtree(linked)
            return
        self._pending = linked
        # Ray takes reports at intervals of seconds, and training does not wait for that.
        ray_train.report(
            dict(metrics),
            checkpoint=checkpoint,
            checkpoint_upload_mode=ray_train.CheckpointUploadMode.ASYNC,
            delete_local_checkpoint_after_upload=True,
        )

    def wait(self) -> None:
        """Waits until Ray has copied the last checkpoint of this process."""
        while self._pending is not None and self._pending.exists():
            self._tick.wait(_TICK_S)
        self._pending = None

    def _clear_after(self, training: threading.Thread) -> None:
        """Removes the folder when the thread that trains has ended: by then Ray has its copies."""
        training.join()
        self.is_over = True
        if self._claim is not None:
            self._claim.remove()

    def _link(self, checkpoints: Sequence[str]) -> Path:
        """Returns a folder with links to the files of checkpoints, which later ones replace."""
        self._num_reports += 1
        linked = self.folder / "reports" / str(self._num_reports)
        for name in checkpoints:
            shutil.copytree(self.folder / name, linked / name, copy_function=os.link)
        (linked / _MARK).write_text("Checkpoints of tnt_jax, by the calls of fit.\n")
        return linked


def open_storage() -> RayStorage | None:
    """Returns the storage of this process's Ray run, for all workers together; None outside Ray."""
    worker = train_worker()
    if worker is not None:
        folder = Path(broadcast(tempfile.mkdtemp(prefix=_PREFIX) if worker.rank == 0 else None))
        claim = _filled(folder, "ray.train") if worker.local_rank == 0 else None
        # All wait until the folder of their node is there.
        broadcast(None)
        return RayStorage(folder, claim, worker)
    if role() == "trial":
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        return RayStorage(folder, _filled(folder, "ray.tune"), None)
    return None


def _filled(folder: Path, module: str) -> Claim:
    """Claims a folder, and copies to it what Ray has stored, if that comes from here."""
    checkpoint = import_ray("RayReport", module).get_checkpoint()
    remove_unclaimed(_PREFIX)
    claim = Claim(folder)
    if checkpoint is not None:
        with checkpoint.as_directory() as stored:
            if Path(stored, _MARK).is_file():
                shutil.copytree(stored, folder, dirs_exist_ok=True)
    return claim
