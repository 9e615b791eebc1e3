"""Sharded parameters, gradients and optimizer state (ZeRO-3), for `train.steps.sharded_step`.

Rajbhandari et al. 2020, arXiv:1910.02054, section 5.3. The update runs outside `shard_map` on
arrays that are sharded: the compiler adds the communication that a transformation needs, such as
for a norm of all gradients. So all Optax transformations work and give what they give on one
device.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from tnt_jax import _jax
from tnt_jax.adapters.base import Applied
from tnt_jax.distributed.sums.fused_psum import psum
from tnt_jax.distributed.sums.reduction import Reduction, in_buckets
from tnt_jax.sharded.gathering import gather_where_used
from tnt_jax.sharded.layout import Layout
from tnt_jax.sharded.staging import at_stages
from tnt_jax.train.contracts import Apply, Batch, Measured, Parts
from tnt_jax.train.state import TrainState, updated
from tnt_jax.train.state_arrays import state_arrays


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


class ShardedParams:
    """Keeps parameters, gradients and optimizer state sharded.

    `layout_of` takes whole parameters or their descriptions; `has_remat` is as of
    `gather_where_used`. `pipelining` returns what computes a step and its gradients in a pipeline;
    None for the derivative of what a step computes.
    """

    def __init__(
        self,
        mesh: Mesh,
        reduction: Reduction,
        layout_of: Callable[[Any], Layout],
        *,
        has_remat: bool = False,
        pipelining: Callable[[Parts, Layout], Parts] | None = None,
    ) -> None:
        self.mesh = mesh
        self._reduction = reduction
        self._layout_of = layout_of
        self._has_remat = has_remat
        self._pipelining = pipelining

    def param_specs(self, params: Any) -> Any:
        """Returns how the parameters, and their gradients, are cut over `fsdp`."""
        return self._layout_of(params).manual_specs

    grad_specs = param_specs

    def parts(self, parts: Parts, params: Any) -> Parts:
        """Returns what gathers the parameters and computes `parts` from them."""
        layout = self._layout_of(params)
        if self._pipelining is not None:
            return self._pipelining(parts, layout)
        return GatheredParts(parts, layout, has_remat=self._has_remat)

    def sum(self, grads: Any, params: Any, *, order: Sequence[int]) -> Any:
        """Returns the sums of gradients; what was cut is summed over `fsdp` already."""
        cuts = self._layout_of(params).cuts

        def total_of_bucket(arrays: list[jax.Array], indices: list[int]) -> list[jax.Array]:
            whole = [cuts[index] is None for index in indices]
            sums = iter(psum([x for x, is_whole in zip(arrays, whole, strict=True) if is_whole]))
            parts = [x for x, is_whole in zip(arrays, whole, strict=True) if not is_whole]
            # Over the copies of the model.
            totals = iter(psum(parts, axis_name=_jax.DATA_AXIS) if parts else [])
            return [next(sums) if is_whole else next(totals) for is_whole in whole]

        return in_buckets(total_of_bucket, grads, self._reduction, order=order, with_indices=True)

    def update(
        self, optimizer: optax.GradientTransformation, grads: Any, params: Any, opt_state: Any
    ) -> tuple[Any, Any]:
        """Returns parameters and optimizer state after an update, all sharded."""
        params, opt_state = updated(optimizer, self._like(grads), params, opt_state)
        return self._like(params), opt_state

    def placed(self, state: TrainState) -> TrainState:
        """Returns a state of a program whose arrays are sharded as the layout says."""
        layout = self._layout_of(state.params)
        opt_state, accumulated = jax.lax.with_sharding_constraint(
            (state.opt_state, state.accumulated),
            (layout.like_params(state.opt_state), layout.like_params(state.accumulated, before=1)),
        )
        return replace(
            state, params=self._like(state.params), opt_state=opt_state, accumulated=accumulated
        )

    def _like(self, params: Any) -> Any:
        return jax.lax.with_sharding_constraint(params, self._layout_of(params).shardings)
