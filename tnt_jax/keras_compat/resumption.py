"""Where `fit` begins, where it is, and how a callback saves and resumes it there."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from tnt_jax.data.row_order import row_order_of
from tnt_jax.data.stream import EpochStream
from tnt_jax.distributed import collectives
from tnt_jax.keras_compat.core import Core
from tnt_jax.keras_compat.progress import Progress
from tnt_jax.log import logger
from tnt_jax.train.checkpoint import Position
from tnt_jax.train.contracts import Batch
from tnt_jax.train.data_position import DataPosition, batches_done, describe_position
from tnt_jax.train.state_arrays import state_arrays, with_arrays, without_accumulated


class Start(NamedTuple):
    """Where `fit` begins.

    Attributes:
        epoch: First epoch.
        batch: Batches of it that are done.
        rows: Their rows.
        sums: Sums of those batches, on the devices; None if there are none.
    """

    epoch: int
    batch: int
    rows: int
    sums: Any


class Reached(NamedTuple):
    """Where training is, between two steps.

    Attributes:
        position: Epoch, and the batches of it that are done.
        data: The same in rows, and what that depends on; JSON values.
        sums: Leaves of the sums of those batches, on the devices; empty if there are none.
    """

    position: Position
    data: DataPosition
    sums: list[Any]


class Resumption:
    """The starting point of the running `fit` according to callbacks, and where training is.

    Args:
        core: What the parts of the model share.
        progress: Where training is.

    Attributes:
        initial_epoch: Epoch that replaces the argument of `fit`, set by Keras's BackupAndRestore;
            None if unset.
        save_now: Saves the running `fit` where it is, and returns whether that is written; set by
            `BackupAndRestore` while it is active, otherwise None. All processes call it between
            the same two steps, or outside of the steps.
    """

    def __init__(self, core: Core, progress: Progress) -> None:
        self._core = core
        self._progress = progress
        self.initial_epoch: int | None = None
        self.save_now: Callable[[], bool] | None = None
        self._stream: EpochStream | None = None
        self._first_epoch = 0
        self._resumed: tuple[Position, int, list[np.ndarray]] | None = None

    def begin(self, stream: EpochStream, first_epoch: int) -> None:
        """Forgets an earlier `fit`.

        Args:
            stream: The data of this one.
            first_epoch: Its argument `initial_epoch`.
        """
        self._stream, self._first_epoch = stream, first_epoch
        self.save_now = self._resumed = None
        self._progress.enter_epoch(first_epoch, 0, 0, None)

    def reached(self) -> Reached:
        """Returns where training is; all of the steps that were started belong to it."""
        progress = self._progress
        assert self._stream is not None, "fit() comes first."
        return Reached(
            Position(progress.epoch, progress.batches_done),
            describe_position(self._stream, self._first_epoch, progress.rows_done),
            jax.tree.leaves(progress.training_sums),
        )

    def resume_at(self, position: Position, data: DataPosition, sums: list[np.ndarray]) -> Position:
        """Makes the running `fit` begin at a position instead of `initial_epoch`.

        Call it in `on_train_begin`.

        Args:
            position: The position to resume at.
            data: What `reached` said of the data there.
            sums: Leaves of the sums at that position; empty at the beginning of an epoch.

        Returns:
            The position in the batches of the running `fit`.

        Raises:
            ValueError: If the data cannot be entered there; the message says what differs.
        """
        assert self._stream is not None, "fit() comes first."
        is_accumulating = (
            int(self._core.trainer.require_state().step)
            % self._core.require_compiled().accumulation_steps
            > 0
        )
        batch = batches_done(
            position, data, self._stream, self._first_epoch, is_accumulating=is_accumulating
        )
        position = Position(position.epoch, batch)
        self._resumed = (position, data["rows"], sums)
        return position

    def enter_epoch(self, epoch: int) -> None:
        """Says that training is before the first step of an epoch."""
        self._progress.enter_epoch(epoch, 0, 0, None)

    def warn_unless_repeatable(self) -> None:
        """Warns if the data of the running `fit` cannot be read again from its beginning."""
        assert self._stream is not None, "fit() comes first."
        order = row_order_of(self._stream.source)
        if order.unrepeatable:
            logger.warning(
                "A run that stops within an epoch could not be resumed there. %s.",
                order.unrepeatable,
            )
        if not order.can_go_back:
            logger.warning(
                "The data is a generator, which cannot go back: a resumed run makes its batches "
                "from the first on and drops those that are done, which is right only if it makes "
                "the same ones in every run. Pass arrays, a tf.data.Dataset, a "
                "tnt_jax.data.RandomAccess, or an object whose __iter__ starts anew."
            )

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
            return Start(epoch, 0, 0, None)
        position, rows, leaves = resumed
        sums = self._core.trainer.host_sums(leaves, first) if leaves else None
        return Start(position.epoch, position.batch, rows, sums)
