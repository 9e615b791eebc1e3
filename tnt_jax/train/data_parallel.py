"""The fastest steps: one program per step, with gradients summed as `Reduction` says."""

from collections.abc import Callable
from dataclasses import replace

import optax
from jax.sharding import NamedSharding, PartitionSpec

from tnt_jax import _jax
from tnt_jax.adapters.base import Variables
from tnt_jax.data.feed import rank_slice_of
from tnt_jax.distributed import sharded_update
from tnt_jax.distributed.gradients import EpochExchange
from tnt_jax.distributed.reduction import Reduction
from tnt_jax.distributed.runtime import Runtime
from tnt_jax.train.contracts import Apply, Parts
from tnt_jax.train.execution import mapped, scanned
from tnt_jax.train.finite import OnNaN
from tnt_jax.train.loss_scale import check_uncompressed
from tnt_jax.train.sharded_step import make_sharded_train_step, make_sharded_train_steps
from tnt_jax.train.state import TrainState, create_state
from tnt_jax.train.step import make_eval_step, make_predict_step, make_train_step, make_train_steps


class DataParallelSteps:
    """Implements `Steps` with one program per step.

    Args:
        runtime: Mesh to train on.
        reduction: How gradients are summed over the ranks.

    Attributes:
        rank_slice: The slice of the data axis that this process feeds.
        fused: Several steps as one program.
        takes_host_arrays: Always True.
        reduction: How gradients are summed over the ranks.
    """

    takes_host_arrays = True

    def __init__(self, runtime: Runtime, reduction: Reduction) -> None:
        self.reduction = reduction
        self.rank_slice = rank_slice_of(runtime)
        self.fused = _FusedSteps(runtime, reduction)
        self._mesh = runtime.mesh
        self._exchange = EpochExchange(reduction)

    def begin_epoch(self, epoch: int, step: int, update: int) -> None:
        """Records the position in training; see `EpochExchange.begin`."""
        self._exchange.begin(epoch, step, update)

    def end_epoch(self, num_steps: int) -> None:
        """Raises on all processes unless all have ended the epoch after `num_steps` steps.

        Checked only if the ring sums the gradients.
        """
        self._exchange.end(num_steps)

    def train(
        self,
        parts: Parts,
        optimizer: optax.GradientTransformation,
        *,
        accumulation_steps: int,
        on_nan: OnNaN | None = None,
    ) -> Callable:
        """Returns the function `(state, sums, batch) -> (state, sums)`; see `Steps.train`.

        Every process must call it.
        """
        self._exchange.prepare()
        make = make_sharded_train_step if self.reduction.shard_optimizer_state else make_train_step
        return make(
            parts,
            optimizer,
            self._mesh,
            reduction=self.reduction,
            accumulation_steps=accumulation_steps,
            on_nan=on_nan,
        )

    def evaluate(self, parts: Parts) -> Callable:
        """Returns the function `(params, model_state, sums, batch) -> sums`."""
        return make_eval_step(parts, self._mesh)

    def predict(self, apply: Apply) -> Callable:
        """Returns the function `(params, model_state, inputs) -> outputs`."""
        return make_predict_step(apply, self._mesh)

    def create_state(
        self,
        variables: Variables,
        optimizer: optax.GradientTransformation,
        *,
        seed: int,
        accumulation_steps: int,
    ) -> TrainState:
        """Returns the state before the first update, as host arrays."""
        state = create_state(
            *variables,
            optimizer,
            seed=seed,
            accumulating_ranks=self._mesh.size if accumulation_steps > 1 else 0,
            compressing_ranks=self._mesh.size if self.reduction.keeps_residual else 0,
        )
        if self.reduction.keeps_residual:
            check_uncompressed(state.opt_state)
        return state

    def put_state(self, state: TrainState) -> TrainState:
        """Puts a state of host or device arrays on the devices."""
        # Each rank holds its own row of the accumulated gradients and of the residuals of
        # compression.
        accumulated, residual = _jax.shard_rows((state.accumulated, state.residual), self._mesh)
        opt_state = state.opt_state
        if self.reduction.shard_optimizer_state:
            opt_state = _jax.put(opt_state, sharded_update.shardings(opt_state, self._mesh))
        else:
            opt_state = _jax.replicate(opt_state, self._mesh)
        shared = _jax.replicate(
            replace(state, opt_state=None, accumulated=None, residual=None), self._mesh
        )
        return replace(shared, opt_state=opt_state, accumulated=accumulated, residual=residual)


class _FusedSteps:
    """Implements `FusedSteps` with loops inside a program."""

    def __init__(self, runtime: Runtime, reduction: Reduction) -> None:
        self._runtime = runtime
        self._reduction = reduction
        self._sharding = NamedSharding(runtime.mesh, PartitionSpec(None, _jax.DATA_AXIS))

    def train(
        self,
        parts: Parts,
        optimizer: optax.GradientTransformation,
        *,
        accumulation_steps: int,
        on_nan: OnNaN | None = None,
    ) -> Callable:
        """Returns the function `(state, sums, batches) -> (state, sums)`."""
        make = (
            make_sharded_train_steps if self._reduction.shard_optimizer_state else make_train_steps
        )
        return make(
            parts,
            optimizer,
            self._runtime.mesh,
            reduction=self._reduction,
            accumulation_steps=accumulation_steps,
            on_nan=on_nan,
        )

    def evaluate(self, step: Callable) -> Callable:
        """Returns the function `(params, model_state, sums, batches) -> sums`."""
        return scanned(step, self._sharding)

    def predict(self, step: Callable) -> Callable:
        """Returns the function `(params, model_state, inputs) -> outputs`."""
        return mapped(step, self._sharding)
