"""The host's side of `on_nan`: reads how steps went, a few steps late, and decides what follows.

The programs themselves leave a step that is not finite (`finite.py`), so that nothing is lost while
the host has not read of it. All processes read the same numbers at the same steps, and so decide
alike.
"""

import math
from collections import deque
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from tnt_jax import _jax
from tnt_jax.distributed.elastic import link
from tnt_jax.distributed.liveness import phases
from tnt_jax.distributed.sums.reduction import psum
from tnt_jax.log import logger
from tnt_jax.train.contracts import Batch, Parts
from tnt_jax.train.execution import IN_FLIGHT, DeviceBatches
from tnt_jax.train.finite import (
    CHECKED,
    OnNaN,
    all_finite,
    can_be_summed,
    scale_alone,
)
from tnt_jax.train.state import TrainState, copied, listed, state_arrays
from tnt_jax.train.steps.epoch_sums import num_local_rows, quotient
from tnt_jax.train.steps.step import REPLICATED, differentiate


class Diagnosis(NamedTuple):
    """Numbers of a step that are not finite."""

    loss: float  # Of the global batch.
    leaves: list[str]  # Paths of the parameters whose gradients are not finite.
    data_rows: list[int]  # Of the global batch, whose inputs, targets or weights are not finite.
    loss_rows: list[int]  # Whose own loss is not finite, in evaluation.
    num_rows: int  # Real rows of the global batch.

    def describe(self) -> str:
        """Returns sentences for an error."""
        if self.leaves:
            text = f"The gradient of {listed(self.leaves)} is not finite. "
        else:
            text = "Every gradient of it is finite. "
        if self.data_rows:
            return (
                f"{text}The data hold NaN or infinity in {_rows(self.data_rows)} of the global "
                f"batch of {self.num_rows}."
            )
        if self.loss_rows:
            return (
                f"{text}The data are finite; the loss of {_rows(self.loss_rows)} of the global "
                f"batch of {self.num_rows} is not."
            )
        return (
            f"{text}The data are finite, and so is the loss of each of the {self.num_rows} rows of "
            "the global batch by itself."
        )


def diagnose(
    parts: Parts, state: TrainState, batch: Batch, mesh: Mesh, group: DeviceBatches
) -> Diagnosis:
    """Returns what is not finite in the step on a batch of a group; all processes must call it."""

    def work(state: TrainState, batch: Batch) -> Any:
        local = differentiate(parts, state, batch, mesh)
        unfit = [
            ~can_be_summed(state, grad, _jax.num_ranks(mesh))
            for grad in jax.tree.leaves(local.grads)
        ]
        loss, counts = psum(
            _jax.make_varying((local.numbers[0], jnp.stack(unfit).astype(jnp.float32)))
        )
        flags = _jax.make_varying((_bad_data(batch), _bad_losses(parts, state, batch)))
        return (
            loss,
            counts,
            jax.tree.map(lambda x: _jax.all_gather_invariant(x.astype(jnp.float32)), flags),
        )

    by_row: Any = PartitionSpec(_jax.rank_axes(mesh))
    mapped = _jax.shard_map(work, mesh=mesh, in_specs=(REPLICATED, by_row), out_specs=REPLICATED)
    # Of the rest each rank may hold a part alone.
    bare = TrainState(
        state.step, state.params, state.model_state, scale_alone(state.opt_state), state.key
    )
    loss, counts, flags = jax.tree.map(np.asarray, jax.jit(mapped)(bare, batch))
    order = np.concatenate([np.arange(rows.start, rows.stop) for rows in group.real_rows])
    data_rows, loss_rows = ((np.flatnonzero(x[order]) + group.first_row).tolist() for x in flags)
    paths = [path for path, count in zip(state_arrays(state.params), counts, strict=True) if count]
    return Diagnosis(float(loss), paths, data_rows, loss_rows, group.num_rows // group.num_steps)


def _bad_data(batch: Batch) -> jax.Array:
    """Returns for each row whether its inputs, targets or weights hold NaN or infinity."""
    bad = jnp.zeros(num_local_rows(batch), bool)
    for x in jax.tree.leaves((batch.inputs, batch.targets, batch.weight)):
        if jnp.issubdtype(x.dtype, jnp.inexact):
            bad |= ~jnp.isfinite(x.reshape(x.shape[0], -1)).all(axis=1)
    return bad


def _bad_losses(parts: Parts, state: TrainState, batch: Batch) -> jax.Array:
    def is_bad(row: Batch) -> jax.Array:
        alone = jax.tree.map(lambda x: x[None], row)
        measured = parts.measure(state.params, state.model_state, alone, key=None, train=False)
        return ~all_finite([quotient(term, term.count) for term in measured.terms])

    return jax.lax.map(lambda row: _jax.make_varying(is_bad(row)), batch)


def _rows(rows: list[int]) -> str:
    return f"row {rows[0]}" if len(rows) == 1 else f"rows {listed(rows)}"


# Losses that are compared, and how many spreads (median absolute deviations) above their median is
# far. Those of batches spread about as normal numbers do: it is 0.67 standard deviations then.
_WINDOW, _FACTOR = 64, 20.0
# Least spread, as a part of the median: a loss that hardly changes has none.
_LEAST_SPREAD = 0.01


class LossSpikes:
    """Warns of a loss that is far above those before it, once until one is not."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self._bound, self._median = math.inf, math.nan
        self._num_seen = 0
        self._is_told = False

    def see(self, loss: float, step: int) -> None:
        """Warns if the loss of a step (from 1 on in the epoch) is far above those before it."""
        if not math.isfinite(loss):
            return
        is_far = loss > self._bound
        if is_far and not self._is_told:
            logger.warning(
                "The loss of step %d of epoch %d is %.4g, far above the median %.4g of the %d "
                "losses before.",
                step,
                phases.here().epoch,
                loss,
                self._median,
                _WINDOW,
            )
        self._is_told = is_far
        self._losses.append(loss)
        self._num_seen += 1
        if self._num_seen % _WINDOW == 0:
            self._renew()

    def _renew(self) -> None:
        losses = np.array(self._losses)
        self._median = float(np.median(losses))
        spread = float(np.median(np.abs(losses - self._median)))
        self._bound = self._median + _FACTOR * max(spread, _LEAST_SPREAD * abs(self._median))


# Steps in a row that may be skipped, and returns to one copy, before training ends.
MOST_SKIPPED, MOST_ROLLBACKS = 100, 3
# Steps after which the copy to go back to is renewed within an epoch.
COPY_STEPS = 1000


class _Started(NamedTuple):
    """A program that may still run: its counts, its batches, and the steps up to its end."""

    counts: jax.Array
    group: DeviceBatches
    index: int


class _Copy(NamedTuple):
    """Copy that `on_nan="rollback"` restores: state and sums after `index` steps of the epoch."""

    state: TrainState
    sums: Any
    index: int
    first_step: int  # Steps before the epoch.
    num_rollbacks: int = 0  # To this copy.


class NumberWatch:
    """Watches the steps of one model, and does what `on_nan` says after one that is not finite."""

    def __init__(self, on_nan: OnNaN, parts: Parts, mesh: Mesh) -> None:
        self._on_nan, self._parts, self._mesh = on_nan, parts, mesh
        self._running: deque[_Started] = deque()
        self._spikes = LossSpikes()
        self._in_a_row = 0
        self._is_told = False
        self._copy: _Copy | None = None
        self._lost_epochs = 0  # In a row, of which no step was kept.

    def with_counts(self, sums: Any) -> Any:
        """Returns sums with counts of the steps that were left."""
        return sums | {CHECKED: self._counts(self._in_a_row if self._on_nan == "skip" else 0)}

    def restored(self, sums: Any, counts: np.ndarray) -> Any:
        """Returns sums in the middle of an epoch with counts that were saved with them."""
        self._begin()
        self._in_a_row = int(counts[0]) if self._on_nan == "skip" else 0
        return sums | {CHECKED: self._counts(self._in_a_row, skipped=int(counts[2]))}

    def before(self, index: int, state: TrainState, sums: Any) -> Any:
        """Returns the sums for the step after `index` steps of the epoch; keeps a copy if due."""
        if CHECKED not in sums:
            self._begin()
            sums = self.with_counts(sums)
        before = self._copy
        if self._on_nan == "rollback" and (before is None or index - before.index >= COPY_STEPS):
            first_step = int(state.step) if before is None else before.first_step
            self._copy = _Copy(copied(state), sums, index, first_step)
        return sums

    def after(
        self, index: int, state: TrainState, sums: Any, group: DeviceBatches
    ) -> tuple[TrainState, Any]:
        """Reads the counts of an older program; returns the state and sums to go on with.

        State and sums are those after `index` steps of the epoch, the last ones of which ran on
        `group`. All processes raise a FloatingPointError if training ends because of a step that
        was not finite.
        """
        self._running.append(_Started(sums[CHECKED], group, index))
        # An elastic job waits for each step anyway, and may leave the devices after it.
        if len(self._running) > (IN_FLIGHT if link() is None else 0):
            return self._read(self._running.popleft(), state, sums)
        return state, sums

    def settle(self, state: TrainState, sums: Any) -> tuple[TrainState, Any]:
        """Waits for all steps that were started, and does for each what `after` does."""
        while self._running:
            state, sums = self._read(self._running.popleft(), state, sums)
        return state, sums

    def end_epoch(self, state: TrainState) -> None:
        """Warns of an epoch of which `rollback` has kept no step; raises after a second."""
        # An elastic job may end it again, after a loss in its validation.
        copy, self._copy = self._copy, None
        if copy is None:
            return
        is_lost = int(state.step) == copy.first_step
        self._lost_epochs = self._lost_epochs + 1 if is_lost else 0
        if not is_lost:
            return
        text = (
            f'on_nan="rollback" has undone every step{_of_epoch()}, which changed no weight. Its '
            "copy of the state is that of the beginning of the epoch: correct the rows whose loss "
            'is not finite, or compile(on_nan="skip") to lose only steps that are not finite.'
        )
        if self._lost_epochs > 1:
            raise FloatingPointError(f"Two epochs in a row were lost. {text}")
        logger.warning("%s", text)

    def settle_before_saving(self, state: TrainState) -> None:
        """Raises what `settle` would raise, so that no position after a bad step is saved."""
        # To go back needs the sums of the epoch; until then the state is that before the bad step.
        if self._on_nan != "rollback":
            self.settle(state, None)

    def kept(self) -> tuple[list[Any], int]:
        """Returns leaves of the copy, on the host, and how many epochs were lost, for `take`."""
        return jax.device_get(jax.tree.leaves(self._copy)), self._lost_epochs

    def take(self, kept: tuple[list[Any], int], state: TrainState, sums: Any) -> None:
        """Goes on with what another watch has `kept`, in an epoch with such a state and sums."""
        leaves, self._lost_epochs = kept
        if leaves:
            copy = jax.tree.structure(_Copy(state, sums, 0, 0)).unflatten(leaves)
            state, sums = _jax.replicate((copy.state, copy.sums), self._mesh)
            self._copy = copy._replace(state=state, sums=sums)

    def _begin(self) -> None:
        """Forgets what belongs to an epoch."""
        self._running.clear()
        self._copy, self._is_told = None, False

    def _read(self, started: _Started, state: TrainState, sums: Any) -> tuple[TrainState, Any]:
        in_a_row, loss, skipped = np.asarray(started.counts).tolist()
        self._in_a_row = int(in_a_row)
        self._spikes.see(loss, started.index)
        if self._on_nan == "skip":
            self._report(started, int(skipped), loss)
            if in_a_row >= MOST_SKIPPED:
                self._end(started, state, f"{int(in_a_row)} steps in a row were skipped. ")
        elif in_a_row:
            if self._on_nan == "rollback":
                return self._go_back(started, state, sums)
            self._end(started, state)
        return state, sums

    def _report(self, started: _Started, skipped: int, loss: float) -> None:
        """Warns of the first step of an epoch that was skipped."""
        if not skipped or self._is_told:
            return
        self._is_told = True
        first = _first_left(started, self._in_a_row or started.group.num_steps)
        where = f"One of the steps {first} to {started.index}"
        if self._in_a_row or started.group.num_steps == 1:
            where = f"Step {first}"
        logger.warning(
            "%s%s was skipped: loss or gradients are not finite%s. The logs count such "
            "steps as skipped_steps.",
            where,
            _of_epoch(),
            f" (loss {loss})" if self._in_a_row == 1 else "",
        )

    def _go_back(self, started: _Started, state: TrainState, sums: Any) -> tuple[TrainState, Any]:
        assert self._copy is not None
        copy = self._copy
        if copy.num_rollbacks == MOST_ROLLBACKS:
            self._end(started, state, f"Training went back {MOST_ROLLBACKS} times already. ")
        self._copy = copy._replace(num_rollbacks=copy.num_rollbacks + 1)
        newest = self._running[-1].index if self._running else started.index
        self._running.clear()
        jax.block_until_ready(state)
        logger.warning(
            "Step %d%s is not finite: training goes back to the state after step %d and "
            "on with step %d.",
            _first_left(started, self._in_a_row),
            _of_epoch(),
            copy.index,
            newest + 1,
        )
        self._in_a_row = 0
        skipped = int(np.asarray(copy.sums[CHECKED])[2]) + newest - copy.index
        return copied(copy.state), copy.sums | {CHECKED: self._counts(0, skipped=skipped)}

    def _end(self, started: _Started, state: TrainState, why: str = "") -> None:
        """Raises the error that ends training, once no other program runs."""
        self._running.clear()
        jax.block_until_ready(state)
        step = _first_left(started, 1 if self._on_nan == "skip" else self._in_a_row)
        self._in_a_row = 0
        group = started.group
        position = step - (started.index - group.num_steps) - 1
        text = f"{why}Step {step}{_of_epoch()} is not finite"
        advice = (
            "The weights are those before it. Look at these rows, lower the learning rate, or "
            'compile(on_nan="skip") to leave such steps out.'
        )
        try:
            batch = group.batch
            if group.num_steps > 1:
                batch = jax.tree.map(lambda x: x[position], batch)
            found = diagnose(self._parts, state, batch, self._mesh, group)
        except Exception as error:
            raise FloatingPointError(f"{text}; why could not be found out. {advice}") from error
        raise FloatingPointError(f"{text} (loss {found.loss}). {found.describe()} {advice}")

    def _counts(self, in_a_row: int, *, skipped: int = 0) -> Any:
        return _jax.replicate(np.array([in_a_row, 0, skipped], np.float32), self._mesh)


def _of_epoch() -> str:
    """Returns " of epoch 3", or nothing outside an epoch, as in `train_on_batch`."""
    epoch = phases.here().epoch
    return f" of epoch {epoch}" if epoch else ""


def _first_left(started: _Started, in_a_row: int) -> int:
    """Returns the number of the first of the last steps that were left, from 1 on."""
    return started.index - in_a_row + 1
