"""Creates a model's variables for its inputs, and checks that it can be called with them."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax.adapters.base import CallError, CallStyle
from tnt_jax.data.arguments import check_numbers
from tnt_jax.keras_compat.keras_objects import is_keras
from tnt_jax.keras_compat.state.core import Core
from tnt_jax.train.contracts import Batch
from tnt_jax.train.trainer import trace_outputs

# The number of characters that an error quotes of another.
_QUOTED = 400


def kinds(tree: Any) -> Any:
    """Returns what a step is traced for: the structure of a batch, row shapes and dtypes."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((np.shape(leaf)[1:], str(jnp.result_type(leaf))) for leaf in leaves)


def shapes(tree: Any) -> str:
    """Describes the shapes of a batch; the number of rows is written as "rows"."""
    texts = [
        f"[{', '.join(['rows', *map(str, np.shape(leaf)[1:])])}]" for leaf in jax.tree.leaves(tree)
    ]
    text = str(jax.tree.unflatten(jax.tree.structure(tree), texts))
    return text.replace("'[", "[").replace("]'", "]")


def input_problem(module: Any, inputs: Any) -> str | None:
    """Returns what is wrong with the number of inputs, or None if the signature does not tell."""
    if isinstance(inputs, Mapping):
        return None
    if is_keras(module):
        # The call of models that are neither functional nor Sequential accepts any number.
        tensors = getattr(module, "inputs", None) if module.built else None
        names = tuple(x.name for x in tensors) if tensors else None
        num_given = len(jax.tree.leaves(inputs))
    else:
        num_given = len(inputs) if isinstance(inputs, (tuple, list)) else 1
        style = CallStyle.of(module.__call__)
        names = style.positional
        most = num_given if style.is_variadic else len(names)
        if not style.unpack or style.num_required <= num_given <= most:
            return None
        if num_given < style.num_required:
            names = names[: style.num_required]
    if names is None or num_given == len(names):
        return None
    example = f"(({', '.join(names)}), targets)" if len(names) > 1 else "(inputs, targets)"
    return (
        f"{type(module).__name__} takes {len(names)} input(s) ({', '.join(names)}), but the data "
        f"gives {num_given}: {describe(inputs)}. Let each element be {example}; with arrays, pass "
        "the targets as y."
    )


def signature_tells(module: Any, inputs: Any) -> bool:
    """Returns whether the signature takes such inputs; a tuple, say, may be one argument."""
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


class Builder:
    """Creates the variables of a model for its inputs, and explains invalid inputs."""

    def __init__(self, core: Core) -> None:
        self._core = core
        # Structures of inputs that the module has accepted, and shapes of inputs that the model was
        # called with, by their kind.
        self._known_structures: set[Any] = set()
        self._known_inputs: dict[Any, str] = {}

    def problem_of_inputs(self, inputs: Any) -> ValueError | None:
        """Returns what is wrong with inputs; if the signature does not tell, the model is built."""
        module = self._core.module
        structure = jax.tree.structure(inputs)
        if (problem := input_problem(module, inputs)) is not None:
            return ValueError(problem)
        if (
            structure in self._known_structures
            or not self._core.calls_model
            or signature_tells(module, inputs)
        ):
            return None
        try:
            self._core.trainer.build(inputs)
            trace_outputs(self._core.trainer, Batch(inputs))
        except Exception as error:
            unusable = ValueError(unusable_inputs(module, inputs, error))
            unusable.__cause__ = error
            return unusable
        self._known_structures.add(structure)
        return None

    def build_for(self, batch: Batch) -> None:
        """Creates missing variables, and applies changes that the user made to the object."""
        # Named as arguments, though they may come from a dataset.
        given = {"x": batch.inputs, "y": batch.targets, "sample_weight": batch.weight}
        for name, value in given.items():
            for leaf in jax.tree.leaves(value):
                check_numbers(name, leaf)
        trainer = self._core.trainer
        was_built = trainer.is_built
        if (problem := self.problem_of_inputs(batch.inputs)) is not None:
            raise problem
        trainer.build(batch.inputs)
        # While fit runs, only what callbacks assign is news in the wrapped object.
        if self._core.is_fitting:
            self._core.read_assigned()
        elif self._core.take_over_changes(batch.inputs) and self._core.compilation is not None:
            self._core.compilation.forget_data()
            self._core.forget_passes()
        self._check_shapes(batch, was_built=was_built)

    def _check_shapes(self, batch: Batch, *, was_built: bool) -> None:
        """Traces the model with inputs of new shapes, without computing anything."""
        kind, known = kinds(batch.inputs), self._known_inputs
        if was_built and self._core.calls_model and known and kind not in known:
            try:
                trace_outputs(self._core.trainer, batch)
            except CallError:
                raise
            except Exception as error:  # Any error of a module; the message quotes it.
                reason = f"{type(error).__name__}: {error}".split(" (https://")[0][:_QUOTED]
                raise ValueError(
                    f"The model {self._core.adapter.name!r} cannot be called with inputs "
                    f"{shapes(batch.inputs)}; before, they were {next(iter(known.values()))}. Pass "
                    "inputs of the shape for which its variables were created. It says: "
                    f"{reason}"
                ) from None
        known[kind] = shapes(batch.inputs)
