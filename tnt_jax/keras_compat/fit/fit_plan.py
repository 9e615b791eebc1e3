"""The arguments of `fit`, and the plan of its loop of epochs."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tnt_jax.data.sources import HostBatch, Source
from tnt_jax.data.streams import EpochStream
from tnt_jax.keras_compat.fit.data_intake import (
    DataArguments,
    Weighting,
    split_validation,
    to_batch,
)
from tnt_jax.train.contracts import Batch


@dataclass(frozen=True)
class FitArguments:
    """The arguments of `fit` except training data and callbacks; see `Model.fit`."""

    class_weight: Mapping[int, float] | None
    initial_epoch: int
    epochs: int
    steps_per_epoch: int | None
    validation_split: float
    validation_data: Any
    validation_steps: int | None
    validation_batch_size: int | None
    validation_micro_batch_size: int | None
    validation_freq: int | list[int]
    distribute_validation: bool
    checkpoint_directory: Path | None
    ignored_changes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises a TypeError if a number is something else."""
        for name in ("epochs", "initial_epoch", "steps_per_epoch", "validation_steps"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, (int, np.integer)):
                raise TypeError(f"{name} must be a whole number, but is {value!r}.")

    @property
    def has_epochs(self) -> bool:
        """Whether an epoch is left; a callback that resumes a run may leave none even so."""
        return self.initial_epoch < self.epochs


@dataclass(frozen=True)
class Plan:
    """The plan of the loop of epochs."""

    stream: EpochStream
    first: HostBatch
    weighting: Weighting | None
    validation: Source | None
    arguments: FitArguments

    def unpack(self, item: HostBatch) -> Batch:
        """Returns the inputs of a step from a host batch."""
        return to_batch(item, self.weighting)

    def validates_after(self, epoch: int) -> bool:
        """Returns whether validation follows epoch number `epoch`, from 0."""
        freq = self.arguments.validation_freq
        is_due = (epoch + 1) % freq == 0 if isinstance(freq, int) else epoch + 1 in freq
        return self.validation is not None and is_due

    @property
    def ever_validates(self) -> bool:
        """Whether validation follows any epoch that the arguments leave."""
        epochs = range(self.arguments.initial_epoch, self.arguments.epochs)
        return any(map(self.validates_after, epochs))


def carry_out_split(
    data: DataArguments, arguments: FitArguments
) -> tuple[DataArguments, FitArguments]:
    """Returns the arguments of `fit` with `validation_split` applied.

    The rows held out become the validation data.
    """
    if not arguments.validation_split:
        return data, arguments
    training, held_out = split_validation(
        data.x, data.y, data.sample_weight, arguments.validation_split
    )
    x, y, sample_weight = training
    return replace(data, x=x, y=y, sample_weight=sample_weight), replace(
        arguments, validation_data=held_out
    )
