"""Whether two equations of traced programs compute the same from their operands."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tnt_jax import _jax

# Calls whose name is that of a function, and says nothing.
_NAMED = ("jit", "pjit", "closed_call", "core_call")
_CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")


def same_type(a: Any, b: Any) -> bool:
    """Returns whether two variables or literals have one shape, dtype, and axes that vary."""
    kinds = [(x.aval.shape, x.aval.dtype, _jax.varying_axes_of(x.aval)) for x in (a, b)]
    return bool(kinds[0] == kinds[1])


def type_of(x: Any) -> str:
    """Returns dtype and shape of a variable or literal, in words."""
    return f"{x.aval.dtype}{list(x.aval.shape)}"


def same_literal(a: Any, b: Any) -> bool:
    """Returns whether two literals have the same type and value."""
    values = [np.asarray(x.val) for x in (a, b)]
    return same_type(a, b) and values[0].tobytes() == values[1].tobytes()


def same_equation(a: Any, b: Any) -> bool:
    """Returns whether two equations compute the same, given the same operands."""
    if a.primitive is not b.primitive or len(a.invars) != len(b.invars):
        return False
    if len(a.outvars) != len(b.outvars) or a.params.keys() != b.params.keys():
        return False
    if not all(map(same_type, a.outvars, b.outvars)):
        return False
    name = a.primitive.name
    return all(
        (key == "name" and name in _NAMED) or _same(x, b.params[key], is_custom=name in _CUSTOM)
        for key, x in a.params.items()
    )


def _same(x: Any, y: Any, *, is_custom: bool = False) -> bool:
    """Returns whether two parameters of equations are equal.

    Args:
        x: A parameter.
        y: Another one.
        is_custom: Whether they are those of a function with a derivative of its own. Every trace
            wraps the derivative anew; it is the same if the function is.
    """
    if x is y:
        return True
    if isinstance(x, _jax.ClosedJaxpr) and isinstance(y, _jax.ClosedJaxpr):
        is_one = not is_custom or _jax.function_of(x.jaxpr) == _jax.function_of(y.jaxpr)
        return (
            is_one and _same_program(x.jaxpr, y.jaxpr) and _same(tuple(x.consts), tuple(y.consts))
        )
    if isinstance(x, _jax.Jaxpr) and isinstance(y, _jax.Jaxpr):
        return _same_program(x, y)
    if isinstance(x, (tuple, list)) and isinstance(y, (tuple, list)):
        return len(x) == len(y) and all(map(_same, x, y))
    if isinstance(x, Mapping) and isinstance(y, Mapping):
        return x.keys() == y.keys() and all(_same(x[key], y[key]) for key in x)
    if is_custom and not isinstance(x, (int, str)):
        return True
    if isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
        return x.dtype == y.dtype and np.array_equal(x, y)
    return type(x) is type(y) and bool(np.all(x == y))


def _same_program(a: Any, b: Any) -> bool:
    """Returns whether two programs are equal up to the names of their variables."""
    given = [[*x.constvars, *x.invars] for x in (a, b)]
    if len(given[0]) != len(given[1]) or len(a.eqns) != len(b.eqns):
        return False
    known = dict(zip(*given, strict=True))
    if not all(x.aval == y.aval for x, y in known.items()):
        return False

    def same_atom(x: Any, y: Any) -> bool:
        literals = [isinstance(atom, _jax.Literal) for atom in (x, y)]
        if any(literals):
            return all(literals) and same_literal(x, y)
        return known.get(x) is y

    for e, f in zip(a.eqns, b.eqns, strict=True):
        if not (same_equation(e, f) and all(map(same_atom, e.invars, f.invars))):
            return False
        known.update(zip(e.outvars, f.outvars, strict=True))
    return len(a.outvars) == len(b.outvars) and all(map(same_atom, a.outvars, b.outvars))
