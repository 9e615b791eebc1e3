"""Sums over ranks that a user's own step makes, read from its trace."""

from typing import Any

from tnt_jax import _jax
from tnt_jax.distributed.gradients import waits_for_ring


def sums_again(jaxpr: Any) -> bool:
    """Returns whether a program sums over the ranks a value equal on all of them.

    Only values that the program computes count.
    """
    spread = set()
    for equation in jaxpr.eqns:
        if any(sums_again(inner) for inner in _jax.jaxprs_in_params(equation.params)):
            return True
        name = equation.primitive.name
        computed = _variables(equation.invars)
        if name in ("pvary", "pcast") and computed and computed[0] not in jaxpr.constvars:
            spread.update(equation.outvars)
        if name.startswith("psum") and spread.intersection(computed):
            return True
    return False


def mixes_sums(jaxpr: Any) -> bool:
    """Returns whether a program waits for the ring while XLA may exchange something besides.

    That exchange may come before the wait for the ring of processes on one process and after it on
    another. Such processes would wait for each other indefinitely. What XLA exchanges must either
    lead to what the program waits for, or follow from it.
    """
    (inner,) = (x for e in jaxpr.eqns if e.primitive.name == "shard_map"
                for x in _jax.jaxprs_in_params(e.params))  # fmt: skip
    equations = _jax.without_dead_code(inner).eqns
    waits = [equation for equation in equations if waits_for_ring(equation)]
    bits = {id(equation): 1 << index for index, equation in enumerate(waits)}
    before, after = _reached(equations, bits), _reached(equations, bits, backwards=True)
    return any(
        before[id(equation)] | after[id(equation)] != (1 << len(waits)) - 1
        for equation in equations
        if _jax.is_collective(equation)
    )


def _reached(equations: Any, bits: dict[int, int], *, backwards: bool = False) -> dict[int, int]:
    """Returns for each equation the bits of those that it follows from, or that lead from it."""
    of_variable: dict[Any, int] = {}
    found: dict[int, int] = {}
    for equation in reversed(equations) if backwards else equations:
        sources, targets = equation.invars, equation.outvars
        if backwards:
            sources, targets = targets, sources
        reached = bits.get(id(equation), 0)
        for variable in _variables(sources):
            reached |= of_variable.get(variable, 0)
        for variable in _variables(targets):
            of_variable[variable] = of_variable.get(variable, 0) | reached
        found[id(equation)] = reached
    return found


def _variables(values: Any) -> list[Any]:
    return [x for x in values if isinstance(x, _jax.Var)]
