"""The training step with sharded optimizer state; see `tnt_jax.distributed.sharded_update`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from tnt_jax import _jax
from tnt_jax.distributed.averages import StateAverage
from tnt_jax.distributed.fused_psum import psum
from tnt_jax.distributed.reduction import Reduction
from tnt_jax.distributed.sharded_update import (
    scatter,
    shard_spec,
    shardings,
    update_shards,
)
from tnt_jax.train.contracts import Batch, Parts
from tnt_jax.train.epoch_sums import add_sums, num_real_rows
from tnt_jax.train.finite import OnNaN, is_finite_step, take_or_leave
from tnt_jax.train.loss_scale import scale_alone
from tnt_jax.train.state import TrainState
from tnt_jax.train.step import (
    compiled,
    differentiate,
    repeated,
    share_of_rows,
    sums_of_numbers,
)

_REPLICATED: Any = PartitionSpec()
_BY_ROW: Any = PartitionSpec(_jax.DATA_AXIS)


def make_sharded_train_step(
    parts: Parts,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    reduction: Reduction,
    accumulation_steps: int = 1,
    on_nan: OnNaN | None = None,
) -> Callable:
    """Returns the jitted function `(state, sums, batch) -> (state, sums)`.

    The arguments are those of `make_train_step`.
    """
    return compiled(
        _sharded_step(parts, optimizer, mesh, reduction, accumulation_steps, on_nan),
        mesh,
        donate_argnums=0,
    )


def make_sharded_train_steps(
    parts: Parts,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    *,
    reduction: Reduction,
    accumulation_steps: int = 1,
    on_nan: OnNaN | None = None,
) -> Callable:
    """Returns the jitted function `(state, sums, batches) -> (state, sums)`.

    It is one program for several steps.
    """
    return compiled(
        repeated(_sharded_step(parts, optimizer, mesh, reduction, accumulation_steps, on_nan)),
        mesh,
        donate_argnums=0,
    )


def _sharded_step(
    parts: Parts,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    reduction: Reduction,
    accumulation_steps: int,
    on_nan: OnNaN | None,
) -> Callable[[TrainState, Any, Batch], tuple[TrainState, Any]]:
    """Returns one training step with sharded optimizer state over all ranks.

    It runs outside `shard_map`.
    """
    if accumulation_steps > 1:
        raise ValueError(
            "shard_optimizer_state cannot be combined with gradient_accumulation_steps "
            f"({accumulation_steps}): each rank would still keep whole accumulated gradients. Use "
            "a larger batch, or leave one of the two out."
        )

    def work(state: TrainState, sums: Any, batch: Batch) -> tuple[Any, Any, Any, Any]:
        local = differentiate(parts, state, batch, mesh)
        # Each rank has a part of the sums alone: the check must precede them.
        (loss, losses, increments), unfit = sums_of_numbers(
            local, state, mesh, checked=on_nan and local.grads
        )
        rows = num_real_rows(batch)
        average = StateAverage(local.model_state, share_of_rows(batch, rows))
        model_state = average.result(psum(average.summands))
        grads = scatter(local.grads, reduction, order=local.order)
        new_sums = add_sums(sums, loss, losses, increments, rows)
        is_finite = None
        if on_nan is not None:
            is_finite = is_finite_step(state, model_state, loss, None, found=jnp.equal(unfit, 0))
        return grads, model_state, new_sums, (is_finite, loss)

    def step(state: TrainState, sums: Any, batch: Batch) -> tuple[TrainState, Any]:
        in_parts = jax.tree.map(lambda x: shard_spec(x.shape, mesh.size), state.params)
        mapped = _jax.shard_map(
            work,
            mesh=mesh,
            in_specs=(_REPLICATED, _REPLICATED, _BY_ROW),
            out_specs=(in_parts, _REPLICATED, _REPLICATED, _REPLICATED),
        )
        grads, model_state, new_sums, (is_finite, loss) = mapped(
            replace(state, opt_state=scale_alone(state.opt_state)), sums, batch
        )

        def finish() -> tuple[TrainState, Any]:
            params, opt_state = update_shards(optimizer, grads, state.params, state.opt_state, mesh)
            new_state = replace(
                state,
                step=state.step + 1,
                params=params,
                model_state=model_state,
                opt_state=opt_state,
            )
            return new_state, new_sums

        if on_nan is None:
            return finish()
        new_state, taken_sums = take_or_leave(
            on_nan,
            is_finite,
            (state, sums),
            finish,
            loss=loss,
            platform=mesh.devices.flat[0].platform,
            in_parts=True,
        )
        # The state of the optimizer stays in parts.
        parts_of_state = shardings(new_state.opt_state, mesh)
        opt_state = jax.lax.with_sharding_constraint(new_state.opt_state, parts_of_state)
        return replace(new_state, opt_state=opt_state), taken_sums

    return step
