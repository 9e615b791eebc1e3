"""Pipelining of any model with a loop over stacked layers, such as `nn.scan` makes, or a list.

The forward pass is traced for the rows of one micro-batch, in which equal blocks of a list become a
loop (`tnt_jax.sharded.pipeline.layers_loop`), and split at the loop over the layers:
what stands before and after runs for all micro-batches on every device, the layers run in a
pipeline over the mesh axis `stage`, whose devices hold consecutive layers. Rows keep the random
numbers of their place in the global batch, so the result is that of one device.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from tnt_jax import _jax
from tnt_jax.adapters.base import Applied
from tnt_jax.sharded.blocks.tracing import variables_in
from tnt_jax.sharded.pipeline.layers_loop import LayersLoop, Moving, example_of
from tnt_jax.sharded.pipeline.schedules import STAGE_AXIS, axes_of, gpipe, take
from tnt_jax.train.contracts import Apply
from tnt_jax.train.state import state_arrays
from tnt_jax.train.steps.micro_batches import MicroRows

Schedule = Literal["gpipe", "1f1b"]


@dataclass(frozen=True)
class Pipeline:
    """How a model is divided into the stages of a pipeline.

    Attributes:
        path: Path of the layers among the parameters, such as `layers`: of stacked ones, or of a
            list of equal blocks without their numbers. The number of layers must be a multiple of
            the number of stages.
        microbatches: Parts into which the rows of each copy of the model are cut. More of them
            make the stages wait less; see `bubble_share`.
        schedule: `"gpipe"` runs all micro-batches forward, then all backward (Huang et al. 2019,
            arXiv:1811.06965). `"1f1b"` turns to the backward pass of a micro-batch as soon as the
            last stage has seen it, so that a stage keeps the inputs of no more micro-batches than
            there are stages, and computes its layers again (Narayanan et al. 2021,
            arXiv:2104.04473).

    Raises:
        ValueError: If `microbatches` is no whole number of at least 1, `path` is empty, or
            `schedule` is unknown.

    >>> Pipeline("layers", microbatches=16).bubble_share(4)
    0.15789473684210525
    """

    path: str
    microbatches: int
    schedule: Schedule = "gpipe"

    def __post_init__(self) -> None:
        if not isinstance(self.microbatches, int) or self.microbatches < 1:
            raise ValueError(
                f"microbatches must be a whole number of at least 1, but is {self.microbatches!r}."
            )
        if not isinstance(self.path, str) or not self.path.strip("/"):
            raise ValueError(
                "The path of a pipeline must name stacked layers among the parameters, such as "
                f"'layers', or a list of blocks, but is {self.path!r}."
            )
        if self.schedule not in get_args(Schedule):
            raise ValueError(f"schedule must be 'gpipe' or '1f1b', but is {self.schedule!r}.")

    def bubble_share(self, num_stages: int) -> float:
        """Returns the share of a step in which a stage waits: (S - 1) / (M + S - 1).

        It is the same for GPipe and 1F1B (Huang et al. 2019, section 2.3; Narayanan et al. 2021,
        section 2.2, which states it as a share of the working time, (S - 1) / M).
        """
        return (num_stages - 1) / (self.microbatches + num_stages - 1)

    def description(self, num_stages: int) -> str:
        """Returns the schedule on so many stages, with what it makes them wait, in words."""
        return (
            f"Pipeline of {self.path}: {num_stages} stages, {self.microbatches} micro-batches, "
            f"{self.schedule}; a stage waits for {self.bubble_share(num_stages):.1%} of a step"
        )

    def holds(self, path: str) -> bool:
        """Returns whether an array of stacked layers has this path."""
        return path.startswith(f"{self.path.strip('/')}/")


def pipelined(apply: Apply, pipeline: Pipeline, *, policy: Any = None) -> Apply:
    """Returns a forward pass whose stacked layers run in a pipeline.

    It is called inside `shard_map` over the ranks and the axis `stage`; without this axis nothing
    changes. Of the layers each device passes its own, stacked or `Staged`, of other parameters all.
    With the schedule 1F1B, forward passes of training do not change either: see
    `tnt_jax.sharded.pipelined_parts`. Rows must not depend on one another. `policy` says what the
    layers keep, as of `jax.checkpoint`; None for everything.
    """

    def in_pipeline(
        params: Any, model_state: Any, inputs: Any, *, key: Any, train: bool, mask: Any
    ) -> Applied:
        is_whole = STAGE_AXIS not in _jax.mapped_axes()
        if is_whole or (train and pipeline.schedule == "1f1b"):
            return apply(params, model_state, inputs, key=key, train=train, mask=mask)
        rows = MicroRows(jax.tree.leaves(inputs)[0].shape[0], pipeline.microbatches)

        def part(params: Any, micro_batch: Any) -> Applied:
            inputs, mask, words = micro_batch
            own = rows.key(key, words)
            return apply(params, model_state, inputs, key=own, train=train, mask=mask)

        micro_batches = (*jax.tree.map(rows.cut, (inputs, mask)), rows.keys(key))
        applied = _in_turn(part, params, micro_batches, pipeline, policy, rows.part_rows)

        penalty = applied.penalty
        return Applied(
            jax.tree.map(rows.joined, applied.outputs),
            model_state,
            jnp.mean(penalty) if isinstance(penalty, jax.Array) else penalty,
            applied.increments,
        )

    return in_pipeline


def _in_turn(
    part: Any, params: Any, micro_batches: Any, pipeline: Pipeline, policy: Any, part_rows: int
) -> Applied:
    """Returns what a forward pass gives for each micro-batch, stacked, by GPipe."""
    leaves, structure = jax.tree.flatten(params)
    micro_leaves, micro_structure = jax.tree.flatten(micro_batches)
    num_stages = jax.lax.axis_size(STAGE_AXIS)
    whole = [
        example_of(x, (x.shape[0] * num_stages, *x.shape[1:])) if pipeline.holds(path) else x
        for path, x in zip(state_arrays(params), leaves, strict=True)
    ]
    of_micro = micro_structure.unflatten([x[0] for x in micro_leaves])
    examples = structure.unflatten(whole), of_micro
    loop = LayersLoop(part, examples, pipeline.path)
    _check_applied(loop, part_rows)
    # Inside the pipeline every value differs between the stages.
    inner = LayersLoop(part, _jax.vary(examples, axes_of(examples)), pipeline.path)
    layers = [leaves[index] for index in loop.indices]
    entered = jax.lax.map(partial(loop.enter, leaves), micro_leaves)

    def stage(layers: list[Any], carried: list[Any], m: jax.Array) -> list[Any]:
        extras, micro = take((entered.extras, micro_leaves), m)
        return inner.stage(layers, Moving(carried, extras), micro, policy=policy).carried

    def leave(args: Any) -> list[Any]:
        carried, extras, micro = args
        return loop.leave(leaves, Moving(carried, extras), micro)

    outputs = gpipe(stage, layers, entered.carried)
    return loop.rebuild(jax.lax.map(leave, (outputs, entered.extras, micro_leaves)))


def _check_applied(loop: LayersLoop, part_rows: int) -> None:
    applied: Applied = loop.result
    check_statistics(loop, applied.model_state)
    if applied.increments or loop.depends_on_rows(applied.penalty):
        raise ValueError(
            "A pipeline cannot add losses or metrics that the model computes from its inputs: "
            "micro-batches pass one after the other. Let the model return them as outputs."
        )
    for x in variables_in(jax.tree.leaves(applied.outputs)):
        if x.aval.shape[:1] != (part_rows,):
            raise ValueError(
                f"A pipeline needs outputs with a row for each of the {part_rows} row(s) of a "
                f"micro-batch, but one has the shape {list(x.aval.shape)}."
            )


def check_statistics(loop: LayersLoop, model_state: Any) -> None:
    """Raises a ValueError if a model computes model state."""
    if loop.computes(model_state):
        raise ValueError(
            "A pipeline cannot train layers that keep statistics of the rows, such as BatchNorm: "
            "micro-batches pass one after the other. Use LayerNorm or GroupNorm."
        )
