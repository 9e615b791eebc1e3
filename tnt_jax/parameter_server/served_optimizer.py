"""An Optax transformation over servers that each hold some rows of the variables.

Every server runs the transformation on the whole tree of variables, in which those that it does not
hold have no rows. That gives the same numbers for elementwise transformations. Others are traced
(see `dependence`): servers exchange the scalars that are reduced over variables, such as the square
of a global norm, or keep variables undivided; what neither can do is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from tnt_jax.parameter_server.dependence import (
    SAME,
    Interpreter,
    Kind,
    Point,
    rows_of,
    whole_of,
)
from tnt_jax.parameter_server.partition import ShardPlan

# Longer than any first dimension of a variable: which of them an array of the optimizer follows.
_MARK = 1 << 40


@dataclass(frozen=True)
class ServedOptimizer:
    """A transformation, and how its state is divided over the servers.

    Attributes:
        transformation: The Optax transformation.
        plan: Which rows of the variables lie on which server; parameters come first.
        params: Shapes and dtypes of the parameters: pytree of `jax.ShapeDtypeStruct`.
        followed: For each array of its state the number of the parameter whose rows it follows,
            or None.
        state_shapes: Shape of each array of its state, for whole variables.
        points: What the servers exchange in an update; empty for most transformations.
    """

    transformation: optax.GradientTransformation
    plan: ShardPlan
    params: Any
    followed: tuple[int | None, ...]
    state_shapes: tuple[tuple[int, ...], ...]
    points: tuple[Point, ...] = ()

    @property
    def num_rounds(self) -> int:
        """Number of exchanges between servers in an update."""
        return max((point.depth for point in self.points), default=0)

    def params_on(self, server: int) -> Any:
        """Returns the shapes and dtypes of the parameters on a server."""
        leaves, structure = jax.tree.flatten(self.params)
        return structure.unflatten(
            [
                jax.ShapeDtypeStruct(self.plan.shape_on(server, index), leaf.dtype)
                for index, leaf in enumerate(leaves)
            ]
        )

    def state_on(self, server: int, state: Any) -> list[np.ndarray | None]:
        """Returns a server's arrays of the state; None for those that it makes anew.

        Args:
            server: Number of the server.
            state: The state for whole variables, as NumPy arrays.
        """
        leaves = jax.tree.leaves(state)
        shapes = _shapes_of_state(self.transformation, self.params_on(server))
        parts: list[np.ndarray | None] = []
        for leaf, shape, index in zip(leaves, shapes, self.followed, strict=True):
            if leaf.shape == shape:
                parts.append(leaf)
            elif index is not None and leaf.shape[1:] == shape[1:]:
                parts.append(self.plan.part(server, index, leaf))
            else:
                parts.append(None)
        return parts

    def whole_state(self, parts: Sequence[Sequence[Any]]) -> list[np.ndarray]:
        """Returns the arrays of the state for whole variables.

        Args:
            parts: The arrays of the state on each server.
        """
        whole = []
        for number, shape in enumerate(self.state_shapes):
            of_servers = [np.asarray(arrays[number]) for arrays in parts]
            complete = next((array for array in of_servers if array.shape == shape), None)
            index = self.followed[number]
            if complete is None:
                assert index is not None, "The traced transformation keeps such variables whole."
                complete = self.plan.whole(index, of_servers)
            whole.append(complete)
        return whole

    def update(self) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
        """Returns the function `(params, state, grads) -> (params, state)`, without exchange."""

        def update(params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
            updates, state = self.transformation.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        return update

    def exchanging_update(self) -> Callable[..., tuple[Any, Any, list[Any]]]:
        """Returns the function `(params, state, grads, totals) -> (params, state, partials)`.

        `totals` are the values of the points over all servers, None where they are not known yet;
        `partials` are this server's own values. Those of depth `d` are right once the totals of
        smaller depth are given.
        """
        update = self.update()

        def run(params: Any, state: Any, grads: Any, totals: Sequence[Any]) -> Any:
            program, structure = _traced(update, params, state, grads)
            interpreter = Interpreter(exchanges=True, totals=totals)
            kinds = self._kinds(params, state)
            operands = jax.tree.leaves((params, state, grads))
            results, _ = interpreter.run(program, operands, kinds)
            params, state = structure.unflatten(results)
            return params, state, interpreter.partials

        return run

    def _kinds(self, params: Any, state: Any) -> list[Kind]:
        """Returns the kinds of parameters, state and gradients."""
        shapes = [leaf.shape for leaf in jax.tree.leaves(params)]
        variables = [rows_of(index) for index in range(len(shapes))]
        of_state = []
        for leaf, index in zip(jax.tree.leaves(state), self.followed, strict=True):
            if index is not None:
                is_aligned = leaf.shape == shapes[index]
                of_state.append(rows_of(index) if is_aligned else whole_of(index))
            else:
                of_state.append(SAME if leaf.shape == () else whole_of())
        return variables + of_state + variables


def serve_optimizer(
    transformation: optax.GradientTransformation, params: Any, plan: ShardPlan, *, name: str
) -> ServedOptimizer:
    """Returns a transformation that runs on the servers of a plan.

    Args:
        transformation: The Optax transformation.
        params: Parameters, or their shapes and dtypes.
        plan: Which rows of them lie on which server.
        name: Name of the optimizer, for messages.

    Raises:
        ValueError: If its updates need what servers cannot exchange.
    """
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    shapes = tuple(_shapes_of_state(transformation, params))
    served = ServedOptimizer(
        transformation, plan, params, _followed(transformation, params), shapes
    )
    if any(_is_key(leaf) for leaf in jax.tree.leaves(jax.eval_shape(transformation.init, params))):
        raise ValueError(
            f"The optimizer {name} keeps a typed random key in its state, which cannot be sent. "
            "Use an optimizer without random numbers."
        )
    if plan.num_servers == 1:
        return served
    try:
        alone = _problem(served, exchanges=False)
        if alone is None:
            return served
        exchanging = _problem(served, exchanges=True)
        points = {_analysed(served, server, exchanges=True)[0] for server in _servers(plan)}
    except Exception as error:
        raise ValueError(
            _refusal(name, f"it cannot be traced on a part of them ({error})")
        ) from error
    if exchanging is not None or len(points) > 1:
        raise ValueError(_refusal(name, exchanging or alone))
    return ServedOptimizer(
        transformation, plan, params, served.followed, shapes, next(iter(points))
    )


def _problem(served: ServedOptimizer, *, exchanges: bool) -> str | None:
    """Returns why updates on several servers would differ from those on one, or None."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(served.params)]
    for server in _servers(served.plan):
        _, kinds = _analysed(served, server, exchanges=exchanges)
        for kind in kinds:
            if kind.name != "whole":
                continue
            if len(kind.variables) > 1:
                return f"it mixes values of several variables ({kind.because})"
            for index in kind.variables:
                if index < 0 or served.plan.is_divided(index):
                    what = paths[index] if index >= 0 else "all variables"
                    return f"it needs the whole of {what} at once ({kind.because})"
    return None


def _analysed(
    served: ServedOptimizer, server: int, *, exchanges: bool
) -> tuple[tuple[Point, ...], list[Kind]]:
    """Returns the points and the kinds of the results of an update on a server; runs nothing."""
    params = served.params_on(server)
    state = jax.eval_shape(served.transformation.init, params)
    program, _ = _traced(served.update(), params, state, params)
    interpreter = Interpreter(exchanges)
    found: list[Kind] = []

    def run(*operands: Any) -> list[Any]:
        results, kinds = interpreter.run(program, operands, served._kinds(params, state))
        found.extend(kinds)
        return results

    jax.eval_shape(run, *jax.tree.leaves((params, state, params)))
    return tuple(interpreter.points), found


def _traced(update: Callable, *arguments: Any) -> tuple[Any, Any]:
    """Returns the program of an update, and the structure of its results."""
    program, results = jax.make_jaxpr(update, return_shape=True)(*arguments)
    return program, jax.tree.structure(results)


def _shapes_of_state(
    transformation: optax.GradientTransformation, params: Any
) -> list[tuple[int, ...]]:
    return [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(transformation.init, params))]


def _followed(transformation: optax.GradientTransformation, params: Any) -> tuple[int | None, ...]:
    """Returns for each array of the state the number of the parameter whose rows it follows."""
    leaves, structure = jax.tree.flatten(params)
    marked = [
        jax.ShapeDtypeStruct((_MARK + index, *leaf.shape[1:]) if leaf.shape else (), leaf.dtype)
        for index, leaf in enumerate(leaves)
    ]
    try:
        shapes = _shapes_of_state(transformation, structure.unflatten(marked))
    except (ValueError, TypeError, OverflowError):
        # The state follows the shapes in another way: variables must be whole then.
        return (None,) * len(_shapes_of_state(transformation, params))
    return tuple(
        shape[0] - _MARK if shape and _MARK <= shape[0] < _MARK + len(leaves) else None
        for shape in shapes
    )


def _is_key(leaf: Any) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _servers(plan: ShardPlan) -> range:
    return range(plan.num_servers)


def _refusal(name: str, problem: str | None) -> str:
    return (
        f"The optimizer {name} cannot run on several servers: {problem}. Use num_servers=1, no "
        "partitioner (variables are then whole on a server), or another optimizer. Elementwise "
        "transformations, norms and sums over variables work on any number of servers."
    )
