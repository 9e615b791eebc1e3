"""The contracts between the parts of training: batches, measurements and compiled steps."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import optax
from jax.sharding import Mesh

from tnt_jax.adapters.base import Applied, Variables
from tnt_jax.data.layout import RankSlice
from tnt_jax.train.execution import DeviceBatches
from tnt_jax.train.finite import OnNaN
from tnt_jax.train.state import TrainState


class Batch(NamedTuple):
    """One global batch on the devices, or one rank's part of it inside a step.

    Attributes:
        inputs: Pytree of arrays `[rows, ...]` for the model.
        targets: Pytree of arrays `[rows, ...]`, or None.
        weight: The user's sample weights: pytree of float32 `[rows]` or `[rows, ...]`, or None.
        mask: float32 `[rows]`: 1 for real rows, 0 for padding; None when no row is padding.
    """

    inputs: Any
    targets: Any = None
    weight: Any = None
    mask: Any = None


class LossTerm(NamedTuple):
    """One summand of the loss, as sums over this rank's rows.

    The loss of the global batch is the sum over terms of `scale * psum(total) / psum(count)`.
    """

    total: jax.Array  # Sum of weighted losses, a scalar.
    count: jax.Array | float | None  # Divisor of the total, a scalar; None for no division.
    scale: float = 1.0  # The user's weight of this term.


class Apply(Protocol):
    """Forward pass over a rank's rows; see `tnt_jax.adapters.base.Adapter.apply`."""

    def __call__(
        self,
        params: Any,
        model_state: Any,
        inputs: Any,
        *,
        key: jax.Array | None,
        train: bool,
        mask: jax.Array | None,
    ) -> Applied:
        """Returns outputs, model state and penalty."""
        ...


class Measured(NamedTuple):
    """Numbers that a step computes from one rank's rows."""

    terms: list[LossTerm]  # Summands of the loss.
    penalty: jax.Array | float  # Losses that the model adds itself, averaged over the ranks.
    model_state: Any  # After the pass.
    increments: Any  # Pytree of sums for the metrics.


class Parts(Protocol):
    """The components of a step other than its optimizer."""

    @property
    def rows_at_once(self) -> int | None:
        """Most rows of a rank that training computes in one pass; None for all."""
        ...

    def measure(
        self, params: Any, model_state: Any, batch: Batch, *, key: jax.Array | None, train: bool
    ) -> Measured:
        """Returns loss and metrics of one rank's rows; inside `shard_map`.

        `key` is that of the step, or of the place of the rows in the data that is evaluated.
        """
        ...


@dataclass(frozen=True)
class StepParts:
    """Parts that compare the outputs of a model with targets."""

    apply: Apply
    loss_terms: Callable[[Any, Batch], list[LossTerm]]  # Of outputs and batch.
    # From outputs and batch to a pytree of sums, one entry per metric, without padded rows.
    increments: Callable[[Any, Batch], Any]
    rows_at_once: int | None = None  # See `Parts`.

    def measure(
        self, params: Any, model_state: Any, batch: Batch, *, key: jax.Array | None, train: bool
    ) -> Measured:
        """Returns loss and metrics of the model's outputs for one rank's rows."""
        applied = self.apply(
            params, model_state, batch.inputs, key=key, train=train, mask=batch.mask
        )
        own = self.increments(applied.outputs, batch)
        increments = {"outputs": own, "model": applied.increments}
        terms = self.loss_terms(applied.outputs, batch)
        if train and not terms and isinstance(applied.penalty, float):
            raise ValueError(
                "There is no loss to train by: the model adds none itself. Pass one to compile(), "
                "for instance loss='mse', or an objective."
            )
        return Measured(terms, applied.penalty, applied.model_state, increments)


class Hooks(Protocol):
    """The actions of a loop's caller between steps."""

    def on_batch_begin(self, index: int) -> None:
        """Runs before step `index` of the epoch, the first of those that share a program."""

    def on_batch_end(self, index: int, sums: Any, num_rows: int) -> bool:
        """Runs after step `index`, the last of its program, was started; returns whether to stop.

        Reading `sums` waits for the step.
        """
        ...


class CountedRows(Hooks):
    """Hooks that count real rows and do nothing else."""

    def __init__(self) -> None:
        self.number = 0

    def on_batch_end(self, index: int, sums: Any, num_rows: int) -> bool:
        """Counts the rows, and goes on."""
        self.number += num_rows
        return False


class FusedSteps(NamedTuple):
    """Several steps as one program; its batches are stacked: arrays `[steps, rows, ...]`."""

    # From the argument of `Steps.train` to `(state, sums, batches) -> (state, sums)`.
    train: Callable[..., Callable]
    # From a step of evaluation to `(params, model_state, sums, batches) -> sums`.
    evaluate: Callable[[Callable], Callable]
    # From a step of prediction to `(params, model_state, inputs, first_rows) -> outputs`.
    predict: Callable[[Callable], Callable]


class TrainingStep(NamedTuple):
    """What a step of training computes."""

    parts: Parts
    optimizer: optax.GradientTransformation  # Given gradients of the loss of the global batch.
    accumulation_steps: int = 1  # Steps whose mean gradient makes one update.
    on_nan: OnNaN | None = None  # What follows a step that is not finite; None to take it.


class Start(NamedTuple):
    """What a training state begins with, beside the variables."""

    optimizer: optax.GradientTransformation
    seed: int
    accumulation_steps: int = 1


class Steps(Protocol):
    """How steps are compiled for the devices, and how the training state lies on them."""

    rank_slice: RankSlice  # What this process feeds of the data axis.
    mesh: Mesh  # That the programs are mapped over.
    fused: FusedSteps | None = None  # None if steps run one by one.
    # Whether the programs of a single process accept host arrays, which they copy faster.
    takes_host_arrays: bool = False
    # From batches to what the programs take, without padded rows; None if these are masked. All
    # processes must call it at the same place among their programs.
    without_padding: Callable[[DeviceBatches], DeviceBatches] | None = None
    num_waiting: int = 0  # Gradients on a device that wait for others of the same step.

    def train(self, training: TrainingStep) -> Callable:
        """Returns the function `(state, sums, batch) -> (state, sums)`.

        Its method `lower` takes the same arguments.
        """
        ...

    def evaluate(self, parts: Parts) -> Callable:
        """Returns the function `(params, model_state, sums, batch) -> sums`."""
        ...

    def predict(self, apply: Apply) -> Callable:
        """Returns the function `(params, model_state, inputs, first_row) -> outputs`.

        `first_row` is the number of rows of the data before these, uint32. The outputs `[rows,
        ...]` are sharded by row.
        """
        ...

    def make_variables(self, make: Callable[[], Variables]) -> Variables | None:
        """Returns what `make`, which JAX can trace, makes sharded; None if it is not kept so."""

    def create_state(self, variables: Variables, start: Start) -> TrainState:
        """Returns the state before the first update, on the devices."""
        ...

    def describe_state(self, variables: Variables, start: Start) -> TrainState | None:
        """Returns what `create_state` returns, of descriptions, as such with their shardings.

        None if they are known only once the variables are there.
        """

    def put_state(self, state: TrainState) -> TrainState:
        """Puts a copy of a state of host or device arrays on the devices."""
        ...
