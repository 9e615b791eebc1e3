"""Creates a model's variables for its inputs, and checks that it can be called with them."""

from typing import Any

import jax
import numpy as np

from tnt_jax.keras_compat.core import Core
from tnt_jax.keras_compat.data_checks import check_batch, kinds, refusing_inputs, shapes
from tnt_jax.keras_compat.signature import input_problem, signature_tells, unusable_inputs
from tnt_jax.keras_compat.wrapped import take_over_changes
from tnt_jax.train.contracts import Batch
from tnt_jax.train.outputs import trace_outputs


class Builder:
    """Creates the variables of a model for its inputs, and explains invalid inputs.

    Args:
        core: The shared parts of the model.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        # Structures of inputs that the module has accepted, and shapes of inputs that the model was
        # called with, by their kind.
        self._known_structures: set[Any] = set()
        self._known_inputs: dict[Any, str] = {}

    def build(self, inputs: Any) -> None:
        """Creates missing variables for a shape or a pytree of samples; see `Model.build`."""
        is_shape = isinstance(inputs, (tuple, list)) and all(
            size is None or isinstance(size, int) for size in inputs
        )
        sample = jax.ShapeDtypeStruct((1, *inputs[1:]), np.float32) if is_shape else inputs
        self._core.trainer.build(sample)
        self._core.trainer.require_state()  # Errors of the program that makes variables come here.

    def problem_of_inputs(self, inputs: Any) -> ValueError | None:
        """Returns what is wrong with the structure of inputs, or None.

        If the signature does not tell, the model is built for the inputs as a test.
        """
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
        """Creates missing variables, and applies changes that the user made to the object.

        Raises:
            ValueError: If the data does not hold numbers, or if a built model cannot be called with
                such inputs.
        """
        check_batch(batch)
        trainer = self._core.trainer
        was_built = trainer.is_built
        if (problem := self.problem_of_inputs(batch.inputs)) is not None:
            raise problem
        trainer.build(batch.inputs)
        # While fit runs, only what callbacks assign is news in the wrapped object.
        if self._core.is_fitting:
            self._core.read_assigned()
        elif take_over_changes(trainer, batch.inputs) and self._core.compilation is not None:
            self._core.compilation.forget_data()
        self._check_shapes(batch, was_built=was_built)

    def _check_shapes(self, batch: Batch, *, was_built: bool) -> None:
        """Traces the model with inputs of new shapes, without computing anything."""
        kind = kinds(batch.inputs)
        known = self._known_inputs
        if was_built and self._core.calls_model and known and kind not in known:
            with refusing_inputs(self._core.adapter.name, batch.inputs, list(known.values())):
                trace_outputs(self._core.trainer, batch)
        known[kind] = shapes(batch.inputs)
