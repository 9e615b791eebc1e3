"""Compares the number of inputs of a module with that of the data, before tracing."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tnt_jax.adapters.base import CallStyle
from tnt_jax.keras_compat.keras_files import is_keras


def input_problem(module: Any, inputs: Any) -> str | None:
    """Returns what is wrong with the number of inputs, or None if the signature does not tell.

    The text has both numbers.

    Args:
        module: A Flax or Keras model.
        inputs: Inputs of a batch: one array, or a tuple, list or dict of them.
    """
    if isinstance(inputs, Mapping):
        return None
    if is_keras(module):
        names = _keras_inputs(module)
        num_given = len(jax.tree.leaves(inputs))
    else:
        num_given = len(inputs) if isinstance(inputs, (tuple, list)) else 1
        names = _flax_inputs(module, num_given)
    if names is None or num_given == len(names):
        return None
    example = f"(({', '.join(names)}), targets)" if len(names) > 1 else "(inputs, targets)"
    return (
        f"{type(module).__name__} takes {len(names)} input(s) ({', '.join(names)}), but the data "
        f"gives {num_given}: {describe(inputs)}. Let each element be {example}; with arrays, pass "
        "the targets as y."
    )


def signature_tells(module: Any, inputs: Any) -> bool:
    """Returns whether the signature says that the module takes inputs of this structure.

    A tuple, for instance, may be a single argument.
    """
    if not isinstance(inputs, (tuple, list, Mapping)) or is_keras(module):
        return True
    style = CallStyle.of(module.__call__)
    if isinstance(inputs, Mapping):
        return bool(inputs) and set(style.positional[: style.num_required]) <= set(inputs) <= set(
            style.names
        )
    return style.unpack and len(inputs) == style.num_required


def describe(inputs: Any) -> str:
    """Describes the shapes of a batch's inputs; only the first few if there are many."""
    leaves = jax.tree_util.tree_leaves_with_path(inputs)
    shown = [
        f"{jax.tree_util.keystr(path)} {x.dtype}{list(np.shape(x))}".strip()
        for path, x in leaves[:6]
    ]
    return ", ".join([*shown, "..."] if len(leaves) > len(shown) else shown)


def unusable_inputs(module: Any, inputs: Any, error: Exception) -> str:
    """Returns the error text for a Flax module that fails on a tuple, list or dict of inputs."""
    names = ", ".join(CallStyle.of(module.__call__).positional) or "*args"
    reason = next(iter(str(error).strip().splitlines()), "")
    return (
        f"{type(module).__name__} takes ({names}) and cannot use the {type(inputs).__name__} of "
        f"{len(inputs)} that the data gives as inputs: {describe(inputs)}. It ends in "
        f"{type(error).__name__}: {reason}\n"
        "Let each element be (inputs, targets), with the inputs as the module takes them; a "
        "dataset of dicts needs a map such as lambda element: (element['image'], element['label'])."
    )


def _flax_inputs(module: Any, num_given: int) -> tuple[str, ...] | None:
    """Returns the names of the expected arguments; None if the number fits or is not fixed."""
    style = CallStyle.of(module.__call__)
    if not style.unpack or style.num_required <= num_given <= (
        num_given if style.is_variadic else len(style.positional)
    ):
        return None
    return (
        style.positional[: style.num_required]
        if num_given < style.num_required
        else style.positional
    )


def _keras_inputs(module: Any) -> tuple[str, ...] | None:
    """Returns the names of the inputs of a functional or Sequential model, otherwise None.

    The call of other models accepts any number.
    """
    inputs = getattr(module, "inputs", None) if module.built else None
    return tuple(x.name for x in inputs) if inputs else None
