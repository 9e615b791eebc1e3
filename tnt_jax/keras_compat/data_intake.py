"""Turns the user's data into a stream of global batches that all processes have opened."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from tnt_jax.data.argument_checks import check_arguments
from tnt_jax.data.elements import unpack
from tnt_jax.data.kinds import is_taken_apart
from tnt_jax.data.layout import micro_batch_size, num_padded_rows
from tnt_jax.data.opening import Meanwhile, open_stream
from tnt_jax.data.read_options import ReadOptions
from tnt_jax.data.sources import HostBatch, Source
from tnt_jax.data.stream import EpochStream
from tnt_jax.keras_compat.building import Builder
from tnt_jax.keras_compat.core import Core
from tnt_jax.keras_compat.inputs import few_rows
from tnt_jax.log import logger


@dataclass(frozen=True)
class DataArguments:
    """The arguments of `fit`, `evaluate` and `predict` that describe the data.

    Attributes:
        x: Arrays, a dataset, or an iterable of batches.
        y: Targets, with arrays only.
        sample_weight: Weights, with arrays only.
        batch_size: Rows of a global batch.
        micro_batch_size: Rows of one rank.
        shuffle: Whether arrays are shuffled anew in each epoch.
        distribute: False if each process brings its own shard.
        predicts: Whether targets and weights are ignored.
        is_inputs: Whether `x` has no targets in it, even if it is a tuple or list.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None
    batch_size: int | None = None
    micro_batch_size: int | None = None
    shuffle: bool = False
    distribute: bool = True
    predicts: bool = False
    is_inputs: bool = False


class DataIntake:
    """Opens the data of a call.

    Args:
        core: The shared parts of the model.
        builder: The part that knows which inputs the module takes.
    """

    def __init__(self, core: Core, builder: Builder) -> None:
        self._core = core
        self._builder = builder

    def source(self, data: DataArguments) -> Source:
        """Returns the source of the global batches.

        Raises:
            ValueError: If data and arguments contradict each other.
        """
        # The readers of all kinds of data are imported with the first data.
        from tnt_jax.data.dispatch import as_source

        x, y, sample_weight = data.x, data.y, data.sample_weight
        if self._is_taken_apart(data):
            x, y, sample_weight = unpack(x if isinstance(x, tuple) else tuple(x))
        if data.predicts:
            y = sample_weight = None
        check_arguments(x, y, sample_weight)
        return as_source(x, y, sample_weight, self._reading(data))

    def open(
        self,
        call: str,
        data: DataArguments | Source,
        *,
        epoch: int = 0,
        steps: int | None = None,
        steps_per_epoch: int | None = None,
        meanwhile: Meanwhile | None = None,
        **arguments: Any,
    ) -> tuple[EpochStream, HostBatch]:
        """Returns the data of a call and its first batch.

        It waits until all processes have made the same call with the same kind of data.

        Args:
            call: Name of the call.
            data: The user's data, or the source of the batches.
            epoch: Epoch that is read first.
            steps: Batches that are read; all by default.
            steps_per_epoch: Batches of an epoch; all by default.
            meanwhile: What to do while the first batch is read; see `open_stream`.
            **arguments: Other values that must be the same on every process.

        Raises:
            Exception: On every process, if the data of one cannot be read, or calls or arguments
                differ.
        """
        return open_stream(
            call,
            partial(self.source, data) if isinstance(data, DataArguments) else lambda: data,
            epoch=epoch,
            steps=steps,
            steps_per_epoch=steps_per_epoch,
            meanwhile=meanwhile,
            **arguments,
        )

    def log_plan(self, stream: EpochStream) -> None:
        """Logs once how the data is distributed."""
        source = stream.source
        rank_slice = self._core.trainer.rank_slice
        num_ranks = rank_slice.num_ranks
        size, examples, steps = source.global_batch_size, source.num_examples, stream.num_steps
        logger.info(
            "Global batch %s = %s rows on each of %d %s; %s examples, %s steps per epoch; %s "
            "padded row(s) per full batch, %s in the last one; shuffle seed %d.",
            size, None if size is None else micro_batch_size(size, num_ranks), num_ranks,
            rank_slice.kind, examples or "an unknown number of",
            steps or "an unknown number of",
            None if size is None else num_padded_rows(size, num_ranks),
            num_padded_rows(examples % size or size, num_ranks) if size and examples else "unknown",
            self._core.options.seed,
        )  # fmt: skip

    def _reading(self, data: DataArguments) -> ReadOptions:
        if not data.distribute and self._core.trainer.runtime.shares_ranks:
            raise ValueError(
                "tnt_distribute_dataset=False needs processes with rows of their own, but on this "
                "mesh several processes work on the same rows. Give each process all devices of "
                "the axes 'stage' and 'tensor', or let tnt_jax distribute the data."
            )
        rank_slice = self._core.trainer.rank_slice
        options = self._core.options
        sizes = (data.batch_size, data.micro_batch_size)
        return ReadOptions(
            rank_slice, *sizes, data.shuffle, options.seed, data.distribute, options.reproducible
        )

    def _is_taken_apart(self, data: DataArguments) -> bool:
        """Returns whether `x` alone is `(inputs, targets[, weights])` and not several inputs."""
        if data.is_inputs or not is_taken_apart(data.x, data.y, data.sample_weight):
            return False
        if not data.predicts:
            return self._core.compilation is not None and self._core.calls_model
        few = few_rows(data.x, self._core.trainer.rank_slice.local_ranks)
        problem_of = self._builder.problem_of_inputs
        return problem_of(few) is not None and problem_of(few[0]) is None
