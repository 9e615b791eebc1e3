"""Runs a traced update on a part of the variables, and tells what it would need of the others.

Each value in the program of an Optax transformation is one of three kinds. It is the *same*
everywhere (a count, a learning rate); it belongs to the *rows* of one variable, element by element;
or it mixes the elements of some variables, as a *whole*. Elementwise transformations know the first
two alone, and need no other server. A scalar that is summed over all rows of variables, such as the
square of a global norm, is a *point* where servers exchange: each has the sum over its rows, and
the rest of the program needs the total.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp

from tnt_jax import _jax

_ELEMENTWISE = frozenset((
    "abs", "add", "add_any", "and", "atan2", "cbrt", "ceil", "clamp", "conj",
    "convert_element_type", "copy", "copy_p", "cos", "div", "eq", "erf", "erf_inv", "exp", "exp2",
    "expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le", "log", "log1p",
    "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or", "pow", "real",
    "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sqrt", "square",
    "stop_gradient", "sub", "tan", "tanh", "xor",
))  # fmt: skip
_REDUCTIONS = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "min",
    "reduce_or": "max",
}
_RESHAPING = ("broadcast_in_dim", "squeeze", "reshape", "expand_dims")
_ORDERED = ("dot_general", "sort", "cumsum")
# Stands for "the shapes of the variables" among the variables that a value depends on.
_SHAPES = -1


@dataclass(frozen=True)
class Kind:
    """What a value of the program depends on.

    Attributes:
        name: `"same"`, `"rows"` or `"whole"`. All elements of an array that is the same are equal.
        variables: Numbers of the variables whose data it depends on.
        depth: Rounds of exchange that it needs.
        because: The operation that made it a whole.
    """

    name: str
    variables: frozenset[int] = frozenset()
    depth: int = 0
    because: str = ""


SAME = Kind("same")


def rows_of(index: int) -> Kind:
    """Returns the kind of what lies along the rows of a variable."""
    return Kind("rows", frozenset([index]))


def whole_of(*indices: int, because: str = "its state") -> Kind:
    """Returns the kind of what mixes elements of variables."""
    return Kind("whole", frozenset(indices), because=because)


@dataclass(frozen=True)
class Point:
    """A scalar that servers exchange.

    Attributes:
        operation: `"sum"`, `"max"` or `"min"` over the servers.
        depth: Round in which it is known, from 1 on.
    """

    operation: str
    depth: int


@dataclass
class Interpreter:
    """Evaluates a traced program for one server's rows, with totals of other servers put in.

    Args:
        exchanges: Whether reductions of rows to scalars are points of exchange.
        totals: Values of the points over all servers, None for those that are not known; without
            any, each has this server's own.

    Attributes:
        points: The points that were met, in order.
        partials: This server's own values of them.
    """

    exchanges: bool
    totals: Sequence[Any] = ()
    points: list[Point] = field(default_factory=list)
    partials: list[Any] = field(default_factory=list)

    def run(
        self, program: Any, operands: Sequence[Any], kinds: Sequence[Kind]
    ) -> tuple[list[Any], list[Kind]]:
        """Returns the results of a `ClosedJaxpr` and their kinds."""
        jaxpr = program.jaxpr
        values: dict[Any, tuple[Any, Kind]] = {}
        for variable, constant in zip(jaxpr.constvars, program.consts, strict=True):
            values[variable] = (constant, SAME if jnp.ndim(constant) == 0 else whole_of())
        values |= dict(zip(jaxpr.invars, zip(operands, kinds, strict=True), strict=True))

        def read(variable: Any) -> tuple[Any, Kind]:
            return (variable.val, SAME) if isinstance(variable, _jax.Literal) else values[variable]

        for equation in jaxpr.eqns:
            read_all = [read(variable) for variable in equation.invars]
            inputs, known = [value for value, _ in read_all], [kind for _, kind in read_all]
            if (called := _jax.called_program(equation)) is not None:
                results, found = self.run(called, inputs, known)
            else:
                results, found = self._step(equation, inputs, known)
            values |= zip(equation.outvars, zip(results, found, strict=True), strict=True)
        outputs = [read(variable) for variable in jaxpr.outvars]
        return [value for value, _ in outputs], [kind for _, kind in outputs]

    def _step(
        self, equation: Any, inputs: list[Any], kinds: list[Kind]
    ) -> tuple[list[Any], list[Kind]]:
        results = _jax.run_equation(equation, inputs)
        operation = _scalar_reduction(equation, kinds)
        if operation is not None and self.exchanges:
            return [self._exchanged(results[0], operation, kinds[0])], [
                Kind("same", depth=kinds[0].depth + 1)
            ]
        return results, [_kind_of(equation, out, kinds) for out in equation.outvars]

    def _exchanged(self, partial: Any, operation: str, kind: Kind) -> Any:
        """Notes a point; returns its total, or this server's part if that is not known yet."""
        index = len(self.points)
        self.points.append(Point(operation, kind.depth + 1))
        self.partials.append(partial)
        total = self.totals[index] if self.totals else None
        return partial if total is None else jnp.asarray(total).astype(partial.dtype)


def _scalar_reduction(equation: Any, kinds: list[Kind]) -> str | None:
    """Returns over what a scalar is made of all rows of one variable, or None."""
    if equation.outvars[0].aval.shape != () or any(kind.name != "rows" for kind in kinds):
        return None
    if equation.primitive.name == "dot_general":
        return "sum" if len(frozenset.union(*(kind.variables for kind in kinds))) == 1 else None
    return _REDUCTIONS.get(equation.primitive.name)


def _kind_of(equation: Any, out: Any, kinds: list[Kind]) -> Kind:
    """Returns the kind of a result of an equation that is no point of exchange."""
    name = equation.primitive.name
    depth = max((kind.depth for kind in kinds), default=0)
    variables = frozenset().union(*(kind.variables for kind in kinds))
    whole = next((kind for kind in kinds if kind.name == "whole"), None)
    if whole is None and name in _ELEMENTWISE and len(variables) <= 1:
        return Kind("rows" if variables else "same", variables, depth)
    if name in _RESHAPING and whole is None:
        if not variables:
            return Kind("same", depth=depth)
        if equation.invars[0].aval.shape == out.aval.shape:
            return Kind("rows", variables, depth)
    if not variables and whole is None and out.aval.shape == () and name not in _REDUCTIONS:
        return Kind("same", depth=depth)
    # The sum of no elements is the same everywhere.
    has_elements = any(variable.aval.size for variable in equation.invars)
    if not variables and has_elements and (name in _REDUCTIONS or name in _ORDERED):
        variables = frozenset([_SHAPES])
    because = whole.because if whole is not None and len(whole.variables) > 1 else name
    return Kind("whole", variables, depth, because)
