"""Keeps XLA's CPU compiler from recomputing convolution inputs for kernel gradients.

The gradient of a kernel is a convolution of the transposed input. XLA fuses that transposition with
the computation of the input, in a residual network a chain of blocks. It thus runs the chain again
for each kernel, in the order of the transposed array; barriers do not prevent this. But XLA never
computes an operation twice that it considers expensive, such as a division. So inputs are divided
by a number that is 1, which the compiler cannot know, and both convolutions use the quotient: x / 1
is x.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from tnt_jax import _jax


def keep_inputs(traced: Any, step: jax.Array) -> Any:
    """Returns a program with the results of `traced` that keeps the inputs of convolutions.

    Convolutions inside loops, conditions and called functions do not change. `step` must be an
    argument of the compiled program, because a constant would be simplified away.
    """
    shared = _shared_inputs(traced.jaxpr)
    if not shared:
        return traced
    one = jnp.where(step < 0, jnp.float32(2), jnp.float32(1))
    divisor = _jax.new_variable(one)
    quotients = {}
    equations = []
    for equation in traced.jaxpr.eqns:
        if _is_convolution(equation) and equation.invars[0] in shared:
            x = equation.invars[0]
            if x not in quotients:
                division, quotients[x] = _jax.equations_on(_divide, x, divisor)
                equations += division
            equation = equation.replace(invars=[quotients[x], *equation.invars[1:]])
        equations.append(equation)
    jaxpr = traced.jaxpr.replace(constvars=[*traced.jaxpr.constvars, divisor], eqns=equations)
    return _jax.ClosedJaxpr(jaxpr, [*traced.consts, one])


def _shared_inputs(jaxpr: Any) -> set[Any]:
    """Returns computed inputs that convolutions take with batch and features in both orders."""
    made = {variable for equation in jaxpr.eqns for variable in equation.outvars}
    orders: dict[Any, set[tuple[int, int]]] = {}
    for equation in filter(_is_convolution, jaxpr.eqns):
        if equation.invars[0] in made:
            batch, features = equation.params["dimension_numbers"].lhs_spec[:2]
            orders.setdefault(equation.invars[0], set()).add((batch, features))
    return {
        x
        for x, found in orders.items()
        if any((features, batch) in found for batch, features in found)
    }


def _divide(x: jax.Array, one: jax.Array) -> jax.Array:
    # The barrier is removed late enough that the compiler does not multiply by 1 / one instead.
    return lax.div(x, lax.optimization_barrier(lax.broadcast(one.astype(x.dtype), x.shape)))


def _is_convolution(equation: Any) -> bool:
    return equation.primitive.name == "conv_general_dilated" and isinstance(
        equation.invars[0], _jax.Var
    )
