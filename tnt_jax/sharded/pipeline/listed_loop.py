"""A function of a model whose blocks form a list, as a function with a loop over stacked layers."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from tnt_jax import _jax
from tnt_jax.sharded.blocks.block_list import Staged
from tnt_jax.sharded.blocks.equal_blocks import Atoms, EqualBlocks, key_of
from tnt_jax.sharded.blocks.tracing import Values, hoisted, trace


def with_loop(function: Callable[[Any, Any], Any]) -> Callable[[Staged, Any], Any]:
    """Returns `function` of stacked blocks, which run as one `jax.lax.scan`.

    The program of the function `(params, micro_batch) -> result` is traced for the model's own
    parameters, and the equations of its blocks are replaced by a loop. They must be as
    `EqualBlocks` says.
    """

    def looped(staged: Staged, micro_batch: Any) -> Any:
        leaves = staged.leaves(_items_of)
        micro_leaves, micro_structure = jax.tree.flatten(micro_batch)

        def of_leaves(*args: Any) -> Any:
            params = staged.structure.unflatten(args[: len(leaves)])
            return function(params, micro_structure.unflatten(args[len(leaves) :]))

        traced = trace(of_leaves, *leaves, *micro_leaves)
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
        values = Values(jaxpr.constvars, traced.program.consts)
        in_blocks = {index for of_array in indices for index in of_array}
        known = [index for index in range(len(leaves)) if index not in in_blocks]
        values.write([jaxpr.invars[i] for i in known], [leaves[i] for i in known])
        values.write(jaxpr.invars[len(leaves) :], micro_leaves)
        _run(blocks, equations, values, list(staged.arrays.values())[len(known) :])
        return traced.rebuild(values.read(jaxpr.outvars))

    return looped


def _run(blocks: EqualBlocks, equations: list[Any], values: Values, layers: list[Any]) -> None:
    """Runs the equations of a program, those of its blocks in a loop over stacked arrays."""
    # What the layers alone need of these is computed in them; here nothing uses it.
    values.run([e for e in equations if not blocks.depends(e)])
    carried = values.read(blocks.carried[0])
    items = [jnp.stack(values.read(atoms)) for atoms in blocks.items]
    carried, _ = jax.lax.scan(partial(_layer, blocks, values), carried, (layers, items))
    values.write(blocks.carried[-1], carried)
    values.run([e for e in equations if blocks.depends(e) and not blocks.is_in_block(e)])


def _layer(
    blocks: EqualBlocks, values: Values, carried: list[Any], own: tuple[list[Any], list[Any]]
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
