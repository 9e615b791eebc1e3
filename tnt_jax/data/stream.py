"""Epochs of a source: one pass each, or a given number of steps."""

from collections import deque
from collections.abc import Iterator
from itertools import chain, islice

from tnt_jax.data.sources import HostBatch, Source
from tnt_jax.log import logger


class EpochStream:
    """The batches of successive epochs.

    Without `steps_per_epoch` an epoch is one pass over the source. With it an epoch is that many
    steps, and the next epoch continues where this one stopped; a pass that ends early ends the
    epoch, with a warning, as in Keras.

    Args:
        source: Where batches come from.
        steps_per_epoch: Steps of an epoch.

    Attributes:
        steps_per_epoch: See above.
        num_steps: Steps of an epoch, None when unknown.
    """

    def __init__(self, source: Source, *, steps_per_epoch: int | None = None) -> None:
        if steps_per_epoch is not None and steps_per_epoch < 1:
            raise ValueError(f"steps_per_epoch must be at least 1, but is {steps_per_epoch}.")
        self.source = source
        self.steps_per_epoch = steps_per_epoch
        self._pass: Iterator[HostBatch] | None = None
        self._num_passes = 0
        self._steps_in_pass = 0
        self._peeked: tuple[int, HostBatch, Iterator[HostBatch]] | None = None
        self._sought: tuple[int, Iterator[HostBatch]] | None = None

    def require_end(self, steps: int | None = None) -> "EpochStream":
        """Returns itself if its epochs end.

        Args:
            steps: Steps after which the caller stops by itself.

        Raises:
            ValueError: If the source is known to be infinite (its `is_infinite` is true) and
                nothing else ends an epoch.
        """
        if (
            steps is None
            and self.steps_per_epoch is None
            and getattr(self.source, "is_infinite", False)
        ):
            raise ValueError(
                "The dataset is infinite, so an epoch would never end. Pass steps_per_epoch to "
                "fit, or steps to evaluate or predict."
            )
        return self

    @property
    def num_steps(self) -> int | None:
        """Steps of an epoch, None when unknown."""
        return self.steps_per_epoch if self.steps_per_epoch is not None else self.source.num_batches

    def peek(self, epoch: int) -> HostBatch:
        """Returns the first batch of `epoch`, which `epoch(epoch)` yields again.

        Raises:
            ValueError: If there is none.
        """
        if self._peeked is None or self._peeked[0] != epoch:
            batches = self._begin(epoch)
            first = next(batches, None)
            if first is None:
                raise ValueError(
                    "The dataset is empty: it gave no batch. At least one example is needed."
                )
            self._peeked = (epoch, first, batches)
        return self._peeked[1]

    def epoch(self, epoch: int) -> Iterator[HostBatch]:
        """Returns the batches of `epoch`."""
        sought, self._sought = self._sought, None
        if sought is not None and sought[0] == epoch:
            return sought[1]
        peeked, self._peeked = self._peeked, None
        if peeked is not None and peeked[0] == epoch:
            return chain([peeked[1]], peeked[2])
        return self._begin(epoch)

    def seek(self, epoch: int, batch: int, *, first_epoch: int) -> None:
        """Continues the next `epoch(epoch)` after `batch` batches.

        It is as if everything from `first_epoch` on had been read.

        Args:
            epoch: Epoch that is read next.
            batch: Batches of it that are done.
            first_epoch: Epoch that the stream begins with.
        """
        if (epoch, batch) != (first_epoch, 0):
            self._sought = (epoch, self._from(epoch, batch, first_epoch))

    def _from(self, epoch: int, batch: int, first_epoch: int) -> Iterator[HostBatch]:
        steps = self.steps_per_epoch
        size = self.source.num_batches
        if steps is None and (size is not None or self._peeked is None or self._peeked[0] != epoch):
            self._peeked = None
            return self.source.batches(epoch, batch)
        if steps is not None and size is not None:
            # A pass that ends early ends its last epoch, so a pass is a whole number of epochs.
            passes, epochs_in_pass = divmod(epoch - first_epoch, -(-size // steps))
            self._peeked = None
            self._num_passes = passes
            self._steps_in_pass = epochs_in_pass * steps + batch
            self._pass = self.source.batches(passes, self._steps_in_pass)
            return self._next_steps(steps - batch)
        # The end of a pass is known only once it is read, and a generator can be read only once.
        if steps is not None:
            for number in range(first_epoch, epoch):
                deque(self.epoch(number), maxlen=0)
        return islice(self.epoch(epoch), batch, None)

    def _begin(self, epoch: int) -> Iterator[HostBatch]:
        return (
            self.source.batches(epoch)
            if self.steps_per_epoch is None
            else self._next_steps(self.steps_per_epoch)
        )

    def _next_steps(self, steps: int) -> Iterator[HostBatch]:
        for step in range(steps):
            if self._pass is None:
                self._pass = self.source.batches(self._num_passes)
                self._steps_in_pass = 0
            batch = next(self._pass, None)
            if batch is None:
                logger.warning(
                    "The dataset ended after %d of %d steps of the epoch. Repeat the dataset or "
                    "give fewer steps_per_epoch.",
                    step,
                    steps,
                )
                self._end_pass()
                return
            self._steps_in_pass += 1
            yield batch
        if self._steps_in_pass == self.source.num_batches:
            self._end_pass()

    def _end_pass(self) -> None:
        self._pass = None
        self._num_passes += 1
