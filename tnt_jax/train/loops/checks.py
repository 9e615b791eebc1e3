"""What a user's step returns, checked while it is traced."""

from typing import Any

import jax
import jax.numpy as jnp

from tnt_jax import _jax


def unpacked(name: str, result: Any) -> tuple[Any, Any]:
    """Returns state and metrics of a step's result.

    Raises:
        TypeError: If it is no pair.
    """
    if isinstance(result, tuple) and len(result) == 2:
        return result
    found = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
    raise TypeError(
        f"{name} must return a pair (state, metrics), but returned {found}. Return {{}} for no "
        f"metrics."
    )


def check_state(name: str, before: Any, after: Any) -> Any:
    """Returns the state that a step returned, as arrays.

    Args:
        name: Name of the step.
        before: State that it was given.
        after: State that it returned.

    Raises:
        TypeError: If it has another structure, other shapes or dtypes than before, or differs
            between ranks.
    """
    if jax.tree.structure(before) != jax.tree.structure(after):
        raise TypeError(
            f"{name} must return a state of the structure that it was given, "
            f"{jax.tree.structure(before)}, but returned {jax.tree.structure(after)}."
        )
    old = jax.tree.leaves(before)
    paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(after)
    leaves = []
    for (path, leaf), given in zip(paths_and_leaves, old, strict=True):
        where = f"The state{jax.tree_util.keystr(path)} that {name} returned"
        leaf = jnp.asarray(leaf)
        if _jax.is_varying(leaf):
            raise TypeError(
                f"{where} differs between ranks: it follows from each rank's own rows. Take "
                f"gradients by tnt_jax.value_and_grad, give BatchNorm axis_name='data', and "
                f"average statistics of a rank's own rows by jax.lax.pmean(x, 'data'). See "
                "docs/faq.md#a-step-or-a-result-differs-between-ranks."
            )
        if (leaf.shape, leaf.dtype) != (given.shape, given.dtype):
            raise TypeError(
                f"{where} is {leaf.dtype}{list(leaf.shape)}, but was {given.dtype}"
                f"{list(given.shape)} before. A step must leave shapes and dtypes as they are."
            )
        leaves.append(leaf)
    return structure.unflatten(leaves)


def check_metrics(name: str, metrics: Any) -> Any:
    """Returns the metrics of a step as arrays.

    Raises:
        TypeError: If one differs between ranks.
    """
    paths_and_leaves, structure = jax.tree_util.tree_flatten_with_path(metrics)
    for path, leaf in paths_and_leaves:
        if hasattr(leaf, "aval") and _jax.is_varying(leaf):
            raise TypeError(
                f"The result{jax.tree_util.keystr(path)} of {name} differs between ranks, each of "
                f"which has seen its own rows. Say what it is for the global batch: "
                f"tnt_jax.reduce(x, 'mean'), 'sum', 'max', 'min' or 'concat' of values for each "
                f"row; a loss is made by tnt_jax.compute_average_loss. See "
                "docs/faq.md#a-step-or-a-result-differs-between-ranks."
            )
    return structure.unflatten([jnp.asarray(leaf) for _, leaf in paths_and_leaves])
