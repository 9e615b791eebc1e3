"""Pipelining of any model with a loop over stacked layers, such as `nn.scan` makes.

The forward pass is traced for the rows of one micro-batch and split at the loop over the layers:
what stands before and after runs for all micro-batches on every device, the layers run in a
pipeline over the mesh axis `stage`, whose devices hold consecutive layers. Rows keep the random
numbers of their place in the global batch, so the result is that of one device.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tnt_jax import _jax
from tnt_jax.adapters.base import Applied
from tnt_jax.distributed.random_rows import keys_of_parts
from tnt_jax.sharded.schedules import STAGE_AXIS, axes_of, bubble_share, gpipe, vary
from tnt_jax.sharded.tracing import (
    LoopOperands,
    Sources,
    Traced,
    Values,
    loop_body,
    loop_operands,
    trace,
    variables_in,
)
from tnt_jax.train.contracts import Apply
from tnt_jax.train.state_arrays import state_arrays


@dataclass(frozen=True)
class Pipeline:
    """How a model is divided into the stages of a pipeline.

    The schedule is GPipe (Huang et al. 2019, arXiv:1811.06965).

    Attributes:
        path: Path of the stacked layers among the parameters, such as `layers`. Their number must
            be a multiple of the number of stages.
        microbatches: Parts into which the rows of each copy of the model are cut. More of them
            make the stages wait less; see `bubble_share`.

    Raises:
        ValueError: If `microbatches` is no whole number of at least 1, or `path` is empty.

    >>> Pipeline("layers", microbatches=16).bubble_share(4)
    0.15789473684210525
    """

    path: str
    microbatches: int

    def __post_init__(self) -> None:
        if not isinstance(self.microbatches, int) or self.microbatches < 1:
            raise ValueError(
                f"microbatches must be a whole number of at least 1, but is {self.microbatches!r}."
            )
        if not isinstance(self.path, str) or not self.path.strip("/"):
            raise ValueError(
                "The path of a pipeline must name stacked layers among the parameters, such as "
                f"'layers', but is {self.path!r}."
            )

    def bubble_share(self, num_stages: int) -> float:
        """Returns the share of a step in which a stage waits: (S - 1) / (M + S - 1)."""
        return bubble_share(num_stages, self.microbatches)

    def holds(self, path: str) -> bool:
        """Returns whether a parameter is one of the stacked layers."""
        return path.startswith(f"{self.path.strip('/')}/")


def pipelined(apply: Apply, pipeline: Pipeline, *, policy: Any = None) -> Apply:
    """Returns a forward pass whose stacked layers run in a pipeline.

    It is called inside `shard_map` over the ranks and the axis `stage`; without this axis nothing
    changes. Of the stacked layers each device passes its own, of other parameters all.

    Args:
        apply: Forward pass; rows must not depend on one another.
        pipeline: Layers and micro-batches.
        policy: What the layers keep for backpropagation, a policy of `jax.checkpoint`; None for
            everything.
    """

    def in_pipeline(
        params: Any,
        model_state: Any,
        inputs: Any,
        *,
        key: jax.Array | None,
        train: bool,
        mask: jax.Array | None,
    ) -> Applied:
        if STAGE_AXIS not in _jax.mapped_axes():
            return apply(params, model_state, inputs, key=key, train=train, mask=mask)
        num_rows = jax.tree.leaves(inputs)[0].shape[0]
        part_rows = -(-num_rows // pipeline.microbatches)
        cut = partial(_cut_rows, num_parts=pipeline.microbatches, part_rows=part_rows)
        words = None if key is None else keys_of_parts(key, pipeline.microbatches, part_rows)

        def part(params: Any, micro_batch: Any) -> Applied:
            inputs, mask, words = micro_batch
            own = (
                None
                if key is None
                else jax.random.wrap_key_data(words, impl=jax.random.key_impl(key))
            )
            return apply(params, model_state, inputs, key=own, train=train, mask=mask)

        micro_batches = (jax.tree.map(cut, inputs), None if mask is None else cut(mask), words)
        run = _PipelinedPart(part, params, micro_batches, pipeline)
        run.check(part_rows)
        applied = run(policy)

        def joined(x: jax.Array) -> jax.Array:
            return x.reshape(-1, *x.shape[2:])[:num_rows]

        penalty = applied.penalty
        return Applied(
            jax.tree.map(joined, applied.outputs),
            model_state,
            jnp.mean(penalty) if isinstance(penalty, jax.Array) else penalty,
        )

    return in_pipeline


def _cut_rows(x: jax.Array, *, num_parts: int, part_rows: int) -> jax.Array:
    """Returns rows as `[parts, rows of a part, ...]`; the last row fills the last parts."""
    missing = num_parts * part_rows - x.shape[0]
    if missing:
        x = jnp.concatenate([x, jnp.repeat(x[-1:], missing, axis=0)])
    return x.reshape(num_parts, part_rows, *x.shape[1:])


class _Split(NamedTuple):
    """A program, split at its loop over the layers.

    Attributes:
        before: Equations that do not depend on the loop.
        loop: The equation of the loop.
        after: Equations that depend on the loop.
        layers: Index of the parameter by its position among what the loop runs over.
        bridge: Variables from before the loop that `after` needs.
    """

    before: list[Any]
    loop: Any
    after: list[Any]
    layers: dict[int, int]
    bridge: list[Any]


class _PipelinedPart:
    """A function of parameters and a micro-batch, whose layers run in a pipeline.

    Args:
        part: Function `(params, micro_batch) -> Applied`.
        params: Parameters; of the stacked layers those of this device.
        micro_batches: Pytree of arrays `[micro-batches, ...]`.
        pipeline: Layers and micro-batches.
    """

    def __init__(self, part: Callable, params: Any, micro_batches: Any, pipeline: Pipeline) -> None:
        self._leaves, structure = jax.tree.flatten(params)
        self._micro_leaves, micro_structure = jax.tree.flatten(micro_batches)
        self._paths = list(state_arrays(params))
        self._pipeline = pipeline
        num_params = len(self._leaves)

        def of_leaves(*args: Any) -> Applied:
            return part(
                structure.unflatten(args[:num_params]), micro_structure.unflatten(args[num_params:])
            )

        # What stands for the stacked layers of all stages while the function is traced.
        whole = [
            _like_all_stages(x) if pipeline.holds(path) else x
            for path, x in zip(self._paths, self._leaves, strict=True)
        ]
        examples = [*whole, *(x[0] for x in self._micro_leaves)]
        self._traced = trace(of_leaves, *examples)
        self._split = self._split_at_loop(self._traced)
        # Inside the pipeline every value differs between the stages.
        self._inner = self._split_at_loop(trace(of_leaves, *vary(examples, axes_of(examples))))

    def __call__(self, policy: Any) -> Applied:
        """Returns the results of all micro-batches, stacked."""
        split = self._split
        loops, bridges = jax.lax.map(self._before, self._micro_leaves)
        local = [self._leaves[index] for index in split.layers.values()]
        outputs = gpipe(partial(self._stage, loops, policy), local, loops.carried)
        return self._traced.rebuild(jax.lax.map(self._after, (outputs, bridges)))

    def check(self, part_rows: int) -> None:
        """Raises a ValueError if the results cannot be put together from micro-batches.

        Args:
            part_rows: Rows of a micro-batch.
        """
        jaxpr = self._traced.program.jaxpr
        applied: Applied = self._traced.rebuild(jaxpr.outvars)
        of_rows = _depending(jaxpr.eqns, jaxpr.invars[len(self._leaves) :])
        computed = {v for equation in jaxpr.eqns for v in equation.outvars}
        if any(v in computed for v in variables_in(jax.tree.leaves(applied.model_state))):
            raise ValueError(
                "A pipeline cannot train layers that keep statistics of the rows, such as "
                "BatchNorm: micro-batches pass one after the other. Use LayerNorm or GroupNorm."
            )
        if applied.increments or any(
            v in of_rows for v in variables_in(jax.tree.leaves(applied.penalty))
        ):
            raise ValueError(
                "A pipeline cannot add losses or metrics that the model computes from its inputs: "
                "micro-batches pass one after the other. Let the model return them as outputs."
            )
        for x in jax.tree.leaves(applied.outputs):
            if x.aval.shape[:1] != (part_rows,):
                raise ValueError(
                    f"A pipeline needs outputs with a row for each of the {part_rows} row(s) of a "
                    f"micro-batch, but one has the shape {list(x.aval.shape)}."
                )

    def _before(self, micro_leaves: Any) -> tuple[LoopOperands, list[Any]]:
        """Returns what the loop of a micro-batch works on besides the layers, and the bridge."""
        split = self._split
        values = Values.of(self._traced.program, [*self._leaves, *micro_leaves])
        values.run(split.before)
        operands = loop_operands(split.loop, split.loop.invars)
        others = [v for i, v in enumerate(operands.items) if i not in split.layers]
        loop = LoopOperands(*map(values.read, (operands.consts, operands.carried, others)))
        return loop, values.read(split.bridge)

    def _after(self, args: Any) -> list[Any]:
        """Returns the results for a micro-batch that has passed the loop."""
        outputs, bridge = args
        split, program = self._split, self._traced.program
        values = Values(split.bridge, bridge)
        values.write(program.jaxpr.constvars, program.consts)
        values.write(program.jaxpr.invars[: len(self._leaves)], self._leaves)
        values.write(split.loop.outvars, outputs)
        values.run(split.after)
        return values.read(program.jaxpr.outvars)

    def _stage(
        self, loops: LoopOperands, policy: Any, layers: list[Any], x: Any, m: jax.Array
    ) -> Any:
        """Returns what this device's layers make of micro-batch `m`."""
        inner = self._inner
        own = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, m, 0, keepdims=False), loops)
        num_layers = layers[0].shape[0]
        first = jax.lax.axis_index(STAGE_AXIS) * num_layers
        others = iter(jax.lax.dynamic_slice_in_dim(item, first, num_layers) for item in own.items)
        of_layers = dict(zip(inner.layers, layers, strict=True))
        variables = loop_operands(inner.loop, inner.loop.invars).items
        items = [
            of_layers[i].astype(v.aval.dtype) if i in of_layers else next(others)
            for i, v in enumerate(variables)
        ]
        axes = axes_of([x, items])
        body = partial(loop_body(inner.loop), vary(own.consts, axes))
        if policy is not None:
            # Within a loop nothing can be merged with what was computed before.
            body = jax.checkpoint(body, policy=policy, prevent_cse=False)
        unroll = inner.loop.params["unroll"]
        return jax.lax.scan(body, vary(x, axes), vary(items, axes), unroll=unroll)[0]

    def _split_at_loop(self, traced: Traced) -> _Split:
        jaxpr = traced.program.jaxpr
        sources = Sources(jaxpr.invars[: len(self._leaves)])
        equations = [e for e in jaxpr.eqns if not self._casts_layers(e, sources)]
        users = [e for e in equations if any(self._holds(sources.of(v)) for v in e.invars)]
        loop, layers = self._loop_over_layers(users, sources)
        depending = _depending(equations, loop.outvars)
        after = [e for e in equations if any(v in depending for v in variables_in(e.invars))]
        used = variables_in([v for e in after for v in e.invars] + list(jaxpr.outvars))
        self._check_loop(loop, used)
        given = {*loop.outvars, *jaxpr.constvars, *jaxpr.invars[: len(self._leaves)]}
        made = {v for e in after for v in e.outvars}
        bridge = [v for v in used if v not in given and v not in made]
        needed = variables_in([*bridge, *loop.invars])
        before = _leading_to(needed, [e for e in equations if e is not loop and e not in after])
        return _Split(before, loop, after, layers, bridge)

    def _holds(self, index: int | None) -> bool:
        """Returns whether a parameter is one of the stacked layers."""
        return index is not None and self._pipeline.holds(self._paths[index])

    def _casts_layers(self, equation: Any, sources: Sources) -> bool:
        return sources.passes(equation) and self._holds(sources.of(equation.invars[0]))

    def _loop_over_layers(self, users: list[Any], sources: Sources) -> tuple[Any, dict[int, int]]:
        """Returns the loop over the layers, and the parameters that it runs over by position.

        Args:
            users: Equations that use the stacked layers.
            sources: Which parameters variables stand for.

        Raises:
            ValueError: If the layers are used in any other way.
        """
        path = self._pipeline.path
        stacked = {index for index in range(len(self._paths)) if self._holds(index)}
        layers: dict[int, int] = {}
        if len(users) == 1 and users[0].primitive.name == "scan":
            items = loop_operands(users[0], users[0].invars).items
            found = [(i, sources.of(v)) for i, v in enumerate(items)]
            layers = {i: index for i, index in found if index is not None and index in stacked}
        if not stacked or set(layers.values()) != stacked or users[0].params["reverse"]:
            known = sorted({name.rpartition("/")[0] for name in self._paths if "/" in name})
            raise ValueError(
                f"A pipeline over {path!r} needs a model with one loop over the stacked layers "
                f"{path!r}, such as nn.scan makes, which alone uses their parameters. Parameters "
                f"lie in {', '.join(known)}."
            )
        return users[0], layers

    def _check_loop(self, loop: Any, used: list[Any]) -> None:
        outputs = loop.outvars[loop.params["num_carry"] :]
        if any(v in used for v in outputs):
            raise ValueError(
                f"A pipeline over {self._pipeline.path!r} needs layers that hand on activations "
                "alone, but these also return outputs of each layer, stacked. Add them to the "
                "activations."
            )


def _like_all_stages(x: jax.Array) -> jax.Array:
    """Returns what stands for the layers of all stages in the place of those of this device."""
    zeros = jnp.zeros((x.shape[0] * jax.lax.axis_size(STAGE_AXIS), *x.shape[1:]), x.dtype)
    return _jax.make_varying(zeros)


def _depending(equations: Sequence[Any], variables: Iterable[Any]) -> set[Any]:
    """Returns variables with all that equations compute from them."""
    found = set(variables)
    for equation in equations:
        if any(v in found for v in variables_in(equation.invars)):
            found.update(equation.outvars)
    return found


def _leading_to(variables: Iterable[Any], equations: Sequence[Any]) -> list[Any]:
    """Returns the equations that variables need, in order."""
    needed = set(variables)
    found = []
    for equation in reversed(equations):
        if any(v in needed for v in equation.outvars):
            needed.update(variables_in(equation.invars))
            found.append(equation)
    return found[::-1]
