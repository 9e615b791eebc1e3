"""A server: holds its rows of the variables, and applies gradients to them.

It runs in a Ray actor, but knows nothing of Ray. Calls of one coordinator run in their order, which
is the order of the versions on every server.

Every server runs the Optax transformation on the whole tree of variables, in which those that it
does not hold have no rows. That gives the same numbers for elementwise transformations. Others are
traced (see `partition`): servers exchange the scalars that are reduced over variables, such as the
square of a global norm, or keep variables undivided; what neither can do is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from tnt_jax import _jax
from tnt_jax.parameter_server.partition import (
    SAME,
    Interpreter,
    Kind,
    Point,
    ShardPlan,
    rows_of,
    whole_of,
)
from tnt_jax.train.state import descriptions, updated

# Longer than any first dimension of a variable: which of them an array of the optimizer follows.
_MARK = 1 << 40


@dataclass(frozen=True, eq=False)
class ServedOptimizer:
    """An Optax transformation, and how its state is divided over the servers of a plan."""

    transformation: optax.GradientTransformation
    plan: ShardPlan
    params: Any
    # For each array of the state the number of the parameter whose rows it follows, or None.
    followed: tuple[int | None, ...]
    state_shapes: tuple[tuple[int, ...], ...]  # For whole variables.
    points: tuple[Point, ...] = ()  # What the servers exchange in an update, mostly nothing.

    @property
    def num_rounds(self) -> int:
        """Number of exchanges between servers in an update."""
        return max((point.depth for point in self.points), default=0)

    def params_on(self, server: int) -> Any:
        """Returns the shapes and dtypes of the parameters on a server."""
        leaves, structure = jax.tree.flatten(self.params)
        return structure.unflatten(
            jax.ShapeDtypeStruct(self.plan.shape_on(server, index), leaf.dtype)
            for index, leaf in enumerate(leaves)
        )

    def state_on(self, server: int, state: Any) -> list[np.ndarray | None]:
        """Returns a server's arrays of a whole state; None for those that it makes anew."""

        def part(leaf: np.ndarray, shape: tuple[int, ...], index: int | None) -> np.ndarray | None:
            if leaf.shape == shape:
                return leaf
            if index is not None and leaf.shape[1:] == shape[1:]:
                return self.plan.part(server, index, leaf)
            return None

        shapes = _shapes_of_state(self.transformation, self.params_on(server))
        places = zip(jax.tree.leaves(state), shapes, self.followed, strict=True)
        return [part(*place) for place in places]

    def whole_state(self, parts: Sequence[Sequence[Any]]) -> list[np.ndarray]:
        """Returns the arrays of the state for whole variables, from those of each server."""

        def whole(shape: tuple[int, ...], index: int | None, *parts: Any) -> np.ndarray:
            of_servers = [np.asarray(part) for part in parts]
            for array in of_servers:
                if array.shape == shape:
                    return array
            assert index is not None, "The traced transformation keeps such variables whole."
            return self.plan.whole(index, of_servers)

        places = zip(self.state_shapes, self.followed, *parts, strict=True)
        return [whole(*place) for place in places]

    def update(self, params: Any, state: Any, grads: Any) -> tuple[Any, Any]:
        """Returns parameters and state after an update without exchange."""
        return updated(self.transformation, grads, params, state)

    def exchanging_update(
        self, params: Any, state: Any, grads: Any, totals: Sequence[Any]
    ) -> tuple[Any, Any, list[Any]]:
        """Returns parameters and state after an update, and this server's own values of the points.

        `totals` are those of all servers, or None: values of larger depth are then not right yet.
        """
        interpreter = Interpreter(exchanges=True, totals=totals)
        (params, state), _ = self.interpreted(interpreter, params, state, grads)
        return params, state, interpreter.partials

    def interpreted(
        self, interpreter: Interpreter, params: Any, state: Any, grads: Any
    ) -> tuple[tuple[Any, Any], list[Kind]]:
        """Returns parameters and state after an update, and the kinds of their arrays."""
        program, results = jax.make_jaxpr(self.update, return_shape=True)(params, state, grads)
        operands = jax.tree.leaves((params, state, grads))
        arrays, kinds = interpreter.run(program, operands, self._kinds(params, state))
        return jax.tree.unflatten(jax.tree.structure(results), arrays), kinds

    def _kinds(self, params: Any, state: Any) -> list[Kind]:
        shapes = [leaf.shape for leaf in jax.tree.leaves(params)]

        def kind(leaf: Any, index: int | None) -> Kind:
            if index is None:
                return SAME if leaf.shape == () else whole_of()
            return rows_of(index) if leaf.shape == shapes[index] else whole_of(index)

        variables = [rows_of(index) for index in range(len(shapes))]
        leaves = zip(jax.tree.leaves(state), self.followed, strict=True)
        return [*variables, *(kind(*leaf) for leaf in leaves), *variables]


def serve_optimizer(
    transformation: optax.GradientTransformation, params: Any, plan: ShardPlan, *, name: str
) -> ServedOptimizer:
    """Returns a transformation for the servers of a plan, or a ValueError why it cannot be."""
    params = descriptions(params)
    state = jax.tree.leaves(jax.eval_shape(transformation.init, params))
    shapes = tuple(leaf.shape for leaf in state)
    followed = _followed(transformation, params)
    served = ServedOptimizer(transformation, plan, params, followed, shapes)
    if any(map(_jax.is_key, state)):
        raise ValueError(
            f"The optimizer {name} keeps a typed random key in its state, which cannot be sent. "
            "Use an optimizer without random numbers."
        )
    if plan.num_servers == 1:
        return served
    try:
        _, alone = _analysed(served, exchanges=False)
        if alone is None:
            return served
        points, problem = _analysed(served, exchanges=True)
    except Exception as error:
        raise ValueError(
            _refusal(name, f"it cannot be traced on a part of them ({error})")
        ) from error
    if problem is not None or len(points) > 1:
        raise ValueError(_refusal(name, problem or alone))
    return replace(served, points=points.pop())


def _analysed(
    served: ServedOptimizer, *, exchanges: bool
) -> tuple[set[tuple[Point, ...]], str | None]:
    """Returns the points of all servers, and why their updates would differ from those of one."""
    points: set[tuple[Point, ...]] = set()
    problems = []

    def run(interpreter: Interpreter, *arguments: Any) -> Any:
        results, kinds = served.interpreted(interpreter, *arguments)
        problems.extend(_problem(served, kind) for kind in kinds)
        return results

    for server in range(served.plan.num_servers):
        interpreter, params = Interpreter(exchanges), served.params_on(server)
        state = jax.eval_shape(served.transformation.init, params)
        jax.eval_shape(partial(run, interpreter), params, state, params)
        points.add(tuple(interpreter.points))
    return points, next(filter(None, problems), None)


def _problem(served: ServedOptimizer, kind: Kind) -> str | None:
    """Returns why a result of such a kind would differ from that of one server, or None."""
    if kind.name != "whole":
        return None
    if len(kind.variables) > 1:
        return f"it mixes values of several variables ({kind.because})"
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(served.params)]
    for index in kind.variables:
        if index < 0 or served.plan.is_divided(index):
            what = paths[index] if index >= 0 else "all variables"
            return f"it needs the whole of {what} at once ({kind.because})"
    return None


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


def _refusal(name: str, problem: str | None) -> str:
    return (
        f"The optimizer {name} cannot run on several servers: {problem}. Use num_servers=1, no "
        "partitioner (variables are then whole on a server), or another optimizer. Elementwise "
        "transformations, norms and sums over variables work on any number of servers."
    )


def to_wire(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns arrays that are sent without a copy: bfloat16 as its bits."""
    return [x.view(np.uint16) if x.dtype == ml_dtypes.bfloat16 else x for x in arrays]


def from_wire(arrays: Sequence[np.ndarray], dtypes: Sequence[np.dtype]) -> list[np.ndarray]:
    """Returns arrays of given dtypes from what `to_wire` made of them, rounded or not."""
    return [
        (x.view(ml_dtypes.bfloat16).astype(dtype) if x.dtype == np.uint16 != dtype else x)
        for x, dtype in zip(arrays, dtypes, strict=True)
    ]


Arrays = list[np.ndarray]


class WrongVersion(Exception):
    """A server was asked to change a version that it does not have."""


class Push(NamedTuple):
    """Message of a worker to one server about its rows, for a batch or a share of one."""

    grads: Arrays
    model_state: Arrays
    pulled_state: Arrays
    share: float


class Snapshot(NamedTuple):
    """Everything a server holds after so many updates; None for optimizer state to make anew."""

    version: int
    arrays: Arrays
    opt_state: Sequence[np.ndarray | None]


@dataclass(frozen=True)
class Layout:
    """Structures and dtypes of the variables of a model, for all its servers and workers."""

    optimizer: ServedOptimizer
    params: Any
    model_state: Any
    dtypes: tuple[np.dtype, ...]

    @property
    def num_params(self) -> int:
        """Number of arrays of parameters, which come before those of model state."""
        return self.params.num_leaves

    def variables(self, pulled: Sequence[Arrays]) -> tuple[Any, Any]:
        """Returns parameters and model state from what each server sends of them."""
        plan = self.optimizer.plan
        parts = [
            from_wire(arrays, [self.dtypes[index] for index in plan.held(server)])
            for server, arrays in enumerate(pulled)
        ]
        arrays, first = plan.unpacked(parts), self.num_params
        return self.params.unflatten(arrays[:first]), self.model_state.unflatten(arrays[first:])


class Server:
    """Holds some rows of the variables."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._version = 0

    def load(self, layout: Layout, snapshot: Snapshot) -> int:
        """Takes over variables and optimizer state; returns their version."""
        plan = layout.optimizer.plan
        held = plan.held(self._number)
        self._layout, self._version = layout, snapshot.version
        self._held_params = [index for index in held if index < layout.num_params]
        self._dtypes = [layout.dtypes[index] for index in self._held_params]
        num_held = len(self._held_params)
        given = from_wire(snapshot.arrays, [layout.dtypes[index] for index in held])
        self._model_state = [np.array(x) for x in given[num_held:]]
        self._params = self._tree(given[:num_held])
        fresh = layout.optimizer.transformation.init(self._params)
        leaves, structure = jax.tree.flatten(fresh)
        self._opt_state = structure.unflatten(
            leaf if part is None else jnp.asarray(part)
            for leaf, part in zip(leaves, snapshot.opt_state, strict=True)
        )
        self._update = jax.jit(layout.optimizer.update)
        self._exchanging = jax.jit(layout.optimizer.exchanging_update)
        return self._version

    def version(self, catch_up: int | None = None) -> int:
        """Returns the number of updates so far, before it counts on from `catch_up`, if given."""
        version = self._version
        if catch_up is not None:
            self._version = catch_up
        return version

    def pull(self) -> Arrays:
        """Returns the rows of parameters and model state that are held."""
        leaves = jax.tree.leaves(self._params)
        params = [np.asarray(leaves[index]) for index in self._held_params]
        return to_wire([*params, *self._model_state])

    def partials(self, totals: Sequence[Any], *pushes: Push) -> list[np.ndarray]:
        """Returns this server's own values of the points, given the totals that are known."""
        grads = self._sum(pushes)
        run = self._exchanging(self._params, self._opt_state, grads, list(totals))
        return [np.asarray(x) for x in run[2]]

    def update(
        self, version: int, totals: Sequence[Any] | None, is_latest: bool, *pushes: Push
    ) -> int:
        """Applies the shares of a batch to a version, made with it or older; returns the next."""
        if version != self._version:
            raise WrongVersion(
                f"Server {self._number} is at version {self._version}, but was asked to change "
                f"version {version}."
            )
        arguments = (self._params, self._opt_state, self._sum(pushes))
        if totals is None:
            self._params, self._opt_state = self._update(*arguments)
        else:
            self._params, self._opt_state, _ = self._exchanging(*arguments, list(totals))
        for index, current in enumerate(self._model_state):
            after = _combined(index, pushes)
            if not is_latest and np.issubdtype(current.dtype, np.number):
                # The change that a pass on older model state made.
                after = current + (after - pushes[0].pulled_state[index])
            self._model_state[index] = after
        self._version += 1
        return self._version

    def snapshot(self) -> Snapshot:
        """Returns everything that the server holds."""
        opt_state = [np.array(x) for x in jax.tree.leaves(self._opt_state)]
        return Snapshot(self._version, self.pull(), opt_state)

    def _sum(self, pushes: Sequence[Push]) -> Any:
        shares = [from_wire(push.grads, self._dtypes) for push in pushes]
        total: list[Any] = [sum(each[1:], start=each[0]) for each in zip(*shares, strict=True)]
        return self._tree(total)

    def _tree(self, held: Sequence[np.ndarray]) -> Any:
        """Returns the whole tree of parameters, where those that are not held have no rows."""
        plan = self._layout.optimizer.plan
        given = dict(zip(self._held_params, held, strict=True))
        return self._layout.params.unflatten(
            jnp.asarray(given[index])
            if index in given
            else jnp.zeros(plan.shape_on(self._number, index), self._layout.dtypes[index])
            for index in range(self._layout.num_params)
        )


def _combined(index: int, pushes: Sequence[Push]) -> np.ndarray:
    """Returns an array of model state after a batch: the mean over its rows."""
    arrays = [push.model_state[index] for push in pushes]
    if all(np.array_equal(array, arrays[0]) for array in arrays[1:]):
        return np.array(arrays[0])
    if not np.issubdtype(arrays[0].dtype, np.floating):
        raise TypeError(
            f"An array of the model state ({arrays[0].dtype}) differs between the shares of a "
            "batch and cannot be averaged. Only floating state may depend on the rows."
        )
    weighted = [array * np.float32(push.share) for array, push in zip(arrays, pushes, strict=True)]
    return sum(weighted[1:], start=weighted[0]).astype(arrays[0].dtype)


def make_totals(
    optimizer: ServedOptimizer, ask: Callable[[list[Any]], list[list[np.ndarray]]]
) -> list[Any] | None:
    """Returns what the servers exchange in an update, by `ask` for own values; None for nothing."""
    if not optimizer.points:
        return None
    combine = {"sum": np.sum, "max": np.max, "min": np.min}
    totals: list[Any] = [None] * len(optimizer.points)
    for depth in range(1, optimizer.num_rounds + 1):
        answers = zip(*ask(totals), strict=True)
        for index, (point, values) in enumerate(zip(optimizer.points, answers, strict=True)):
            if point.depth == depth:
                totals[index] = combine[point.operation](values, axis=0)
    return totals
