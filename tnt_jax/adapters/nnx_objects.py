"""NNX modules that a custom step differentiates, as functions of their parameters."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from tnt_jax.adapters.nnx import is_random, reseeded


def is_nnx_module(x: Any) -> bool:
    """Returns whether `x` is an NNX module."""
    return isinstance(x, nnx.Module)


def check_unshared(tree: Any) -> None:
    """Raises a TypeError if an NNX variable occurs twice in a tree.

    A pytree would separate the two.

    Args:
        tree: State of a loop.
    """
    seen: dict[int, Any] = {}
    variables = jax.tree_util.tree_leaves_with_path(
        tree, is_leaf=lambda x: isinstance(x, nnx.Variable)
    )
    for path, leaf in variables:
        if isinstance(leaf, nnx.Variable) and id(leaf) in seen:
            first, second = map(jax.tree_util.keystr, (seen[id(leaf)], path))
            raise TypeError(
                f"The state holds one variable twice, at {first} and {second}, and a step would "
                "treat them as two. Pass nnx.split's parts of an object with shared variables, and "
                "nnx.merge them inside the step."
            )
        seen[id(leaf)] = path


class OpenModule:
    """An NNX module inside a step as a function of its parameters.

    The parameters are the variables of type `nnx.Param`.

    Args:
        module: The module, whose other variables are updated by `close`.
        key: Key of the step, from which its random streams are seeded; None if there is none.

    Attributes:
        params: The parameters, an `nnx.State`.

    Raises:
        TypeError: If the module draws random numbers and there is no key.
    """

    def __init__(self, module: nnx.Module, key: jax.Array | None) -> None:
        self._module = module
        self._graph, self.params, random, self._rest = nnx.split(module, nnx.Param, is_random, ...)
        if jax.tree.leaves(random) and key is None:
            raise TypeError(
                f"{type(module).__name__} draws random numbers, for which a step needs a key: let "
                "it take one, step(state, batch, key)."
            )
        self._random = random if key is None else reseeded(random, key)

    def pure(self, loss_fn: Callable) -> Callable:
        """Returns a function of the parameters that calls `loss_fn` with a copy of the module.

        Its result is a pair: the result of `loss_fn`, and the other variables after the call.
        """

        def function(params: nnx.State, *args: Any, **kwargs: Any) -> tuple[Any, nnx.State]:
            module = nnx.merge(self._graph, params, self._random, self._rest, copy=True)
            result = loss_fn(module, *args, **kwargs)
            known = {path for path, _ in nnx.to_flat_state(self._rest)}
            after = nnx.to_flat_state(nnx.state(module))
            return result, nnx.from_flat_state([item for item in after if item[0] in known])

        return function

    def close(self, rest: nnx.State) -> None:
        """Stores the other variables, as the differentiated call left them, in the module."""
        nnx.update(self._module, rest)
