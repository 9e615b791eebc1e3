"""What batches show at first sight that no step could work with: text, inputs of another shape."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax.adapters.base import CallError
from tnt_jax.data.argument_checks import check_numbers
from tnt_jax.train.contracts import Batch

# The number of characters that an error quotes of another.
_QUOTED = 400


def check_batch(batch: Batch) -> None:
    """Checks that the arrays of a batch hold numbers; see `check_arguments`."""
    # Named as arguments, though they may come from a dataset.
    for name, value in (("x", batch.inputs), ("y", batch.targets), ("sample_weight", batch.weight)):
        for leaf in jax.tree.leaves(value):
            check_numbers(name, leaf)


def kinds(tree: Any) -> Any:
    """Returns what a step is traced for: the structure of a batch, row shapes and dtypes."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((np.shape(leaf)[1:], str(jnp.result_type(leaf))) for leaf in leaves)


def shapes(tree: Any) -> str:
    """Describes the shapes of a batch; the number of rows is written as "rows"."""
    texts = [
        f"[{', '.join(['rows', *map(str, np.shape(leaf)[1:])])}]" for leaf in jax.tree.leaves(tree)
    ]
    return (
        str(jax.tree.unflatten(jax.tree.structure(tree), texts))
        .replace("'[", "[")
        .replace("]'", "]")
    )


@contextmanager
def refusing_inputs(name: str, inputs: Any, known: Sequence[str]) -> Iterator[None]:
    """Turns errors of a model's forward pass into a `ValueError` about inputs of other shapes.

    Args:
        name: Name of the model.
        inputs: Its inputs.
        known: A description of the shapes that it was called with before.
    """
    try:
        yield
    except CallError:
        raise
    except Exception as error:  # Any error of a module; the message quotes it.
        reason = f"{type(error).__name__}: {error}".split(" (https://")[0][:_QUOTED]
        raise ValueError(
            f"The model {name!r} cannot be called with inputs {shapes(inputs)}; before, they were "
            f"{known[0]}. Pass inputs of the shape for which its variables were created. It says: "
            f"{reason}"
        ) from None
