"""A function of parameters and rows, split at its loop over stacked layers.

The function is traced. Loops such as `nn.scan` makes stand in its program as one equation, whose
body is a layer. What stands before and after it runs apart from it, equation by equation. Blocks
of a list are made such a loop first (`with_loop`).
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tnt_jax import _jax
from tnt_jax.sharded.blocks.block_list import Staged
from tnt_jax.sharded.blocks.equal_blocks import Atoms, EqualBlocks, key_of
from tnt_jax.sharded.blocks.tracing import (
    Sources,
    hoisted,
    loop_body,
    loop_operands,
    trace,
    variables_in,
)
from tnt_jax.sharded.pipeline.schedules import axes_of, own_part
from tnt_jax.train.state import state_arrays


def with_loop(function: Callable[[Any, Any], Any]) -> Callable[[Staged, Any], Any]:
    """Returns `function` of stacked blocks, which run as one `jax.lax.scan`.

    The program of the function `(params, micro_batch) -> result` is traced for the model's own
    parameters, and the equations of its blocks are replaced by a loop. They must be as
    `EqualBlocks` says.
    """

    def looped(staged: Staged, micro_batch: Any) -> Any:
        leaves = staged.leaves(_items_of)
        traced = trace(function, staged.structure.unflatten(leaves), micro_batch)
        jaxpr = traced.program.jaxpr
        equations = hoisted(_jax.without_dead_code(jaxpr).eqns)
        indices = staged.blocks.indices
        axes = frozenset[str]().union(*(_jax.varying_axes_of(v.aval) for v in jaxpr.invars))
        blocks = EqualBlocks(
            equations,
            jaxpr.outvars,
            [[jaxpr.invars[of_array[i]] for of_array in indices] for i in range(len(indices[0]))],
            names=staged.blocks.names,
            constants=_equal_constants(traced.program),
            axes=axes,
        )
        values = _jax.Values(jaxpr.constvars, traced.program.consts)
        in_blocks = {index for of_array in indices for index in of_array}
        known = [index for index in range(len(leaves)) if index not in in_blocks]
        values.write([jaxpr.invars[i] for i in known], [leaves[i] for i in known])
        values.write(jaxpr.invars[len(leaves) :], jax.tree.leaves(micro_batch))
        _run(blocks, equations, values, list(staged.arrays.values())[len(known) :])
        return traced.rebuild(values.read(jaxpr.outvars))

    return looped


def _run(blocks: EqualBlocks, equations: list[Any], values: _jax.Values, layers: list[Any]) -> None:
    # What the layers alone need of these is computed in them; here nothing uses it.
    values.run([e for e in equations if not blocks.depends(e)])
    carried = values.read(blocks.carried[0])
    items = [jnp.stack(values.read(atoms)) for atoms in blocks.items]
    carried, _ = jax.lax.scan(partial(_layer, blocks, values), carried, (layers, items))
    values.write(blocks.carried[-1], carried)
    values.run([e for e in equations if blocks.depends(e) and not blocks.is_in_block(e)])


def _layer(
    blocks: EqualBlocks, values: _jax.Values, carried: list[Any], own: tuple[list[Any], list[Any]]
) -> tuple[list[Any], None]:
    """Returns what a block hands on; the body of a loop."""
    given = [*zip(*blocks.carried[:-1], strict=True), *blocks.arrays, *blocks.items]
    known = dict(zip(map(key_of, given), [*carried, *own[0], *own[1]], strict=True))

    def read(atoms: Atoms) -> Any:
        key = key_of(atoms)
        return known[key] if key in known else values.read(atoms[:1])[0]

    for step in blocks.steps:
        results = _jax.run_equation(step.equations[0], [read(x) for x in step.operands])
        made = zip(*(e.outvars for e in step.equations), strict=True)
        known.update(zip(map(key_of, made), results, strict=True))
    return [read(atoms) for atoms in zip(*blocks.carried[1:], strict=True)], None


def _items_of(stack: Any) -> list[Any]:
    """Returns a description of each item of a stacked array."""
    item = jax.make_jaxpr(lambda x: x[0])(jax.typeof(stack)).jaxpr.outvars[0].aval
    return [item] * stack.shape[0]


def _equal_constants(program: Any) -> dict[Any, Any]:
    """Returns for each constant of a program whose value is known the first one that equals it."""
    first: dict[Any, Any] = {}
    same = {}
    for variable, x in zip(program.jaxpr.constvars, program.consts, strict=True):
        is_known = not isinstance(x, Tracer) and getattr(x, "is_fully_addressable", True)
        if is_known and not jnp.issubdtype(variable.aval.dtype, jax.dtypes.extended):
            kind = (variable.aval.shape, variable.aval.dtype, np.asarray(x).tobytes())
            same[variable] = first.setdefault(kind, variable)
    return same


class Moving(NamedTuple):
    """Values between stages: activations, and others that depend on parameters."""

    carried: list[Any]
    extras: list[Any]


class LayersLoop:
    """A function of parameters and a micro-batch in three parts: before, in and after its loop.

    What does not depend on parameters, such as masks and keys, is computed in each part that needs
    it. Examples are whole parameters, with the layers of all stages, and a micro-batch; the
    function takes the model's own in place of `Staged` ones. `result` has variables in the place of
    arrays, `indices` those of the stacked arrays at `path`. A ValueError says that there is no such
    loop.
    """

    def __init__(self, function: Callable, examples: tuple[Any, Any], path: str) -> None:
        if isinstance(examples[0], Staged):
            function = with_loop(function)
        self._path = path.strip("/")
        self._paths = list(state_arrays(examples[0]))
        self._traced = trace(function, *examples)
        jaxpr = self._traced.program.jaxpr
        num_params = len(jax.tree.leaves(examples[0]))
        self._params, self._micro = jaxpr.invars[:num_params], jaxpr.invars[num_params:]
        self.rebuild = self._traced.rebuild  # From other arrays to such a result.
        self.result = self.rebuild(jaxpr.outvars)
        self._split()

    def computes(self, tree: Any) -> bool:
        """Returns whether any variable of a part of `result` is computed, and no argument."""
        computed = {v for e in self._traced.program.jaxpr.eqns for v in e.outvars}
        return any(v in computed for v in variables_in(jax.tree.leaves(tree)))

    def depends_on_rows(self, tree: Any) -> bool:
        """Returns whether any variable of a part of `result` depends on the micro-batch."""
        of_rows = _depending(self._traced.program.jaxpr.eqns, self._micro)
        return any(v in of_rows for v in variables_in(jax.tree.leaves(tree)))

    @property
    def moving(self) -> list[Any]:
        """Variables of what passes from stage to stage."""
        return variables_in([*self._operands.carried, *self._extras])

    def enter(self, params: Sequence[Any], micro: Sequence[Any]) -> Moving:
        """Returns what the first layer gets, from leaves of whole parameters and a micro-batch."""
        values = self._values(params, micro)
        values.run(_leading_to(self.moving, self._others))
        return Moving(values.read(self._operands.carried), values.read(self._extras))

    def stage(
        self, layers: Sequence[Any], x: Moving, micro: Sequence[Any], *, policy: Any
    ) -> Moving:
        """Returns what consecutive layers make of `x`; without `policy` they keep everything."""
        axes = axes_of([x, layers])
        x, micro = _jax.vary((x, list(micro)), axes)
        values = self._values(None, micro)
        values.write(self._extras, x.extras)
        known = set(self._extras)
        needed = [v for v in self._given if v not in known]
        values.run(_leading_to(needed, self._others))
        own = map(own_part, values.read(self._other_items))
        of_layers = dict(zip(self._layers, layers, strict=True))
        items = [
            of_layers[i].astype(v.aval.dtype) if i in of_layers else next(own)
            for i, v in enumerate(self._operands.items)
        ]
        body = partial(loop_body(self._loop, policy), values.read(self._operands.consts))
        unroll = self._loop.params["unroll"]
        carried, _ = jax.lax.scan(
            body, _jax.vary(x.carried, axes), _jax.vary(items, axes), unroll=unroll
        )
        return Moving(carried, x.extras)

    def leave(self, params: Sequence[Any], x: Moving, micro: Sequence[Any]) -> list[Any]:
        """Returns the arrays of the result from what leaves the last layer; see `rebuild`."""
        values = self._values(params, micro)
        values.run(_leading_to(self._repeated, self._others))
        values.write(self._extras, x.extras)
        _, num_carried = _jax.loop_sizes(self._loop)
        values.write(self._loop.outvars[:num_carried], x.carried)
        values.run(self._after)
        return values.read(self._traced.program.jaxpr.outvars)

    def of_params(self, params: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Returns the values of variables of `result` that depend on parameters alone."""
        values = self._values(params, None)
        values.run(_leading_to(variables_in(variables), self._others))
        return values.read(variables)

    def _values(self, params: Sequence[Any] | None, micro: Sequence[Any] | None) -> _jax.Values:
        program = self._traced.program
        values = _jax.Values(program.jaxpr.constvars, program.consts)
        if params is not None:
            values.write(self._params, params)
        if micro is not None:
            values.write(self._micro, micro)
        return values

    def _split(self) -> None:
        jaxpr = self._traced.program.jaxpr
        sources = Sources(self._params)
        equations = [e for e in jaxpr.eqns if not self._casts_layers(e, sources)]
        users = [e for e in equations if any(self._holds(sources.of(v)) for v in e.invars)]
        self._loop, self._layers = self._loop_over_layers(users, sources)
        self._operands = loop_operands(self._loop, self._loop.invars)
        items = enumerate(self._operands.items)
        self._other_items = [v for i, v in items if i not in self._layers]
        # What layers need beside their arrays and activations.
        self._given = variables_in([*self._operands.consts, *self._other_items])
        self.indices = list(self._layers.values())
        depending = _depending(equations, self._loop.outvars)
        self._after = [e for e in equations if any(v in depending for v in variables_in(e.invars))]
        after = {id(e) for e in (*self._after, self._loop)}
        self._others = [e for e in equations if id(e) not in after]
        used = variables_in([v for e in self._after for v in e.invars] + list(jaxpr.outvars))
        outputs = self._loop.outvars[_jax.loop_sizes(self._loop)[1] :]
        if any(v in used for v in outputs):
            raise ValueError(
                f"A pipeline over {self._path!r} needs layers that hand on activations alone, but "
                "these also return outputs of each layer, stacked. Add them to the activations."
            )
        made = {v for e in self._others for v in e.outvars}
        of_params, of_rows = (
            _depending(self._others, variables) for variables in (self._params, self._micro)
        )
        bridge = [v for v in used if v in made]
        # Stages have no other parameters than their layers', and no activations but those they get.
        self._extras = variables_in(
            [v for v in self._given if v in of_params]
            + [v for v in bridge if v in of_params and v in of_rows]
        )
        self._repeated = [v for v in bridge if v not in self._extras]

    def _holds(self, index: int | None) -> bool:
        return index is not None and self._paths[index].startswith(f"{self._path}/")

    def _casts_layers(self, equation: Any, sources: Sources) -> bool:
        return sources.passes(equation) and self._holds(sources.of(equation.invars[0]))

    def _loop_over_layers(self, users: list[Any], sources: Sources) -> tuple[Any, dict[int, int]]:
        """Returns the loop over the layers, and the parameters that it runs over by position."""
        stacked = {index for index in range(len(self._paths)) if self._holds(index)}
        layers: dict[int, int] = {}
        if len(users) == 1 and users[0].primitive.name == "scan":
            items = loop_operands(users[0], users[0].invars).items
            found = [(i, sources.of(v)) for i, v in enumerate(items)]
            layers = {i: index for i, index in found if index is not None and index in stacked}
        if not stacked or set(layers.values()) != stacked or users[0].params["reverse"]:
            known = sorted({name.rpartition("/")[0] for name in self._paths if "/" in name})
            raise ValueError(
                f"A pipeline over {self._path!r} needs a model with one loop over the stacked "
                f"layers {self._path!r}, such as nn.scan makes, which alone uses their parameters. "
                f"Parameters lie in {', '.join(known)}."
            )
        return users[0], layers


def example_of(part: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Returns an array of another shape to trace with: the same on all stages, not on all ranks."""
    return _jax.make_varying(jnp.zeros(shape, part.dtype))


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
