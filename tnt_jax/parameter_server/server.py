"""What one server does: holds its rows of the variables, and applies gradients to them.

It runs in a Ray actor, but knows nothing of Ray. Calls of one coordinator run in their order, which
is the order of the versions on every server.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax.parameter_server.compression import from_wire, to_wire
from tnt_jax.parameter_server.served_optimizer import ServedOptimizer

Arrays = list[np.ndarray]


class WrongVersion(Exception):
    """A server was asked to change a version that it does not have."""


class Push(NamedTuple):
    """What a worker sends to one server for a batch, or for its share of one.

    Attributes:
        grads: Gradients of the rows that the server holds, as sent (`to_wire`).
        model_state: Model state after the pass, of the arrays that the server holds.
        pulled_state: The same before the pass.
        share: Part of the batch's rows, from 0 to 1.
    """

    grads: Arrays
    model_state: Arrays
    pulled_state: Arrays
    share: float


class Snapshot(NamedTuple):
    """Everything that a server holds.

    Attributes:
        version: Number of updates so far.
        arrays: Its rows of parameters and model state.
        opt_state: All arrays of its part of the optimizer's state; None for those to make anew.
    """

    version: int
    arrays: Arrays
    opt_state: Sequence[np.ndarray | None]


@dataclass(frozen=True)
class Layout:
    """What all servers and workers of a model know.

    Attributes:
        optimizer: The transformation and its plan.
        params: Structure of the parameters.
        model_state: Structure of the model state.
        dtypes: Dtypes of the arrays of both.
    """

    optimizer: ServedOptimizer
    params: Any
    model_state: Any
    dtypes: tuple[np.dtype, ...]

    @property
    def num_params(self) -> int:
        """Number of arrays of parameters, which come before those of model state."""
        return self.params.num_leaves


class Server:
    """Holds some rows of the variables.

    Args:
        number: Number of the server, from 0 on.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._version = 0

    def load(self, layout: Layout, snapshot: Snapshot) -> int:
        """Takes over variables and optimizer state; returns their version.

        Arrays of the optimizer's state that are None are made anew.
        """
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
            [
                leaf if part is None else jnp.asarray(part)
                for leaf, part in zip(leaves, snapshot.opt_state, strict=True)
            ]
        )
        self._update = jax.jit(layout.optimizer.update())
        self._exchanging = jax.jit(layout.optimizer.exchanging_update())
        return self._version

    def version(self, catch_up: int | None = None) -> int:
        """Returns the number of updates so far, before it counts on from `catch_up`, if given."""
        version = self._version
        if catch_up is not None:
            self._version = catch_up
        return version

    def pull(self) -> tuple[int, Arrays]:
        """Returns the version, and the rows of parameters and model state that are held."""
        leaves = jax.tree.leaves(self._params)
        params = [np.asarray(leaves[index]) for index in self._held_params]
        return self._version, to_wire([*params, *self._model_state])

    def partials(self, totals: Sequence[Any], *pushes: Push) -> list[np.ndarray]:
        """Returns this server's own values of what the servers exchange in an update.

        Args:
            totals: Values over all servers that are known already.
            *pushes: Gradients of the shares of a batch, in their order.
        """
        grads = self._sum(pushes)
        run = self._exchanging(self._params, self._opt_state, grads, list(totals))
        return [np.asarray(x) for x in run[2]]

    def update(
        self, version: int, totals: Sequence[Any] | None, is_latest: bool, *pushes: Push
    ) -> int:
        """Applies the sum of gradients, and what a batch makes of model state.

        Returns the new version.

        Args:
            version: The version that is changed.
            totals: What the servers exchanged, or None.
            is_latest: Whether the gradients were computed with the variables of this version.
            *pushes: Gradients of the shares of a batch, in their order.

        Raises:
            WrongVersion: If the server is at another version, because an update was lost.
        """
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
        for index in range(len(self._model_state)):
            after = _combined(index, pushes)
            if not is_latest:
                after = _added(self._model_state[index], pushes[0].pulled_state[index], after)
            self._model_state[index] = after
        self._version += 1
        return self._version

    def snapshot(self) -> Snapshot:
        """Returns everything that the server holds."""
        version, arrays = self.pull()
        return Snapshot(version, arrays, [np.array(x) for x in jax.tree.leaves(self._opt_state)])

    def _sum(self, pushes: Sequence[Push]) -> Any:
        """Returns the tree of gradients: the sum of those of the shares, in their order."""
        shares = [from_wire(push.grads, self._dtypes) for push in pushes]
        total = shares[0]
        for share in shares[1:]:
            total = [left + right for left, right in zip(total, share, strict=True)]
        return self._tree(total)

    def _tree(self, held: Sequence[np.ndarray]) -> Any:
        """Returns the whole tree of parameters, where those that are not held have no rows."""
        plan = self._layout.optimizer.plan
        leaves: list[Any] = [
            jnp.zeros(plan.shape_on(self._number, index), self._layout.dtypes[index])
            for index in range(self._layout.num_params)
        ]
        for index, array in zip(self._held_params, held, strict=True):
            leaves[index] = jnp.asarray(array)
        return self._layout.params.unflatten(leaves)


def _combined(index: int, pushes: Sequence[Push]) -> np.ndarray:
    """Returns an array of model state after a batch: the mean over its rows.

    Raises:
        TypeError: If it differs between shares and is not floating.
    """
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


def _added(current: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Returns model state with the change that a pass on older model state made."""
    if not np.issubdtype(current.dtype, np.number):
        return after
    return current + (after - before)


def make_totals(
    optimizer: ServedOptimizer, ask: Callable[[list[Any]], list[list[np.ndarray]]]
) -> list[Any] | None:
    """Returns what the servers exchange in an update, or None if that is nothing.

    Args:
        optimizer: The transformation on the servers.
        ask: Returns for each server its own values of the points, given the totals so far.
    """
    if not optimizer.points:
        return None
    combine = {"sum": np.sum, "max": np.max, "min": np.min}
    totals: list[Any] = [None] * len(optimizer.points)
    for depth in range(1, optimizer.num_rounds + 1):
        answers = ask(totals)
        for index, point in enumerate(optimizer.points):
            if point.depth == depth:
                values = [answer[index] for answer in answers]
                totals[index] = combine[point.operation](values, axis=0)
    return totals
