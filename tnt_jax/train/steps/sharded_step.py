"""The training step whose update runs on parts of arrays, outside `shard_map`.

What lies in parts is decided by a `Placement`: the optimizer state alone, as in
`tnt_jax.distributed.sums.sharded_update`, or the parameters as well, as in `tnt_jax.sharded`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tnt_jax import _jax
from tnt_jax.distributed.sums.averages import StateAverage
from tnt_jax.distributed.sums.fused_psum import psum
from tnt_jax.distributed.sums.reduction import Reduction
from tnt_jax.distributed.sums.sharded_update import scatter, shard_spec, shardings, update_shards
from tnt_jax.train.contracts import Batch, Parts
from tnt_jax.train.finite import OnNaN, is_finite_step, scale_alone, take_or_leave
from tnt_jax.train.state import TrainState
from tnt_jax.train.steps.epoch_sums import add_sums, num_real_rows
from tnt_jax.train.steps.step import (
    accumulate,
    compiled,
    differentiate,
    repeated,
    share_of_rows,
    sums_of_numbers,
)

_REPLICATED: Any = PartitionSpec()


class Placement(Protocol):
    """Which arrays of a training state lie in parts, and how gradients get there."""

    @property
    def mesh(self) -> Mesh:
        """The mesh of the ranks."""
        ...

    def param_specs(self, params: Any) -> Any:
        """Returns how parameters come to `shard_map`, as a tree or one for all."""
        ...

    def grad_specs(self, params: Any) -> Any:
        """Returns how the sums of gradients leave `shard_map`."""
        ...

    def parts(self, parts: Parts, params: Any) -> Parts:
        """Returns what a step computes from parameters as they come to `shard_map`."""
        ...

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


class ShardedOptimizer:
    """Keeps the optimizer state in parts, and accumulated gradients; parameters are whole."""

    def __init__(self, mesh: Mesh, reduction: Reduction) -> None:
        self.mesh = mesh
        self._reduction = reduction

    def param_specs(self, params: Any) -> Any:
        """Returns that parameters are whole."""
        return _REPLICATED

    def grad_specs(self, params: Any) -> Any:
        """Returns how gradients are cut."""
        return jax.tree.map(lambda x: shard_spec(x.shape, self.mesh.size), params)

    def parts(self, parts: Parts, params: Any) -> Parts:
        """Returns `parts`."""
        return parts

    def sum(self, grads: Any, params: Any, *, order: Sequence[int]) -> Any:
        """Returns this rank's parts of the sums of gradients; see `scatter`."""
        return scatter(grads, self._reduction, order=order)

    def update(
        self, optimizer: optax.GradientTransformation, grads: Any, params: Any, opt_state: Any
    ) -> tuple[Any, Any]:
        """Returns whole parameters and optimizer state in parts; see `update_shards`."""
        return update_shards(optimizer, grads, params, opt_state, self.mesh)

    def placed(self, state: TrainState) -> TrainState:
        """Returns a state whose optimizer state and accumulated gradients are in parts."""
        return jax.lax.with_sharding_constraint(state, shardings_in_parts(state, self.mesh))


def shardings_in_parts(state: TrainState, mesh: Mesh) -> TrainState:
    """Returns the shardings of a state: in parts are optimizer state and accumulated gradients."""
    whole = NamedSharding(mesh, PartitionSpec())
    return replace(
        jax.tree.map(lambda _: whole, replace(state, opt_state=None, accumulated=None)),
        opt_state=shardings(state.opt_state, mesh),
        accumulated=shardings(state.accumulated, mesh, before=1),
    )


def make_sharded_train_step(
    parts: Parts,
    optimizer: optax.GradientTransformation,
    placement: Placement,
    *,
    accumulation_steps: int = 1,
    on_nan: OnNaN | None = None,
    stacked: bool = False,
) -> Callable:
    """Returns the jitted function `(state, sums, batch) -> (state, sums)`; see `Steps.train`.

    Each step sums its gradients over the ranks, which keep the parts that they update. If
    `stacked`, it is a program of several steps, for arrays `[steps, rows, ...]`.
    """
    mesh = placement.mesh
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
            is_finite = None
            if on_nan is not None:
                found = jnp.equal(unfit, 0)
                is_finite = is_finite_step(state, model_state, loss, None, found=found)
            return grads, model_state, new_sums, (is_finite, loss)

        mapped = _jax.shard_map(
            work,
            mesh=mesh,
            in_specs=(
                TrainState(
                    *(_REPLICATED, placement.param_specs(shapes), *(_REPLICATED,) * 3),
                    accumulated=_REPLICATED,
                    residual=_REPLICATED,
                ),
                _REPLICATED,
                by_row,
            ),
            out_specs=(placement.grad_specs(shapes), _REPLICATED, _REPLICATED, _REPLICATED),
        )
        read = replace(state, opt_state=scale_alone(state.opt_state), accumulated=None)
        grads, model_state, new_sums, (is_finite, loss) = mapped(read, sums, batch)

        def finish() -> tuple[TrainState, Any]:
            params, opt_state, accumulated = accumulate(state, grads, update, accumulation_steps)
            new_state = replace(
                state,
                step=state.step + 1,
                params=params,
                model_state=model_state,
                opt_state=opt_state,
                accumulated=accumulated,
            )
            return new_state, new_sums

        if on_nan is None:
            new_state, taken_sums = finish()
        else:
            new_state, taken_sums = take_or_leave(
                on_nan,
                is_finite,
                (state, sums),
                finish,
                loss=loss,
                platform=mesh.devices.flat[0].platform,
                in_parts=True,
            )
        return placement.placed(new_state), taken_sums

    return compiled(repeated(step) if stacked else step, mesh, donate_argnums=0)
