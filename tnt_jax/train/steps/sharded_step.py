"""The training step whose update runs on sharded arrays, outside `shard_map`.

What is sharded is decided by a `Placement`: the optimizer state alone, or the parameters as
well, as in `tnt_jax.sharded`.

With the optimizer state alone (ZeRO-1; Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1)
gradients are reduce-scattered, each rank updates its shard of the parameters, and the shards are
gathered. Arrays keep their shapes and are sharded along one dimension. The compiler adds the
communication that an optimizer needs, such as for the norm of a whole array. So all Optax
transformations work, and a checkpoint does not depend on the number of ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tnt_jax import _jax
from tnt_jax.distributed.sums.reduction import Reduction, StateAverage, in_buckets, psum, split_like
from tnt_jax.train.contracts import Batch, Parts, TrainingStep
from tnt_jax.train.finite import is_finite_step, scale_alone, take_or_leave
from tnt_jax.train.state import TrainState
from tnt_jax.train.steps.epoch_sums import add_sums, num_real_rows
from tnt_jax.train.steps.step import (
    REPLICATED,
    accumulate,
    compiled,
    differentiate,
    repeated,
    share_of_rows,
    sums_of_numbers,
)


def shard_dim(shape: Sequence[int], num_ranks: int) -> int | None:
    """Returns the largest dimension that `num_ranks` divides, along which to shard, or None."""
    fitting = [dim for dim, size in enumerate(shape) if size and size % num_ranks == 0]
    return max(fitting, key=lambda dim: shape[dim], default=None)


def shard_spec(
    shape: Sequence[int], num_ranks: int, axes: Any = _jax.DATA_AXIS, *, before: int = 0
) -> PartitionSpec:
    """Returns how an array is sharded over the ranks; its first dimensions `before` are not."""
    dim = shard_dim(shape[before:], num_ranks)
    return PartitionSpec() if dim is None else PartitionSpec(*[None] * (before + dim), axes)


def shardings(tree: Any, mesh: Mesh, *, before: int = 0) -> Any:
    """Returns how each array is sharded over all axes; see `shard_spec`."""

    def sharding(x: Any) -> NamedSharding:
        spec = shard_spec(jnp.shape(x), mesh.size, mesh.axis_names, before=before)
        return NamedSharding(mesh, spec)

    return jax.tree.map(sharding, tree)


class Placement(Protocol):
    """Which arrays of a training state are sharded, and how gradients get there.

    The methods with a body are those of parameters that are whole; `mesh` is that of the ranks.
    """

    mesh: Mesh

    def param_specs(self, params: Any) -> Any:
        """Returns how parameters come to `shard_map`, as a tree or one for all."""
        return REPLICATED

    def grad_specs(self, params: Any) -> Any:
        """Returns how the sums of gradients leave `shard_map`."""
        ...

    def parts(self, parts: Parts, params: Any) -> Parts:
        """Returns what a step computes from parameters as they come to `shard_map`."""
        return parts

    def sum(self, grads: Any, params: Any, *, order: Sequence[int]) -> Any:
        """Returns the sums of this rank's gradients over the ranks, inside `shard_map`.

        The parameters are whole, or described; `order` has indices of the leaves, earliest first.
        """
        ...

    def update(
        self, optimizer: optax.GradientTransformation, grads: Any, params: Any, opt_state: Any
    ) -> tuple[Any, Any]:
        """Returns parameters and optimizer state after an update, outside `shard_map`."""
        ...

    def placed(self, state: TrainState) -> TrainState:
        """Returns a state of a program whose arrays lie where they belong."""
        ...


class ShardedOptimizer(Placement):
    """Shards the optimizer state and accumulated gradients; parameters are whole."""

    def __init__(self, mesh: Mesh, reduction: Reduction) -> None:
        self.mesh = mesh
        self._reduction = reduction

    def grad_specs(self, params: Any) -> Any:
        """Returns how gradients are cut."""
        return jax.tree.map(lambda x: shard_spec(x.shape, self.mesh.size), params)

    def sum(self, grads: Any, params: Any, *, order: Sequence[int]) -> Any:
        """Returns this rank's parts of the sums of gradients; what cannot be sharded is whole."""
        num_ranks = jax.lax.axis_size(_jax.DATA_AXIS)

        def parts_of_bucket(arrays: list[jax.Array]) -> list[jax.Array]:
            dims = [shard_dim(x.shape, num_ranks) for x in arrays]
            whole = [index for index, dim in enumerate(dims) if dim is None]
            results = dict(zip(whole, psum([arrays[index] for index in whole]), strict=True))
            sharded = [(index, dim) for index, dim in enumerate(dims) if dim is not None]
            if sharded:
                moved = [jnp.moveaxis(arrays[index], dim, 0) for index, dim in sharded]
                rows = jnp.concatenate([x.reshape(num_ranks, -1) for x in moved], axis=1)
                own = jax.lax.psum_scatter(rows, _jax.DATA_AXIS, scatter_dimension=0)
                like = [
                    jax.ShapeDtypeStruct((len(x) // num_ranks, *x.shape[1:]), x.dtype)
                    for x in moved
                ]
                for (index, dim), part in zip(sharded, split_like(own, like), strict=True):
                    results[index] = jnp.moveaxis(part, 0, dim)
            return [results[index] for index in range(len(arrays))]

        return in_buckets(parts_of_bucket, grads, self._reduction, order=order)

    def update(
        self, optimizer: optax.GradientTransformation, grads: Any, params: Any, opt_state: Any
    ) -> tuple[Any, Any]:
        """Returns whole parameters and sharded optimizer state; gradients are sharded alike."""

        def sharded(tree: Any) -> Any:
            return jax.lax.with_sharding_constraint(tree, shardings(tree, self.mesh))

        shards = sharded(params)
        updates, opt_state = optimizer.update(grads, opt_state, shards)
        whole = NamedSharding(self.mesh, PartitionSpec())
        new = sharded(optax.apply_updates(shards, updates))
        return jax.lax.with_sharding_constraint(new, whole), sharded(opt_state)

    def placed(self, state: TrainState) -> TrainState:
        """Returns a state whose optimizer state and accumulated gradients are sharded."""
        return jax.lax.with_sharding_constraint(state, state_shardings(state, self.mesh))


def state_shardings(state: TrainState, mesh: Mesh) -> TrainState:
    """Returns the shardings of a state with sharded optimizer state and accumulated gradients."""
    whole = NamedSharding(mesh, PartitionSpec())
    return replace(
        jax.tree.map(lambda _: whole, replace(state, opt_state=None, accumulated=None)),
        opt_state=shardings(state.opt_state, mesh),
        accumulated=shardings(state.accumulated, mesh, before=1),
    )


def make_sharded_train_step(
    training: TrainingStep, placement: Placement, *, stacked: bool = False
) -> Callable:
    """Returns the jitted function `(state, sums, batch) -> (state, sums)`; see `Steps.train`.

    Each step sums its gradients over the ranks, which keep the parts that they update. If
    `stacked`, it is a program of several steps, for arrays `[steps, rows, ...]`.
    """
    parts, optimizer, accumulation_steps, on_nan = training
    mesh = placement.mesh
    platform = mesh.devices.flat[0].platform
    by_row: Any = PartitionSpec(_jax.rank_axes(mesh))

    def update(grads: Any, params: Any, opt_state: Any) -> tuple[Any, Any]:
        return placement.update(optimizer, grads, params, opt_state)

    def step(state: TrainState, sums: Any, batch: Batch) -> tuple[TrainState, Any]:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state.params)

        def work(state: TrainState, sums: Any, batch: Batch) -> tuple[Any, Any, Any, Any]:
            local = differentiate(placement.parts(parts, shapes), state, batch, mesh)
            # Each rank has a part of the sums alone: the check must precede them.
            (loss, losses, increments), unfit = sums_of_numbers(
                local, state, mesh, checked=on_nan and local.grads
            )
            rows = num_real_rows(batch)
            average = StateAverage(local.model_state, share_of_rows(batch, rows))
            model_state = average.result(psum(average.summands))
            grads = placement.sum(local.grads, shapes, order=local.order)
            new_sums = add_sums(sums, loss, losses, increments, rows)
            is_finite = on_nan and is_finite_step(
                state, model_state, loss, None, found=jnp.equal(unfit, 0)
            )
            return grads, model_state, new_sums, (is_finite, loss)

        mapped = _jax.shard_map(
            work,
            mesh=mesh,
            in_specs=(
                TrainState(REPLICATED, placement.param_specs(shapes), *[REPLICATED] * 5),
                REPLICATED,
                by_row,
            ),
            out_specs=(placement.grad_specs(shapes), REPLICATED, REPLICATED, REPLICATED),
        )
        read = replace(state, opt_state=scale_alone(state.opt_state), accumulated=None)
        grads, model_state, new_sums, (is_finite, loss) = mapped(read, sums, batch)

        def finish() -> tuple[TrainState, Any]:
            arrays = accumulate(state, grads, update, accumulation_steps)
            return state.after_step(*arrays, model_state=model_state), new_sums

        before = state, sums
        new_state, taken_sums = take_or_leave(
            on_nan, lambda: is_finite, before, finish, loss=loss, platform=platform, in_parts=True
        )
        return placement.placed(new_state), taken_sums

    return compiled(repeated(step) if stacked else step, mesh, donate_argnums=0)
