"""Digests of the training state, for comparing two runs bit by bit."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tnt_jax.distributed.runtime import is_master_rank
from tnt_jax.keras_compat.callbacks.base import Callback
from tnt_jax.launch.fingerprint import fingerprint_line
from tnt_jax.train.state_arrays import state_arrays


class Fingerprint(Callback):
    """Writes a digest of each array of the training state to a file.

    The state consists of weights, model state, optimizer state, step count and random key.

    `tnt-jax fingerprint A B` compares two files and names the first step and the arrays that
    differ. A resumed run appends to its file. Arrays that are sharded over the ranks, as with
    `shard_optimizer_state`, are left out.

    Args:
        path: File to write, on the master.
        every: Number of steps after which to write, too; by default only after each epoch.
    """

    def __init__(self, path: str | Path, *, every: int | None = None) -> None:
        super().__init__()
        if every is not None and every < 1:
            raise ValueError(f"every must be at least 1 step, but is {every}.")
        self._path = Path(path)
        self._every = every
        self._epoch = 0

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Begins a new file, unless the model has been trained before."""
        if is_master_rank() and int(self.model.state.step) == 0:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("")

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Records the epoch."""
        self._epoch = epoch

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Writes a line after every `every` steps."""
        if self._every is not None and (batch + 1) % self._every == 0:
            self._write()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Writes a line."""
        self._write()

    def _write(self) -> None:
        if is_master_rank():
            state = replace(self.model.state, accumulated=None, residual=None)
            arrays = {path: _digest(x) for path, x in state_arrays(state).items() if _is_whole(x)}
            with self._path.open("a") as file:
                file.write(fingerprint_line(self._epoch, int(state.step), arrays))


def _is_whole(x: Any) -> bool:
    return not isinstance(x, jax.Array) or x.is_fully_replicated


def _digest(x: Any) -> str:
    array = np.asarray(x)
    return hashlib.md5(f"{array.dtype} {array.shape} ".encode() + array.tobytes()).hexdigest()
