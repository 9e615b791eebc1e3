"""The order in which backpropagation finishes gradients, read from the traced program.

The order of the leaves of a tree says little about it: dict keys are sorted by name (`Block_10` stands before `Block_2`), a decoder
stands before the encoder that it needs, and a shared matrix is finished with its last use.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

# Where an output of a traced program is computed: the position of the equation, then the position within that equation, and so on.
_Place = tuple[int, ...]


def trace_grads(
    function: Callable[[Any], tuple[Any, Any]], params: Any, *, rewrite: Callable[[Any], Any] | None = None
) -> tuple[Any, Any, list[int]]:
    """Returns what `function(params)` returns, and the order in which its gradients are finished.

    The function is traced once.

    Args:
        function: From parameters to a pair whose second item are gradients, such as `jax.value_and_grad(...)`.
        params: Parameters.
        rewrite: From the traced `jax.extend.core.ClosedJaxpr` to the one to run, which has the same arguments and results; None runs
            the traced one.

    Returns:
        Both items of the pair, and the indices of the leaves of the gradients, the leaf that is finished first in front.
    """
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(params)
    if rewrite is not None:
        traced = rewrite(traced)
    outputs = core.jaxpr_as_fun(traced)(*jax.tree.leaves(params))
    others, grads = jax.tree.unflatten(jax.tree.structure(shapes), outputs)
    places = output_places(traced.jaxpr)[len(jax.tree.leaves(others)) :]
    return others, grads, sorted(range(len(places)), key=lambda index: places[index])


def in_front(first: Any, order: Sequence[int]) -> list[int]:
    """Returns the order of the leaves of `(first, tree)`, where `order` is that of the leaves of `tree`: those of `first` in front."""
    num_first = len(jax.tree.leaves(first))
    return [*range(num_first), *(num_first + index for index in order)]


def output_places(jaxpr: Any) -> list[_Place]:
    """Returns for each output of a program where it is computed; places compare like times.

    Args:
        jaxpr: A `jax.extend.core.Jaxpr`.
    """
    made: dict[Any, _Place] = {}
    for index, equation in enumerate(jaxpr.eqns):
        inner = _places_within(equation)
        made |= {variable: (index, *inner[position]) for position, variable in enumerate(equation.outvars)}
    # An output that no equation computes is there from the beginning; a literal cannot be looked up.
    return [() if isinstance(variable, core.Literal) else made.get(variable, ()) for variable in jaxpr.outvars]


def _places_within(equation: Any) -> Sequence[_Place]:
    """Returns where an equation that calls one program computes each of its outputs within that program."""
    called = [inner for inner in core.jaxprs_in_params(equation.params) if len(inner.outvars) == len(equation.outvars)]
    # A loop finishes all its outputs with its last round, and of a condition only one branch runs.
    is_call = len(called) == 1 and equation.primitive.name not in ("scan", "while")
    return output_places(called[0]) if is_call else [()] * len(equation.outvars)
