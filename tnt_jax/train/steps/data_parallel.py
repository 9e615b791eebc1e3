"""The fastest steps: one program per step, with gradients summed as `Reduction` says."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tnt_jax import _jax
from tnt_jax.adapters.base import Variables
from tnt_jax.data.feed import rank_slice_of
from tnt_jax.data.layout import RankSlice
from tnt_jax.distributed.joining.runtime import Runtime
from tnt_jax.distributed.sums.reduction import Reduction
from tnt_jax.train.contracts import Apply, FusedSteps, Parts, Start, Steps, TrainingStep
from tnt_jax.train.execution import mapped, scanned
from tnt_jax.train.finite import check_uncompressed
from tnt_jax.train.state import TrainState, create_state, descriptions, started_at_once
from tnt_jax.train.steps.sharded_step import (
    ShardedOptimizer,
    make_sharded_train_step,
    state_shardings,
)
from tnt_jax.train.steps.step import (
    make_eval_step,
    make_predict_step,
    make_train_step,
    sums_every_step,
)


class DataParallelSteps(Steps):
    """Steps with one program each."""

    takes_host_arrays = True

    def __init__(self, runtime: Runtime, reduction: Reduction) -> None:
        self.reduction = reduction
        self.rank_slice = rank_slice_of(runtime)
        self.mesh = runtime.mesh
        self.train = partial(_make_train_step, self.mesh, reduction)
        self.fused = fused_loops(
            partial(_make_train_step, self.mesh, reduction, stacked=True),
            NamedSharding(self.mesh, PartitionSpec(None, _jax.DATA_AXIS)),
        )

    def evaluate(self, parts: Parts) -> Callable:
        """Returns the function `(params, model_state, sums, batch) -> sums`."""
        return make_eval_step(parts, self.mesh)

    def predict(self, apply: Apply) -> Callable:
        """Returns the function `(params, model_state, inputs, first_row) -> outputs`."""
        return make_predict_step(apply, self.mesh)

    def create_state(self, variables: Variables, start: Start) -> TrainState:
        """Returns the state before the first update, on the devices."""
        state = create_state(
            *variables,
            started_at_once(start.optimizer),
            seed=start.seed,
            accumulating_ranks=self._accumulated_rows if start.accumulation_steps > 1 else 0,
            compressing_ranks=self.mesh.size if self.reduction.keeps_residual else 0,
        )
        if self.reduction.keeps_residual:
            check_uncompressed(state.opt_state)
        return self.put_state(state)

    def describe_state(self, variables: Variables, start: Start) -> TrainState | None:
        """Returns descriptions of a new state; None if ranks keep parts of it."""
        if self.reduction.shard_optimizer_state or self.reduction.keeps_residual:
            return None
        optimizer, seed, accumulation_steps = start
        rows = self._accumulated_rows if accumulation_steps > 1 else 0
        create = partial(create_state, optimizer=optimizer, seed=seed, accumulating_ranks=rows)
        return self.place(jax.eval_shape(create, *variables))

    def place(self, state: TrainState) -> TrainState:
        """Returns descriptions of a state's arrays with their shardings; it has no residual."""
        accumulated = descriptions(state.accumulated, rows=self._accumulated_rows)
        state = replace(state, accumulated=accumulated)
        return jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place),
            state,
            self._shardings(state),
        )

    def put_state(self, state: TrainState) -> TrainState:
        """Puts a state of host or device arrays on the devices."""
        names = ["accumulated", "residual"]
        if self.reduction.shard_optimizer_state:
            names.append("opt_state")
        shardings = self._shardings(state)
        parts = {name: _jax.put(getattr(state, name), getattr(shardings, name)) for name in names}
        return replace(_jax.replicate(replace(state, **dict.fromkeys(parts)), self.mesh), **parts)

    @property
    def _accumulated_rows(self) -> int:
        """Rows of accumulated gradients: one of sums over the ranks, or that of each rank."""
        is_sum = self.reduction.shard_optimizer_state or sums_every_step()
        return 1 if is_sum else self.mesh.size

    def _shardings(self, state: TrainState) -> TrainState:
        # Of what a rank keeps of its own gradients, it holds its row.
        by_row = NamedSharding(self.mesh, PartitionSpec(_jax.rank_axes(self.mesh)))
        whole = NamedSharding(self.mesh, PartitionSpec())
        if self.reduction.shard_optimizer_state:
            places = state_shardings(state, self.mesh)
        else:
            places = jax.tree.map(lambda _: whole, state)
            if not sums_every_step():
                own = jax.tree.map(lambda _: by_row, state.accumulated)
                places = replace(places, accumulated=own)
        return replace(places, residual=jax.tree.map(lambda _: by_row, state.residual))


class StepsOfSlice(DataParallelSteps):
    """Steps that run one by one, on batches of which these ranks take a slice of their own."""

    def __init__(self, runtime: Runtime, reduction: Reduction, rank_slice: RankSlice) -> None:
        super().__init__(runtime, reduction)
        self.rank_slice, self.fused = rank_slice, None


def _make_train_step(
    mesh: Mesh, reduction: Reduction, training: TrainingStep, *, stacked: bool = False
) -> Callable:
    """Returns the step of `Steps.train`."""
    if reduction.shard_optimizer_state:
        return make_sharded_train_step(training, ShardedOptimizer(mesh, reduction), stacked=stacked)
    return make_train_step(training, mesh, reduction=reduction, stacked=stacked)


def fused_loops(train: Callable[..., Callable], sharding: NamedSharding) -> FusedSteps:
    """Returns loops inside a program over batches of a sharding; `train` makes that of training."""
    return FusedSteps(
        train, partial(scanned, sharding=sharding), partial(mapped, sharding=sharding)
    )
