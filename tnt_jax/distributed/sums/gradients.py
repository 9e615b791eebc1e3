"""Sums the values that a step exchanges in the order in which backpropagation finishes gradients.

That order is read from the traced program: that of the leaves of a tree says little about it. Dict
keys are sorted by name (`Block_10` before `Block_2`), a decoder may come before the encoder that it
needs, and the gradient of a shared matrix is finished only with its last use.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from tnt_jax import _jax
from tnt_jax.distributed.sums.fused_psum import psum
from tnt_jax.distributed.sums.reduction import Reduction, sum_compressed, sum_over_ranks

# Where an output of a traced program is computed: the position of the equation, then the position
# within that equation, and so on.
_Position = tuple[int, ...]


def trace_grads(
    function: Callable[[Any], tuple[Any, Any]],
    params: Any,
    *,
    rewrite: Callable[[Any], Any] | None = None,
) -> tuple[Any, Any, list[int]]:
    """Returns the result of `function(params)` and the order in which its gradients are finished.

    The function, such as `jax.value_and_grad(...)`, returns a pair whose second item is the
    gradients. It is traced once; `rewrite` maps the traced program to the one to run, with the same
    arguments and results. The order has the indices of the gradients' leaves, earliest first.
    """
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(params)
    if rewrite is not None:
        traced = rewrite(traced)
    outputs = _jax.jaxpr_as_fun(traced)(*jax.tree.leaves(params))
    others, grads = jax.tree.unflatten(jax.tree.structure(shapes), outputs)
    positions = output_positions(traced.jaxpr)[len(jax.tree.leaves(others)) :]
    return others, grads, sorted(range(len(positions)), key=lambda index: positions[index])


def prepend_to_order(first: Any, order: Sequence[int]) -> list[int]:
    """Returns the order of the leaves of `(first, tree)`, given that of `tree`."""
    num_first = len(jax.tree.leaves(first))
    return [*range(num_first), *(num_first + index for index in order)]


def output_positions(jaxpr: Any) -> list[_Position]:
    """Returns where in a jaxpr each output is computed; positions compare like times."""
    made: dict[Any, _Position] = {}
    for index, equation in enumerate(jaxpr.eqns):
        places = zip(equation.outvars, _positions_inside(equation), strict=True)
        made |= {variable: (index, *place) for variable, place in places}
    # An output that no equation computes is available from the start; a literal cannot be looked
    # up.
    return [
        () if isinstance(variable, _jax.Literal) else made.get(variable, ())
        for variable in jaxpr.outvars
    ]


def _positions_inside(equation: Any) -> Sequence[_Position]:
    """Returns the positions, inside a called program, of an equation's outputs."""
    called = [
        inner
        for inner in _jax.jaxprs_in_params(equation.params)
        if len(inner.outvars) == len(equation.outvars)
    ]
    # A loop finishes all its outputs with its last iteration, and a condition runs one branch only.
    is_call = len(called) == 1 and equation.primitive.name not in ("scan", "while")
    return output_positions(called[0]) if is_call else [()] * len(equation.outvars)


class Summed(NamedTuple):
    """The sums of an exchange, the same on all ranks; and what compression left out on this one.

    Attributes:
        first: Sums of the values that are ready before any gradient.
        others: Sums of the other values that a step exchanges.
        residual: Arrays `[1, ...]`; None without compression.
    """

    grads: Any
    first: Any
    others: Any
    residual: Any


def sum_gradients(
    grads: Any,
    reduction: Reduction,
    *,
    order: Sequence[int],
    first: Any = (),
    others: Any = (),
    residual: Any = None,
) -> Summed:
    """Returns the sums over the ranks of the values that a step exchanges, inside `shard_map`.

    `order` has the indices of the leaves of `grads`, in order of availability, earliest first;
    `first` is ready before any gradient, such as the loss; `others` are summed in any bucket;
    `residual` is that of the step before.
    """
    if residual is not None:
        own = jax.tree.map(lambda x: x[0], residual)
        first, others = psum(first), psum(others)
        grads, own = sum_compressed(grads, own, reduction, order=order)
        return Summed(grads, first, others, jax.tree.map(lambda x: x[None], own))
    first, grads = sum_over_ranks((first, grads), reduction, order=prepend_to_order(first, order))
    return Summed(grads, first, psum(others), None)
