"""Compiled steps of a model that is sharded over a mesh."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tnt_jax import _jax
from tnt_jax.adapters.base import Applied, Variables
from tnt_jax.data.feed import rank_slice_of
from tnt_jax.distributed.joining.runtime import Runtime
from tnt_jax.distributed.sums.reduction import Reduction, in_buckets, psum
from tnt_jax.sharded.gathering import gather_where_used
from tnt_jax.sharded.layout import Layout, at_stages
from tnt_jax.sharded.options import Dims, Rule
from tnt_jax.sharded.pipeline.pipeline import Pipeline
from tnt_jax.sharded.pipelined_parts import PipelinedParts
from tnt_jax.train.contracts import Apply, Batch, Measured, Parts, Start, Steps, TrainingStep
from tnt_jax.train.state import TrainState, copied, create_state, state_arrays, updated
from tnt_jax.train.steps.data_parallel import fused_loops
from tnt_jax.train.steps.global_step import WholeBatches, global_mesh
from tnt_jax.train.steps.sharded_step import make_sharded_train_step
from tnt_jax.train.steps.step import REPLICATED, compiled, evaluation, prediction

# Parameters, gradients and the two moments of Adam.
_ARRAYS_LIKE_PARAMS = 4


class GatheredParts:
    """Implements `Parts` for sharded parameters, which are gathered where they are used."""

    def __init__(self, parts: Parts, layout: Layout, *, has_remat: bool = False) -> None:
        self.rows_at_once = parts.rows_at_once
        self._parts = parts
        self._layout = layout
        self._has_remat = has_remat

    def measure(
        self, params: Any, model_state: Any, batch: Batch, *, key: jax.Array | None, train: bool
    ) -> Measured:
        """Returns loss and metrics of one rank's rows; inside `shard_map`."""

        def measure(params: Any) -> Measured:
            return self._parts.measure(params, model_state, batch, key=key, train=train)

        here = at_stages(params, self._layout)
        measured = gather_where_used(measure, here.params, here.cuts, has_remat=self._has_remat)
        if train:
            _check_statistics(measured.model_state)
        return measured


def gathered_apply(apply: Apply, layout: Layout) -> Callable:
    """Returns a forward pass whose parameters are sharded; see `Apply`."""

    def in_parts(params: Any, model_state: Any, inputs: Any, **options: Any) -> Applied:
        def whole(params: Any) -> Applied:
            return apply(params, model_state, inputs, **options)

        here = at_stages(params, layout)
        return gather_where_used(whole, here.params, here.cuts, has_remat=False)

    return in_parts


def _check_statistics(model_state: Any) -> None:
    for path, x in state_arrays(model_state).items():
        if _jax.is_varying(x):
            raise ValueError(
                f"The model state {path} {list(x.shape)} is computed from each rank's own rows, as "
                "by BatchNorm, so that results would depend on the mesh. Use LayerNorm or "
                "GroupNorm; or synchronize the statistics over the axes of the ranks: "
                f"BatchNorm(axis_name={_jax.rank_axes()!r}) in Flax, synchronized=True in Keras."
            )


@dataclass(eq=False)
class ShardedParams:
    """Keeps parameters, gradients and optimizer state sharded (ZeRO-3), for `sharded_step`.

    Rajbhandari et al. 2020, arXiv:1910.02054, section 5.3. The update runs outside `shard_map` on
    arrays that are sharded: the compiler adds the communication that a transformation needs, such
    as for a norm of all gradients. So all Optax transformations give what they give on one device.
    """

    mesh: Mesh
    reduction: Reduction
    layout_of: Callable[[Any], Layout]  # Of whole parameters, or of their descriptions.
    parts_of: Callable[[Parts, Layout], Parts]  # Returns what computes parts from sharded ones.

    def param_specs(self, params: Any) -> Any:
        """Returns how the parameters, and their gradients, are cut over `fsdp`."""
        return self.layout_of(params).manual_specs

    grad_specs = param_specs

    def parts(self, parts: Parts, params: Any) -> Parts:
        """Returns what gathers the parameters and computes `parts` from them."""
        return self.parts_of(parts, self.layout_of(params))

    def sum(self, grads: Any, params: Any, *, order: Sequence[int]) -> Any:
        """Returns the sums of gradients; what was cut is summed over `fsdp` already."""
        cuts = self.layout_of(params).cuts

        def total_of_bucket(arrays: list[jax.Array], indices: list[int]) -> list[jax.Array]:
            whole = [cuts[index] is None for index in indices]
            sums = iter(psum([x for x, is_whole in zip(arrays, whole, strict=True) if is_whole]))
            parts = [x for x, is_whole in zip(arrays, whole, strict=True) if not is_whole]
            # Over the copies of the model.
            totals = iter(psum(parts, axis_name=_jax.DATA_AXIS) if parts else [])
            return [next(sums) if is_whole else next(totals) for is_whole in whole]

        return in_buckets(total_of_bucket, grads, self.reduction, order=order, with_indices=True)

    def update(
        self, optimizer: optax.GradientTransformation, grads: Any, params: Any, opt_state: Any
    ) -> tuple[Any, Any]:
        """Returns parameters and optimizer state after an update, all sharded."""
        params, opt_state = updated(optimizer, self._like(grads), params, opt_state)
        return self._like(params), opt_state

    def placed(self, state: TrainState) -> TrainState:
        """Returns a state of a program whose arrays are sharded as the layout says."""
        layout = self.layout_of(state.params)
        opt_state, accumulated = jax.lax.with_sharding_constraint(
            (state.opt_state, state.accumulated),
            (layout.like_params(state.opt_state), layout.like_params(state.accumulated, before=1)),
        )
        return replace(
            state, params=self._like(state.params), opt_state=opt_state, accumulated=accumulated
        )

    def _like(self, params: Any) -> Any:
        return jax.lax.with_sharding_constraint(params, self.layout_of(params).shardings)


class ShardedSteps(Steps):
    """Steps with sharded parameters, gradients and optimizer state.

    Rules are those of `tnt_jax.sharded.options`, and `names` returns the logical names that they
    may use. With `has_remat`, what a step computes rematerializes blocks; otherwise everything is
    kept for backpropagation but gathered parameters. `policy` says what the layers of a pipeline by
    1F1B keep, a policy of `jax.checkpoint`; None for everything. GPipe has it from `pipelined`.
    """

    def __init__(
        self,
        runtime: Runtime,
        reduction: Reduction,
        *,
        rules: Sequence[Rule] = (),
        names: Callable[[], Dims] = dict,
        has_remat: bool = False,
        pipeline: Pipeline | None = None,
        policy: Any = None,
    ) -> None:
        self.rank_slice = rank_slice_of(runtime)
        self.mesh = self._named = runtime.mesh
        self._rules = rules
        self._names = names
        self._pipeline = pipeline
        parts_of: Any = partial(GatheredParts, has_remat=has_remat)
        is_staged = self.mesh.shape.get(_jax.STAGE_AXIS, 1) > 1
        if pipeline is not None and pipeline.schedule == "1f1b" and is_staged:
            parts_of = partial(PipelinedParts, pipeline=pipeline, policy=policy)
        self.placement = ShardedParams(self.mesh, reduction, self.layout_of, parts_of)
        self._by_row: Any = PartitionSpec(_jax.rank_axes(self.mesh))
        stacked = NamedSharding(self.mesh, PartitionSpec(None, *self._by_row))
        train = partial(make_sharded_train_step, placement=self.placement, stacked=True)
        self.fused: Any = fused_loops(train, stacked)

    def layout_of(self, params: Any) -> Layout:
        """Returns the layout of whole parameters or of their descriptions; see `Layout.of`."""
        return Layout.of(params, self._named, self._rules, self._names(), self._pipeline)

    def why_rows_move(self, params: Any, nbytes: int) -> str | None:
        """Returns why a step had better move rows than parameters; None if it had not.

        Where the products of a batch with parameters (`nbytes`) are smaller than the parameters,
        less is exchanged if each device computes all rows with its part of the parameters. Each
        then holds all products, so they must not be larger than what it holds of parameters,
        gradients and two moments. A pipeline needs parts of batches.
        """
        leaves = zip(jax.tree.leaves(params), self.layout_of(params).cuts, strict=True)
        cut = sum(x.size * x.dtype.itemsize for x, how in leaves if how is not None)
        num_parts = self._named.shape.get(_jax.FSDP_AXIS, 1)
        is_less = nbytes <= min(cut, _ARRAYS_LIKE_PARAMS * cut // num_parts)
        if not is_less or num_parts == 1 or self._pipeline is not None:
            return None
        return (
            f"The products of a global batch ({nbytes / 2**20:.3g} MiB) are smaller than the "
            f"sharded parameters ({cut / 2**20:.3g} MiB)"
        )

    def train(self, training: TrainingStep) -> Callable:
        """Returns the function `(state, sums, batch) -> (state, sums)`; see `Steps.train`."""
        if self._pipeline is not None and (on_nan := training.on_nan) is not None:
            raise ValueError(
                f"on_nan={on_nan!r} cannot be combined with a pipeline: a stage sees the gradients "
                "of its own layers alone. Leave on_nan out; TerminateOnNaN looks at the loss."
            )
        return make_sharded_train_step(training, self.placement)

    def evaluate(self, parts: Parts) -> Callable:
        """Returns the function `(params, model_state, sums, batch) -> sums`."""

        def rank_step(layout: Layout) -> Callable:
            return evaluation(GatheredParts(parts, layout), self.mesh)

        return self._mapped(rank_step, REPLICATED, self._by_row, out=REPLICATED)

    def predict(self, apply: Apply) -> Callable:
        """Returns the function `(params, model_state, inputs, first_row) -> outputs`."""

        def rank_step(layout: Layout) -> Callable:
            return prediction(gathered_apply(apply, layout))

        return self._mapped(rank_step, self._by_row, REPLICATED, out=self._by_row)

    def make_variables(self, make: Callable[[], Variables]) -> Variables | None:
        """Returns fresh variables, of which each device makes its parts alone."""
        shapes = jax.eval_shape(make)
        whole = NamedSharding(self.mesh, PartitionSpec())
        shardings = Variables(
            self.layout_of(shapes.params).shardings,
            jax.tree.map(lambda _: whole, shapes.model_state),
        )
        return jax.jit(make, out_shardings=shardings)()

    def create_state(self, variables: Variables, start: Start) -> TrainState:
        """Returns the state before the first update, whose arrays are made sharded."""
        layout, init = self.layout_of(variables.params), start.optimizer.init
        params = _jax.put(copied(variables.params), layout.shardings)
        state = create_state({}, variables.model_state, optax.identity(), seed=start.seed)
        shapes = jax.eval_shape(init, params)
        opt_state = jax.jit(init, out_shardings=layout.like_params(shapes))(params)
        accumulated = None
        if start.accumulation_steps > 1:
            zeros = partial(jax.tree.map, lambda x: jnp.zeros((1, *x.shape), x.dtype))
            cut = layout.like_params(jax.eval_shape(zeros, params), before=1)
            accumulated = jax.jit(zeros, out_shardings=cut)(params)
        shared = _jax.replicate(state, self.mesh)
        return replace(shared, params=params, opt_state=opt_state, accumulated=accumulated)

    def put_state(self, state: TrainState) -> TrainState:
        """Puts a copy of a state of host or device arrays on the devices, sharded."""
        return _jax.put(copied(state), self._shardings(state))

    def place(self, state: TrainState) -> TrainState:
        """Returns descriptions of a state's arrays, with their shardings on the devices."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            state,
            self._shardings(state),
        )

    def _shardings(self, state: TrainState) -> TrainState:
        layout = self.layout_of(state.params)
        whole = NamedSharding(self.mesh, PartitionSpec())
        return replace(
            jax.tree.map(lambda _: whole, replace(state, params=None, opt_state=None)),
            params=layout.shardings,
            opt_state=layout.like_params(state.opt_state),
            accumulated=layout.like_params(state.accumulated, before=1),
        )

    def _mapped(self, rank_step: Callable[[Layout], Callable], *others: Any, out: Any) -> Callable:
        """Returns the jitted step over the ranks of parameters, model state and others."""

        def step(params: Any, *args: Any) -> Any:
            layout = self.layout_of(params)
            specs = (layout.manual_specs, REPLICATED, *others)
            mapped = _jax.shard_map(
                rank_step(layout), mesh=self.mesh, in_specs=specs, out_specs=out
            )
            return mapped(params, *args)

        return compiled(step, self.mesh)


class ShardedGlobalSteps(WholeBatches, ShardedSteps):
    """Implements `Steps` with a sharded state, for whole batches that the compiler divides."""

    def __init__(self, runtime: Runtime, reduction: Reduction, **options: Any) -> None:
        whole = replace(runtime, mesh=global_mesh(runtime.mesh))
        super().__init__(whole, reduction, **options)
        self._named = runtime.mesh
        self._compute_whole_batches(runtime)
