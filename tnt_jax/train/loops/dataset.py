"""A distributed dataset: global batches of any data that `fit` takes, for custom loops."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tnt_jax import _jax
from tnt_jax.data.arguments import check_arguments, is_taken_apart
from tnt_jax.data.dispatch import as_source
from tnt_jax.data.elements import unpack
from tnt_jax.data.feed import Feed, make_put, rank_slice_of
from tnt_jax.data.layout import ReadOptions
from tnt_jax.data.sources import HostBatch
from tnt_jax.data.streams import EpochStream, only_full, open_stream, read_in_lockstep
from tnt_jax.distributed.joining.runtime import init
from tnt_jax.distributed.liveness.phases import calling, in_phase
from tnt_jax.seeding import seed_or_default
from tnt_jax.train.checkpoints.checkpoint import Position
from tnt_jax.train.checkpoints.data_position import batches_done, describe_position
from tnt_jax.train.contracts import Batch
from tnt_jax.train.execution import in_groups, signature, stack
from tnt_jax.train.explaining import KEPT, Reading


@dataclass(frozen=True, eq=False)
class DistributedBatch:
    """One global batch, or several stacked ones, of a `DistributedDataset`.

    Of stacked batches every array has a leading dimension more, `[steps, rows, ...]`.

    Attributes:
        inputs: Pytree of arrays `[rows, ...]`, sharded by row; padding stands at the end of each
            process's or of all rows.
        targets: Pytree of arrays `[rows, ...]`, or None.
        weight: Sample weights `[rows]` or `[rows, ...]`, or None.
        mask: float32 `[rows]`, 1 for real rows and 0 for padding; None when no row is padding.
        num_rows: Real rows of the global batch; of stacked batches, of each.
        epoch: Number of the epoch, from 0.
        index: Number of the batch, or of the first one, in the epoch, from 0.
        step: Number of the batch, or of the first one, since the dataset's beginning, from 0.
        num_steps: Stacked batches; None of one that is not stacked.
        real_rows: Where the real rows stand: one range, or one for each process's shard.
        reading: What `tnt-jax explain` knows of where it comes from; otherwise None.
    """

    inputs: Any
    targets: Any
    weight: Any
    mask: Any
    num_rows: int
    epoch: int
    index: int
    step: int
    num_steps: int | None
    real_rows: tuple[slice, ...]
    reading: Any = field(default=None, repr=False)

    @property
    def arrays(self) -> Batch:
        """Arrays of the batch that a program takes."""
        return Batch(self.inputs, self.targets, self.weight, self.mask)

    def without_padding(self, rows: Any) -> Any:
        """Returns the real rows of arrays that a step returned by row.

        They are on the host, in the order of the dataset.

        Args:
            rows: Pytree of arrays `[rows, ...]`, in full on every process, such as `tnt.reduce(x,
                "concat")` gives them; of stacked batches `[steps, rows, ...]`.
        """
        dim = 0 if self.num_steps is None else 1
        num_real = sum(part.stop - part.start for part in self.real_rows)

        def cut(x: jax.Array) -> np.ndarray:
            whole = np.asarray(_jax.local_copy(x))
            if whole.shape[dim] == num_real:  # The step was given no padding.
                return whole
            parts = [whole[(slice(None),) * dim + (part,)] for part in self.real_rows]
            return np.concatenate(parts, axis=dim)

        return jax.tree.map(cut, rows)


@dataclass(frozen=True)
class _Position:
    """The batch that is read next: in its epoch, from 0, and after how many batches in all."""

    epoch: int = 0
    batch: int = 0
    step: int = 0

    def after(self, num_batches: int) -> "_Position":
        return _Position(self.epoch, self.batch + num_batches, self.step + num_batches)


_BEGINNING = _Position()


@dataclass
class ExplainedReading:
    """What `tnt-jax explain` knows of a loop over a dataset."""

    reading: Reading  # The batches of the host.
    batches: Iterator[DistributedBatch] = field(init=False)  # What the loop iterates over.
    is_explained: bool = False  # Whether the steps that are explained take the batches.


class DistributedDataset:
    """Global batches on the devices, epoch by epoch; `tnt_jax.distribute` makes it.

    A `for` loop reads one epoch, the next loop the next one; an epoch that is left early has ended.
    `iter` and `next` do the same by hand. Batches are read, checked against those of the other
    processes and put on the devices ahead of their use. Every process must read the same batches.

    Args:
        stream: Batches of this process, epoch by epoch.
        mesh: Ranks, over the axis `data`.
        is_explained: Whether `tnt-jax explain` may time steps on the batches.
    """

    def __init__(self, stream: EpochStream, mesh: Mesh, *, is_explained: bool = False) -> None:
        self._stream = stream
        self._mesh = mesh
        self._position = _Position()
        self._is_within = False
        self._is_resumed = False
        self._is_explained = is_explained
        self._reading: ExplainedReading | None = None
        # Rows of the epoch before the position.
        self._num_rows = 0

    def __len__(self) -> int:
        """Returns the batches of an epoch.

        Raises:
            TypeError: If nobody knows before the epoch has ended.
        """
        if self._stream.num_steps is None:
            raise TypeError(
                "The number of batches of an epoch is not known before it has ended: the data has "
                "no length. Count the batches, or pass steps_per_epoch."
            )
        return self._stream.num_steps

    @property
    def global_batch_size(self) -> int | None:
        """Rows of a full global batch; None where batches differ."""
        return self._stream.source.global_batch_size

    @property
    def position(self) -> dict[str, int]:
        """The position of the loop, for a checkpoint.

        It consists of the next `epoch` and `batch` to read, and the number of batches (`step`)
        before. Within a loop it is the batch after the current one.
        """
        return vars(self._position).copy()

    def seek(self, position: Mapping[str, int]) -> None:
        """Lets the next loop begin at a position, as if everything before had been read.

        A generator, which is read once, is read and dropped up to there.

        Args:
            position: What `position` returned, of a dataset with the same data and arguments.

        Raises:
            ValueError: If it is no position.
        """
        names = set(vars(_Position()))
        if set(position) != names or any(int(value) < 0 for value in position.values()):
            raise ValueError(
                f"A position has the numbers {', '.join(sorted(names))}, from 0 on, but got "
                f"{dict(position)}. Pass what dataset.position returned."
            )
        self._position = _Position(**{name: int(value) for name, value in position.items()})
        # Where batches differ, as if each had one row.
        rows = self._position.batch * (self.global_batch_size or 1)
        num_examples = self._stream.source.num_examples
        self._num_rows = rows if num_examples is None else min(rows, num_examples)
        self._is_within = False
        self._is_resumed = True

    def describe_position(self) -> dict[str, Any]:
        """Returns the position in rows as well, and what their order depends on, as JSON values."""
        return self.position | {"data": describe_position(self._stream, 0, self._num_rows)}

    def go_on_from(self, noted: Mapping[str, Any]) -> None:
        """Seeks what `describe_position` returned, of a dataset that may have other batches.

        Raises:
            ValueError: If rows would be lost or seen twice; the message gives both values.
        """
        epoch, data = noted["epoch"], noted["data"]
        batch = batches_done(
            Position(epoch, noted["batch"]), data, self._stream, 0, is_accumulating=False
        )
        self.seek({"epoch": epoch, "batch": batch, "step": noted["step"]})
        self._num_rows = data["rows"]

    def __iter__(self) -> Iterator[DistributedBatch]:
        """Begins the next epoch, or goes on where `seek` says."""
        return self._epochs(1, stacked=False)

    def stacked(self, num_steps: int | None = None) -> Iterator[DistributedBatch]:
        """Returns an epoch as stacked batches, arrays `[steps, rows, ...]`, for `step.scan`.

        Batches of unequal shapes are not stacked: an uneven last batch comes as a stack of one.

        Args:
            num_steps: Batches of a stack, at most; by default all of an epoch, which must fit on
                the devices.

        Raises:
            ValueError: If it is below 1.
        """
        if num_steps is not None and num_steps < 1:
            raise ValueError(f"num_steps must be at least 1, but is {num_steps}.")
        return self._epochs(num_steps, stacked=True)

    def _epochs(self, size: int | None, *, stacked: bool) -> Iterator[DistributedBatch]:
        """Returns an epoch; under `tnt-jax explain` full batches without an end."""
        if not self._is_explained:
            return self._epoch(size, stacked=stacked)
        if self._reading is None:
            keep = KEPT * (size or self._stream.num_steps or 1)
            self._reading = ExplainedReading(Reading(self._stream, keep))
        batches = self._without_end(self._reading, size, stacked=stacked)
        self._reading.batches = batches
        return batches

    def _without_end(
        self, reading: ExplainedReading, size: int | None, *, stacked: bool
    ) -> Iterator[DistributedBatch]:
        """Yields epoch after epoch where the batches go to the steps that are explained."""
        is_empty = False
        while not is_empty:
            is_empty = True
            for batch in self._epoch(size, stacked=stacked):
                is_empty = False
                yield batch
            if not reading.is_explained:
                return

    def _epoch(self, size: int | None, *, stacked: bool) -> Iterator[DistributedBatch]:
        if self._is_within:  # An epoch that was left early.
            self._end_epoch()
        start = self._position
        self._is_within = True
        if self._is_resumed or start.epoch:
            self._stream.seek(start.epoch, start.batch, first_epoch=0)
            self._is_resumed = False
        items = read_in_lockstep(
            self._stream.epoch(start.epoch),
            self._stream.source,
            where=f"epoch {start.epoch + 1}",
            first_step=start.batch + 1,
        )
        if self._reading is not None:
            items = self._reading.reading.noted(only_full(items, self._stream.source))
        return self._batches(items, start, size, stacked=stacked)

    def _batches(
        self, items: Iterator[HostBatch], start: _Position, size: int | None, *, stacked: bool
    ) -> Iterator[DistributedBatch]:
        if size is None:
            groups = (list(group) for _, group in groupby(items, key=signature))
        else:
            groups = in_groups(items, size)
        put = put_batches(self._mesh, start, stacked=stacked, reading=self._reading)
        if self._reading is not None:
            groups = _of_one_length(groups)
        with Feed(groups, put, threaded=not self._stream.source.in_memory) as feed:
            for batch in feed:
                self._position = _Position(start.epoch, batch.index, batch.step).after(
                    batch.num_steps or 1
                )
                self._num_rows += batch.num_rows * (batch.num_steps or 1)
                with in_phase("loop"):
                    yield batch
        self._end_epoch()

    def _end_epoch(self) -> None:
        self._position = _Position(self._position.epoch + 1, 0, self._position.step)
        self._num_rows = 0
        self._is_within = False


@calling("distribute")
def distribute(
    x: Any,
    y: Any = None,
    *,
    sample_weight: Any = None,
    batch_size: int | None = None,
    tnt_micro_batch_size: int | None = None,
    shuffle: bool = True,
    drop_remainder: bool = False,
    steps_per_epoch: int | None = None,
    tnt_distribute_dataset: bool = True,
    seed: int | None = None,
) -> DistributedDataset:
    """Returns data as global batches on all devices, for custom loops.

    Every process must call it with the same data and arguments, as `fit`; the arguments that `fit`
    has too mean the same.

    Args:
        x: Any data that `fit` takes: arrays, a `tf.data.Dataset`, a `RandomAccess` or another
            random-access dataset, a Keras `PyDataset`, token batches, a `DataLoader` of PyTorch or
            Grain, or any iterable of batches. A tuple `(inputs, targets)` or `(inputs, targets,
            weights)` of arrays is taken apart.
        y: Targets, with arrays only.
        sample_weight: Weights, with arrays only.
        batch_size: Rows of a global batch, for data that has no batches of its own; 32 by default.
        tnt_micro_batch_size: Rows of one rank.
        shuffle: Whether arrays get a new order every epoch.
        drop_remainder: Whether an incomplete last batch is left out; for data without batches of
            its own.
        steps_per_epoch: Batches of an epoch; one pass over the data by default.
        tnt_distribute_dataset: False if each process brings its own shard.
        seed: Seed of the order; by default that of `tnt_jax.set_seed`.

    Raises:
        ValueError: On every process, if data and arguments contradict one another, or differ
            between processes.
        TypeError: If nothing can be read from `x`.
    """
    runtime = init()
    if is_taken_apart(x, y, sample_weight):
        x, y, sample_weight = unpack(x if isinstance(x, tuple) else tuple(x))
    check_arguments(x, y, sample_weight)
    reading = ReadOptions(
        rank_slice_of(runtime),
        batch_size,
        tnt_micro_batch_size,
        shuffle,
        seed_or_default(seed),
        tnt_distribute_dataset,
        drop_remainder=drop_remainder,
    )
    # It may be endless: who writes a loop ends it.
    stream, _ = open_stream(
        "distribute",
        lambda: as_source(x, y, sample_weight, reading),
        steps=1,
        steps_per_epoch=steps_per_epoch,
        shuffle=shuffle,
        drop_remainder=drop_remainder,
        seed=reading.seed,
    )
    is_explained = runtime.settings.explain_steps is not None
    return DistributedDataset(stream, runtime.mesh, is_explained=is_explained)


def _of_one_length(groups: Iterator[list[HostBatch]]) -> Iterator[list[HostBatch]]:
    """Yields the groups that are as long as the first."""
    num_steps = None
    for group in groups:
        num_steps = num_steps or len(group)
        if len(group) == num_steps:
            yield group


def put_batches(
    mesh: Mesh,
    start: _Position = _BEGINNING,
    *,
    stacked: bool,
    reading: ExplainedReading | None = None,
) -> Callable[[list[HostBatch]], DistributedBatch]:
    """Returns a function that puts groups of host batches, in order from `start` on, on devices."""
    put_rows = make_put(mesh, stacked=stacked)
    position = start

    def put(group: list[HostBatch]) -> DistributedBatch:
        nonlocal position
        here, position = position, position.after(len(group))
        parts = [(*unpack(item.data), item.mask) for item in group]
        inputs, targets, weight, mask = put_rows(stack(parts) if stacked else parts[0])
        first = group[0]
        return DistributedBatch(
            inputs,
            targets,
            weight,
            mask,
            num_rows=first.num_rows,
            epoch=here.epoch,
            index=here.batch,
            step=here.step,
            num_steps=len(group) if stacked else None,
            real_rows=(slice(0, first.num_rows),) if first.shards is None else first.shards,
            reading=reading,
        )

    return put
