"""Where `fit` begins: at `initial_epoch`, or where a callback resumes an interrupted run."""

from typing import Any, NamedTuple

import numpy as np

from tnt_jax.distributed import collectives
from tnt_jax.keras_compat.core import Core
from tnt_jax.train.checkpoint import Position
from tnt_jax.train.contracts import Batch
from tnt_jax.train.state_arrays import state_arrays, with_arrays, without_accumulated


class Start(NamedTuple):
    """Where `fit` begins.

    Attributes:
        epoch: First epoch.
        batch: Batches of it that are done.
        sums: Sums of those batches, on the devices; None if there are none.
    """

    epoch: int
    batch: int
    sums: Any


class Resumption:
    """The starting point of the running `fit` according to callbacks; it is used once.

    Args:
        core: What the parts of the model share.

    Attributes:
        initial_epoch: Epoch that replaces the argument of `fit`, set by Keras's BackupAndRestore;
            None if unset.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self.initial_epoch: int | None = None
        self._resumed: tuple[Position, list[np.ndarray]] | None = None

    def resume_at(self, position: Position, sums: list[np.ndarray]) -> None:
        """Makes the running `fit` begin at a position instead of `initial_epoch`.

        Call it in `on_train_begin`.

        Args:
            position: The position to resume at.
            sums: Leaves of `epoch_sums` at that position; empty at the beginning of an epoch.
        """
        self._resumed = (position, sums)

    def adopt_master_state(self) -> None:
        """Replaces the training state and the first epoch by the master's, on every process."""
        trainer = self._core.trainer
        state = trainer.gathered_state()
        arrays = {
            path: np.asarray(leaf)
            for path, leaf in without_accumulated(state_arrays(state)).items()
        }
        trainer.set_state(with_arrays(state, collectives.broadcast(arrays)))
        epoch = int(
            collectives.broadcast(
                np.int64(-1 if self.initial_epoch is None else self.initial_epoch)
            )
        )
        self.initial_epoch = None if epoch < 0 else epoch

    def take(self, initial_epoch: int, first: Batch) -> Start:
        """Returns where `fit` begins.

        Args:
            initial_epoch: Argument of `fit`.
            first: First batch of the data.
        """
        resumed, self._resumed = self._resumed, None
        epoch, self.initial_epoch = self.initial_epoch or initial_epoch, None
        if resumed is None:
            return Start(epoch, 0, None)
        position, leaves = resumed
        sums = self._core.trainer.host_sums(leaves, first) if leaves else None
        return Start(position.epoch, position.batch, sums)
