"""Training steps by 1F1B: loss and gradients of a rank's rows, a micro-batch at a time.

The measurement of a micro-batch is split at the loop over the layers. The first stage computes what
stands before it, the last stage what follows, with loss and metrics. So no stage keeps outputs, or
activations of more micro-batches than there are stages.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tnt_jax import _jax
from tnt_jax.sharded.gathering import Cut, gather_where_used
from tnt_jax.sharded.layout import Layout, at_stages
from tnt_jax.sharded.pipeline.layers_loop import LayersLoop, Moving, example_of
from tnt_jax.sharded.pipeline.pipeline import Pipeline, check_statistics
from tnt_jax.sharded.pipeline.schedules import (
    STAGE_AXIS,
    Ends,
    axes_of,
    one_forward_one_backward,
    take,
)
from tnt_jax.train.contracts import Batch, LossTerm, Measured, Parts
from tnt_jax.train.steps.micro_batches import MicroRows


@dataclass(frozen=True, eq=False)
class PipelinedParts:
    """Implements `Parts` for training steps whose layers run by 1F1B.

    Parameters come as they lie: of the stacked layers those of this stage, and over `fsdp` in
    parts, which are gathered for each micro-batch. `policy` says what the layers keep within the
    backward pass of a micro-batch; None for everything.
    """

    parts: Parts
    layout: Layout
    pipeline: Pipeline
    policy: Any = None
    rows_at_once = None

    def measure(
        self, params: Any, model_state: Any, batch: Batch, *, key: jax.Array | None, train: bool
    ) -> Measured:
        """Returns loss and metrics of one rank's rows, with gradients; inside `shard_map`."""
        num_rows = jax.tree.leaves(batch.inputs)[0].shape[0]
        rows = MicroRows(num_rows, self.pipeline.microbatches)

        def part(params: Any, micro_batch: Any) -> Measured:
            batch, words = micro_batch
            own = rows.key(key, words)
            return self.parts.measure(params, model_state, batch, key=own, train=train)

        micro_batches = (rows.cut_batch(batch), rows.keys(key))
        here = at_stages(params, self.layout)
        leaves, structure = jax.tree.flatten(here.params)
        whole = [example_of(x, shape) for x, shape in zip(leaves, here.shapes, strict=True)]
        examples = _jax.vary(
            (structure.unflatten(whole), jax.tree.map(lambda x: x[0], micro_batches)),
            axes_of((leaves, micro_batches)),
        )
        loop = LayersLoop(part, examples, self.pipeline.path)
        _check(loop)
        run = _Run(loop, here.cuts, self.policy)
        total, sums = run.differentiable(leaves, jax.tree.leaves(micro_batches))
        measured: Measured = loop.result
        [term] = measured.terms
        count: Any = sums.count
        if isinstance(term.count, (int, float)):
            count = term.count * self.pipeline.microbatches
        return Measured(
            [LossTerm(total, None if term.count is None else count, term.scale)],
            run.penalty(leaves),
            model_state,
            sums.increments,
        )


class _Sums(NamedTuple):
    """Sums over micro-batches beside the loss: its divisor, and increments of the metrics."""

    count: jax.Array
    increments: Any


class _Run:
    """Loss and gradients of a rank's rows by 1F1B; `cuts` are those of parameters over `fsdp`."""

    def __init__(self, loop: LayersLoop, cuts: Sequence[Cut | None], policy: Any) -> None:
        self._loop = loop
        self._cuts = cuts
        self._policy = policy
        self._others = [index for index in range(len(cuts)) if index not in loop.indices]

    def differentiable(
        self, leaves: Sequence[Any], micro_batches: list[Any]
    ) -> tuple[jax.Array, _Sums]:
        """Returns the loss, which has gradients with respect to the parameters, and other sums."""

        @jax.custom_vjp
        def measure(shared: Any, layers: Any, micro_batches: Any) -> Any:
            return self._run(shared, layers, micro_batches)[:2]

        def forward(*args: Any) -> Any:
            loss, sums, grads = self._run(*args)
            return (loss, sums), grads

        def backward(grads: Any, cotangents: Any) -> Any:
            scale = cotangents[0]
            return *jax.tree.map(lambda g: g * scale.astype(g.dtype), grads), None

        measure.defvjp(forward, backward)
        shared = [leaves[index] for index in self._others]
        layers = [leaves[index] for index in self._loop.indices]
        loss, sums = measure(shared, layers, micro_batches)
        return loss, jax.lax.stop_gradient(sums)

    def penalty(self, leaves: Sequence[Any]) -> Any:
        """Returns the losses that the model adds for its parameters."""
        penalty = self._loop.result.penalty
        if isinstance(penalty, (int, float)):
            return penalty
        shared = _jax.vary([leaves[index] for index in self._others], axes_of(leaves))

        def of_whole(shared: Any) -> Any:
            return self._loop.of_params(self._all(shared), [penalty])[0]

        value = self._gathering(of_whole, shared, self._others)
        # All stages have computed the same.
        return jax.lax.psum(value, STAGE_AXIS) / jax.lax.axis_size(STAGE_AXIS)

    def _run(self, shared: Any, layers: Any, micro_batches: Any) -> Any:
        loop = self._loop

        def enter(shared: Any, micro: Any) -> Moving:
            def of_whole(args: Any) -> Moving:
                return loop.enter(self._all(args[0]), args[1])

            return self._gathering(of_whole, (shared, micro), self._others)

        def leave(shared: Any, x: Moving, micro: Any) -> tuple[jax.Array, _Sums]:
            def of_whole(args: Any) -> tuple[jax.Array, _Sums]:
                measured: Measured = loop.rebuild(loop.leave(self._all(args[0]), *args[1:]))
                [term] = measured.terms
                count = term.count if isinstance(term.count, jax.Array) else jnp.zeros(())
                return term.total, _Sums(count, measured.increments)

            return self._gathering(of_whole, (shared, x, micro), self._others)

        def stage(layers: Any, x: Moving, m: jax.Array) -> Moving:
            def of_whole(args: Any) -> Moving:
                return loop.stage(*args, policy=self._policy)

            return self._gathering(of_whole, (layers, x, take(micro_batches, m)), loop.indices)

        return one_forward_one_backward(Ends(enter, leave), stage, shared, layers, micro_batches)

    def _gathering(self, function: Any, args: Any, indices: Sequence[int]) -> Any:
        """Returns `function(args)`; the first leaves of `args` are parameters, by their indices."""
        cuts = [self._cuts[index] for index in indices]
        cuts += [None] * (len(jax.tree.leaves(args)) - len(cuts))
        return gather_where_used(function, args, cuts, has_remat=self._policy is not None)

    def _all(self, shared: Sequence[Any]) -> list[Any]:
        """Returns leaves of the parameters with those of the layers left out."""
        found: list[Any] = [None] * len(self._cuts)
        for index, x in zip(self._others, shared, strict=True):
            found[index] = x
        return found


def _check(loop: LayersLoop) -> None:
    measured: Measured = loop.result
    check_statistics(loop, measured.model_state)
    way_out = "Use Pipeline(schedule='gpipe')."
    if len(measured.terms) != 1:
        raise ValueError(
            f"A pipeline by 1F1B computes the gradients of one loss, but the model has "
            f"{len(measured.terms)}. {way_out}"
        )
    if loop.depends_on_rows(measured.penalty):
        raise ValueError(
            "A pipeline cannot add losses that the model computes from its inputs: micro-batches "
            "pass one after the other. Let the model return them as outputs."
        )
    for x in loop.moving:
        if not jnp.issubdtype(x.aval.dtype, jnp.inexact):
            raise ValueError(
                "A pipeline by 1F1B passes floating numbers from stage to stage, but layers hand "
                f"on {_jax.kind_of(x.aval)}. {way_out}"
            )
