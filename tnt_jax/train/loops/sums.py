"""Sums over ranks that a user's own step makes, read from its trace."""

from typing import Any

from tnt_jax import _jax


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


def _variables(values: Any) -> list[Any]:
    return [x for x in values if isinstance(x, _jax.Var)]
