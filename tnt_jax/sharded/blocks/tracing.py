"""Traces functions of parameters, and tells what the equations of their programs work on.

A module that is rematerialized, as by `nn.remat`, folds its own number into the key of its dropout
inside the rematerialized function. So the programs of equal blocks differ in a number; outside of
them (`hoisted`) it can be an input of each layer.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from tnt_jax import _jax

_REMATERIALIZED = ("checkpoint", "remat2", "remat")


def hoisted(equations: list[Any]) -> list[Any]:
    """Returns equations in which rematerialized ones get varying numbers from outside."""
    found = []
    for equation in equations:
        if equation.primitive.name not in _REMATERIALIZED:
            found.append(equation)
            continue
        jaxpr = equation.params["jaxpr"]
        own = [e for e in jaxpr.eqns if _marks_number(e)]
        # New variables: two equations may share a program.
        variables = [_jax.new_variable(e.outvars[0].aval) for e in own]
        found += [e.replace(outvars=[v]) for e, v in zip(own, variables, strict=True)]
        inside = jaxpr.replace(
            invars=[*jaxpr.invars, *(e.outvars[0] for e in own)],
            eqns=[e for e in jaxpr.eqns if not _marks_number(e)],
        )
        found.append(
            equation.replace(
                invars=[*equation.invars, *variables], params=equation.params | {"jaxpr": inside}
            )
        )
    return found


def _marks_number(equation: Any) -> bool:
    """Returns whether an equation only marks a number of the program as varying."""
    is_number = isinstance(equation.invars[0], _jax.Literal) if equation.invars else False
    return equation.primitive.name in _jax.CASTS and is_number


class Traced(NamedTuple):
    """The program of a function of arrays; `rebuild` makes the function's result of its results."""

    program: Any
    rebuild: Callable[[Iterable[Any]], Any]


def trace(function: Callable, *args: Any) -> Traced:
    """Returns the program of `function(*args)`; the result may hold numbers beside arrays."""
    found: list[Any] = []

    def arrays_of(*args: Any) -> list[jax.Array]:
        results, tree = jax.tree.flatten(function(*args))
        found[:] = [tree, [None if isinstance(x, jax.Array) else x for x in results]]
        return [x for x in results if isinstance(x, jax.Array)]

    program = jax.make_jaxpr(arrays_of)(*args)
    tree, others = found

    def rebuild(arrays: Iterable[Any]) -> Any:
        remaining = iter(arrays)
        return tree.unflatten([next(remaining) if x is None else x for x in others])

    return Traced(program, rebuild)


def variables_in(variables: Iterable[Any]) -> list[Any]:
    """Returns variables without literals, each once, in order."""
    return list(dict.fromkeys(v for v in variables if not isinstance(v, _jax.Literal)))


def loop_body(equation: Any, policy: Any) -> Callable:
    """Returns the body of a `jax.lax.scan` equation as `(constants, carried, items)`, all lists.

    With a policy of `jax.checkpoint` it is rematerialized.
    """
    run = _jax.jaxpr_as_fun(equation.params["jaxpr"])
    _, num_carried = _jax.loop_sizes(equation)

    def body(consts: Any, carried: Any, items: Any) -> tuple[Any, Any]:
        results = run(*consts, *carried, *items)
        return results[:num_carried], results[num_carried:]

    # Within a loop nothing can be merged with what was computed before.
    return body if policy is None else jax.checkpoint(body, policy=policy, prevent_cse=False)


class LoopOperands(NamedTuple):
    """Operands of an equation of `jax.lax.scan`: constants, the start, and the items."""

    consts: list[Any]
    carried: list[Any]
    items: list[Any]


def loop_operands(equation: Any, operands: list[Any]) -> LoopOperands:
    """Returns the operands of an equation of `jax.lax.scan` by their use."""
    num_consts, num_carried = _jax.loop_sizes(equation)
    start = num_consts + num_carried
    return LoopOperands(operands[:num_consts], operands[num_consts:start], operands[start:])


class Sources:
    """Which of the parameters a variable stands for, where casts alone lie between."""

    def __init__(self, variables: Iterable[Any]) -> None:
        self._found = {variable: index for index, variable in enumerate(variables)}

    def passes(self, equation: Any) -> bool:
        """Notes an equation; returns whether it only casts a parameter."""
        if equation.primitive.name not in _jax.CASTS:
            return False
        source = self.of(equation.invars[0])
        if source is None:
            return False
        self._found[equation.outvars[0]] = source
        return True

    def of(self, variable: Any) -> int | None:
        """Returns the index of the parameter that a variable stands for, or None."""
        return None if isinstance(variable, _jax.Literal) else self._found.get(variable)
