"""Keeps XLA's CPU compiler from computing inputs of convolutions again for the gradients of kernels.

The gradient of a kernel is a convolution of the transposed input. XLA fuses that transposition with whatever computes the input, in
a residual network a chain of blocks, and so runs the chain again for each kernel, in the order of the transposed array; barriers do
not stop it. It computes nothing twice that it takes for expensive, as it does a division. So inputs are divided by a number that is
1 without the compiler's knowledge, and both convolutions take the quotient: x / 1 is x.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core


def keep_inputs(traced: Any, step: jax.Array) -> Any:
    """Returns a program with the results of `traced` that keeps inputs of convolutions.

    Convolutions within loops, conditions and functions that are called stay as they are.

    Args:
        traced: A `jax.extend.core.ClosedJaxpr` that computes gradients.
        step: Number of steps so far, from 0, an argument of the program that is compiled: a constant would be simplified away.
    """
    shared = _shared_inputs(traced.jaxpr)
    if not shared:
        return traced
    one = jnp.where(step < 0, jnp.float32(2), jnp.float32(1))
    divisor, quotients, equations = jax.make_jaxpr(lambda one: one)(one).jaxpr.invars[0], {}, []
    for equation in traced.jaxpr.eqns:
        if _is_convolution(equation) and equation.invars[0] in shared:
            x = equation.invars[0]
            if x not in quotients:
                division, quotients[x] = _division(x, divisor)
                equations += division
            equation = equation.replace(invars=[quotients[x], *equation.invars[1:]])
        equations.append(equation)
    jaxpr = traced.jaxpr.replace(constvars=[*traced.jaxpr.constvars, divisor], eqns=equations)
    return core.ClosedJaxpr(jaxpr, [*traced.consts, one])


def _shared_inputs(jaxpr: Any) -> set[Any]:
    """Returns computed first operands of convolutions with batch and features in one order and of others with the reverse."""
    made = {variable for equation in jaxpr.eqns for variable in equation.outvars}
    orders: dict[Any, set[tuple[int, int]]] = {}
    for equation in filter(_is_convolution, jaxpr.eqns):
        if equation.invars[0] in made:
            batch, features = equation.params["dimension_numbers"].lhs_spec[:2]
            orders.setdefault(equation.invars[0], set()).add((batch, features))
    return {x for x, found in orders.items() if any((features, batch) in found for batch, features in found)}


def _division(x: Any, divisor: Any) -> tuple[list[Any], Any]:
    """Returns equations that divide a variable, and the variable of the quotient."""

    def divide(x: jax.Array, one: jax.Array) -> jax.Array:
        # The barrier goes late enough that the compiler does not multiply by 1 / one instead.
        return lax.div(x, lax.optimization_barrier(lax.broadcast(one.astype(x.dtype), x.shape)))

    # Types, other than shapes, tell which values differ between ranks; the quotient differs where x does.
    traced = jax.make_jaxpr(divide)(x.aval, divisor.aval).jaxpr
    known = dict(zip(traced.invars, (x, divisor), strict=True))
    equations = [
        equation.replace(invars=[v if isinstance(v, core.Literal) else known.get(v, v) for v in equation.invars])
        for equation in traced.eqns
    ]
    return equations, traced.outvars[0]


def _is_convolution(equation: Any) -> bool:
    return equation.primitive.name == "conv_general_dilated" and isinstance(equation.invars[0], core.Var)
