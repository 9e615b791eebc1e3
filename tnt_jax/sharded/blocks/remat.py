"""Rematerialization by name: what the blocks of a model keep for backpropagation.

A block is what a model repeats: the body of a loop over stacked layers (`nn.scan`), or a module of
a list (`encoder_0`, `encoder_1`, ...). Its inputs are kept and the rest is computed again in the
backward pass (Chen et al. 2016, arXiv:1604.06174). Blocks are found in the traced program, so the
model may come from any library.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Literal

import jax

from tnt_jax import _jax
from tnt_jax.adapters.base import Applied
from tnt_jax.sharded.blocks.tracing import Sources, loop_body, loop_operands, trace, variables_in
from tnt_jax.train.contracts import Apply
from tnt_jax.train.state import state_arrays

Remat = Literal["none", "dots", "full"]

# "dots" keeps the products of activations with matrices, which are what costs time.
_POLICIES: dict[str, Any] = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": jax.checkpoint_policies.nothing_saveable,
}


class NoBlocksError(ValueError):
    """Says that a model has no blocks to rematerialize."""


def check_remat(remat: Any) -> None:
    """Raises a ValueError unless `remat` is a known name, or maps patterns of paths to such."""
    names = remat.values() if isinstance(remat, Mapping) else [remat]
    for name in names:
        if name != "none" and name not in _POLICIES:
            raise ValueError(
                "remat must be 'none', 'dots' or 'full', or map patterns of paths to one of them, "
                f"such as {{'layers': 'full'}}, but is {remat!r}."
            )


def rematerialized(
    function: Callable[[Any], Any], params: Any, *, remat: Remat | Mapping[str, Remat]
) -> Any:
    """Returns `function(params)`, whose blocks keep what `remat` says for backpropagation.

    That is `"none"` for everything, `"dots"` for products with matrices, `"full"` for the inputs of
    blocks alone; or a mapping from patterns of paths to these, of which the first that fits a block
    counts. A NoBlocksError says that there are no blocks, a ValueError that a pattern fits none.
    Numbers in the result remain numbers.
    """
    if remat == "none":
        return function(params)
    traced = trace(function, params)
    paths = list(state_arrays(params))
    jaxpr = traced.program.jaxpr
    loops = _loops(jaxpr, paths)
    stacked = {index for indices in loops.values() for index in indices}
    blocks = _listed_blocks([path for i, path in enumerate(paths) if i not in stacked])
    of_loops = {at: _common_path([paths[i] for i in loops[at]]) for at in loops}
    policy_of = _policies(remat, [*of_loops.values(), *blocks])

    values = _jax.Values.of(traced.program, jax.tree.leaves(params))
    places = {id(jaxpr.eqns[at]): policy_of[path] for at, path in of_loops.items()}
    segments = _segments(jaxpr, paths, blocks)
    for number, (block, equations) in enumerate(segments):
        later = [e for _, others in segments[number + 1 :] for e in others]
        policy = policy_of.get(block or "")
        if policy is None:
            for equation in equations:
                _run_plain(equation, values, places.get(id(equation)))
        else:
            needed = variables_in([v for e in later for v in e.invars] + list(jaxpr.outvars))
            _run_block(equations, values, needed, policy)
    return traced.rebuild(values.read(jaxpr.outvars))


def rematerialized_apply(apply: Apply, remat: Remat | Mapping[str, Remat]) -> Apply:
    """Returns a forward pass whose blocks keep what `remat` says in training."""

    def rematerializing(params: Any, model_state: Any, inputs: Any, **options: Any) -> Applied:
        def forward(params: Any) -> Applied:
            return apply(params, model_state, inputs, **options)

        return rematerialized(forward, params, remat=remat if options["train"] else "none")

    return rematerializing


def policy_of(remat: Remat | Mapping[str, Remat], path: str) -> Any:
    """Returns the `jax.checkpoint` policy for the layers of a pipeline; None to keep everything."""
    names = [path, f"{path}_0", f"{path}/0"]
    policies = _policies(remat, names)
    patterns = ["*"] if isinstance(remat, str) else list(remat)
    return policies[next(x for x in names if any(fnmatchcase(x, pattern) for pattern in patterns))]


def _loops(jaxpr: Any, paths: Sequence[str]) -> dict[int, list[int]]:
    """Returns the parameters that each loop over stacked layers runs over, by its place."""
    sources = Sources(jaxpr.invars[: len(paths)])
    found = {}
    for at, equation in enumerate(jaxpr.eqns):
        if not sources.passes(equation) and equation.primitive.name == "scan":
            items = loop_operands(equation, equation.invars).items
            params = [index for v in items if (index := sources.of(v)) is not None]
            if params:
                found[at] = params
    return found


def _listed_blocks(paths: Sequence[str]) -> list[str]:
    """Returns the paths of the outermost modules in lists of two or more: `a_0` or `a/0`."""
    found: list[str] = []
    for path in paths:
        keys = path.split("/")[:-1]
        for depth in range(1, len(keys) + 1):
            block = "/".join(keys[:depth])
            stem = block.rstrip("0123456789")
            fits = re.compile(rf"{re.escape(stem)}\d+(?=/)").match
            siblings = {match[0] for other in paths if (match := fits(other))}
            if stem != block and len(siblings) > 1:
                if block not in found:
                    found.append(block)
                break
    return found


def _common_path(paths: Sequence[str]) -> str:
    return os.path.commonpath(paths) if len(paths) > 1 else paths[0].rpartition("/")[0]


def _policies(remat: Remat | Mapping[str, Remat], blocks: Sequence[str]) -> dict[str, Any]:
    """Returns the policy of each block; None to keep everything."""
    if not blocks:
        raise NoBlocksError(
            f"remat={remat!r} needs a model that repeats blocks: a loop over stacked layers "
            "(nn.scan), or a list of modules such as layers_0, layers_1. This one has none; leave "
            "remat out, or use jax.checkpoint (nn.remat, nnx.remat) in the model."
        )
    rules = {"*": remat} if isinstance(remat, str) else remat
    for pattern in rules:
        if not any(fnmatchcase(block, pattern) for block in blocks):
            raise ValueError(
                f"The pattern {pattern!r} of remat fits no block. Blocks are {', '.join(blocks)}."
            )
    return {
        block: next(
            (_POLICIES.get(name) for pattern, name in rules.items() if fnmatchcase(block, pattern)),
            None,
        )
        for block in blocks
    }


def _segments(
    jaxpr: Any, paths: Sequence[str], blocks: Sequence[str]
) -> list[tuple[str | None, list[Any]]]:
    """Returns the equations of each block in an order in which they can run.

    An equation belongs to the last module, in order of first use, whose parameters it depends on.
    So what follows a block, up to the next use of other parameters, belongs to it.
    """
    block_of = [next((b for b in blocks if p.startswith(f"{b}/")), None) for p in paths]
    groups = [block or path for block, path in zip(block_of, paths, strict=True)]
    sources = Sources(jaxpr.invars[: len(paths)])
    order: dict[str, int] = {}
    labels: dict[Any, int] = {}
    segments: dict[int, list[Any]] = {-1: []}
    waiting: dict[Any, Any] = {}
    for equation in jaxpr.eqns:
        if sources.passes(equation):
            waiting[equation.outvars[0]] = equation
            continue
        operands = variables_in(equation.invars)
        for variable in operands:
            if (index := sources.of(variable)) is not None:
                labels[variable] = order.setdefault(groups[index], len(order))
        label = max((labels.get(v, -1) for v in operands), default=-1)
        segment = segments.setdefault(label, [])
        for variable in operands:
            segment += reversed(_casts(variable, waiting))
        segment.append(equation)
        labels.update(dict.fromkeys(equation.outvars, label))
    for variable in variables_in(jaxpr.outvars):
        segments[max(segments)] += reversed(_casts(variable, waiting))
    names = {number: group for group, number in order.items()}
    return [
        (name if (name := names.get(label)) in blocks else None, segments[label])
        for label in sorted(segments)
    ]


def _casts(variable: Any, waiting: dict[Any, Any]) -> list[Any]:
    """Returns the casts that make a variable of a parameter and have not run, last first."""
    found = []
    while variable in waiting:
        equation = waiting.pop(variable)
        found.append(equation)
        variable = equation.invars[0]
    return found


def _run_plain(equation: Any, values: _jax.Values, policy: Any) -> None:
    """Runs an equation; a loop with a policy rematerializes its body."""
    if policy is None:
        values.run([equation])
        return
    consts, start, items = loop_operands(equation, values.read(equation.invars))
    body = partial(loop_body(equation, policy), consts)
    options = {name: equation.params[name] for name in ("length", "reverse", "unroll")}
    carried, outputs = jax.lax.scan(body, start, items, **options)
    values.write(equation.outvars, [*carried, *outputs])


def _run_block(
    equations: list[Any], values: _jax.Values, needed: Sequence[Any], policy: Any
) -> None:
    """Runs the equations of a block, which keeps what a policy says."""
    made = {v for e in equations for v in e.outvars}
    given = [v for v in variables_in(v for e in equations for v in e.invars) if v not in made]
    results = [v for v in needed if v in made]

    def block(*args: Any) -> list[Any]:
        inside = _jax.Values(given, args)
        inside.run(equations)
        return inside.read(results)

    values.write(results, jax.checkpoint(block, policy=policy)(*values.read(given)))
