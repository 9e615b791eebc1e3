"""Sums the values that a step exchanges in the order in which backpropagation finishes gradients.

That order is read from the traced program: that of the leaves of a tree says little about it. Dict
keys are sorted by name (`Block_10` before `Block_2`), a decoder may come before the encoder that it
needs, and the gradient of a shared matrix is finished only with its last use. With them travel the
averages of the state that a model updates itself.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

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
    """Returns the pair `function(params)`, gradients second, and the order of their leaves.

    The order has the indices of the leaves as they are finished, earliest first. The function is
    traced once; `rewrite` maps that program to the one to run, of the same arguments and results.
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

    `order` is that of `trace_grads`; `first` is ready before any gradient, such as the loss;
    `others` are summed in any bucket; `residual` is that of the step before.
    """
    if residual is not None:
        own = jax.tree.map(lambda x: x[0], residual)
        first, others = psum(first), psum(others)
        grads, own = sum_compressed(grads, own, reduction, order=order)
        return Summed(grads, first, others, jax.tree.map(lambda x: x[None], own))
    first, grads = sum_over_ranks((first, grads), reduction, order=prepend_to_order(first, order))
    return Summed(grads, first, psum(others), None)


def adasum(tree: Any, axis_name: str) -> Any:
    """Returns the Adasum of each array over the ranks of an axis, the same bits on every rank.

    Two gradients give `(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b` (Maleki et al. 2020,
    arXiv:2006.02924, section 3): their sum where they are orthogonal, their mean where they are
    parallel. More are combined in a binary tree, neighbours first (section 3.4). As in the paper's
    and Horovod's implementation, each array is combined by itself. Products are summed in float32.
    """
    num_ranks = jax.lax.axis_size(axis_name)
    if num_ranks & (num_ranks - 1):
        raise ValueError(
            f"Adasum combines ranks in pairs and needs a power of two of them, but {axis_name!r} "
            f'has {num_ranks}. Use op="average", or fewer ranks.'
        )
    rank = jax.lax.axis_index(axis_name)
    distance = 1
    while distance < num_ranks:
        pairs = [(source, source ^ distance) for source in range(num_ranks)]
        combined = partial(_combined, is_lower=rank & distance == 0)
        tree = jax.tree.map(combined, tree, jax.lax.ppermute(tree, axis_name, pairs))
        distance *= 2
    return _same_everywhere(tree, axis_name)


def _combined(own: jax.Array, other: jax.Array, is_lower: jax.Array) -> jax.Array:
    # Both partners compute the same sum in the same order.
    a = jnp.where(is_lower, own, other).astype(jnp.float32)
    b = jnp.where(is_lower, other, own).astype(jnp.float32)
    product, a_square, b_square = jnp.vdot(a, b), jnp.vdot(a, a), jnp.vdot(b, b)
    a_share, b_share = (
        1 - jnp.where(square > 0, product / (2 * jnp.where(square > 0, square, 1)), 0)
        for square in (a_square, b_square)
    )
    return (a_share * a + b_share * b).astype(own.dtype)


def _same_everywhere(tree: Any, axis_name: str) -> Any:
    """Returns arrays that are equal on all ranks marked as such, where arrays are marked."""
    if not _jax.tracks_varying(axis_name):
        return tree
    is_first = jax.lax.axis_index(axis_name) == 0
    return jax.tree.map(
        lambda x: jax.lax.psum(jnp.where(is_first, x, jnp.zeros_like(x)), axis_name), tree
    )


class StateAverage:
    """The average over the ranks of the model state that differs between them, in two parts.

    `share` is this rank's part of the global batch's real rows; None for equal parts. `summands` is
    what this rank adds to the averages; pass their sums over the ranks to `result`.
    """

    def __init__(self, tree: Any, share: jax.Array | None) -> None:
        self._tree, self._share = tree, share
        self.summands = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if _jax.is_varying(leaf):
                check_can_be_averaged(path, leaf)
                self.summands.append(leaf if share is None else leaf * share.astype(leaf.dtype))

    def result(self, totals: list[jax.Array]) -> Any:
        """Returns the model state, averaged from the sums of `summands` over the ranks."""
        num_ranks = jax.lax.axis_size(_jax.rank_axes())
        remaining = iter(totals)

        def average(leaf: jax.Array) -> jax.Array:
            if not _jax.is_varying(leaf):
                return leaf
            return next(remaining) / num_ranks if self._share is None else next(remaining)

        return jax.tree.map(average, self._tree)


def check_can_be_averaged(path: Any, leaf: jax.Array) -> None:
    """Raises a TypeError if a leaf of model state that differs between ranks is not floating."""
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise TypeError(
            f"Model state {jax.tree_util.keystr(path)} ({leaf.dtype}) differs between ranks and "
            "cannot be averaged. Only floating state may depend on the batch; make this state the "
            f"same on every rank, for instance with jax.lax.psum(..., {_jax.DATA_AXIS!r})."
        )
