"""The training state of a `Model`: its variables, its optimizer, reading and replacing arrays."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from tnt_jax import _jax
from tnt_jax.adapters.base import Variables
from tnt_jax.distributed.host import collectives
from tnt_jax.keras_compat.callbacks.base import check_can_read, check_changes_model, current_scope
from tnt_jax.keras_compat.state.core import Core
from tnt_jax.keras_compat.state.optimizer_view import OptimizerView
from tnt_jax.log import logger
from tnt_jax.train.state import TrainState, check_match, for_ranks, state_arrays, with_arrays

OF_OPTIMIZER = ("opt_state", "step", "accumulated", "residual")
"""Parts of the training state that belong to the optimizer."""


class ModelState:
    """Reads and replaces the training state."""

    def __init__(self, core: Core) -> None:
        self._core = core
        # Arrays from a file, pending until the model has variables.
        self._waiting: Mapping[str, np.ndarray] | None = None

    @property
    def built(self) -> bool:
        """Whether the model has variables, or makes them as soon as they are asked for."""
        trainer = self._core.trainer
        return trainer.state is not None or trainer.adapter.sample_inputs() is not None

    @property
    def state(self) -> TrainState:
        """The whole training state, on the devices."""
        self.start_optimizer()
        return self.require_built()

    def require_built(self) -> TrainState:
        """Returns the current training state."""
        self._core.read_assigned()
        return self._core.trainer.require_state()

    def start_optimizer(self) -> None:
        """Ensures that the state belongs to the optimizer, and restores pending arrays."""
        self._core.use_optimizer()
        if self._waiting is not None and self.built:
            arrays, self._waiting = self._waiting, None
            self.restore(arrays)

    @property
    def optimizer(self) -> OptimizerView | None:
        """The optimizer, or None before `compile`."""
        compilation = self._core.compilation
        if compilation is None:
            return None
        return OptimizerView(compilation.optimizer, self._core.trainer, self.start_optimizer)

    def get_weights(self) -> list[np.ndarray]:
        """See `Model.get_weights`."""
        state = self.require_built()
        leaves = jax.tree.leaves((state.params, state.model_state))
        for leaf in leaves:
            check_can_read(leaf)
        gather = self._core.trainer.gather
        return [np.array(gather(leaves[index])) for index in self.order_of_weights(state)]

    def set_weights(self, weights: list[np.ndarray]) -> None:
        """See `Model.set_weights`."""
        check_changes_model("Setting weights")
        state = self.require_built()
        leaves, structure = jax.tree.flatten((state.params, state.model_state))
        order = self.order_of_weights(state)
        current = [leaves[index] for index in order]
        shapes, given = [x.shape for x in current], [np.shape(x) for x in weights]
        if given != shapes:
            raise ValueError(
                f"set_weights needs {len(shapes)} arrays of the shapes {shapes}, but got "
                f"{len(given)}: {given}."
            )
        hosts = [np.asarray(x, old.dtype) for x, old in zip(weights, current, strict=True)]
        if current_scope() == "all_processes":
            hosts = collectives.broadcast(hosts)
        for index, host in zip(order, hosts, strict=True):
            leaves[index] = host
        self._core.replace_variables(Variables(*structure.unflatten(leaves)))
        self._core.write_back_outside_fit()

    def order_of_weights(self, state: TrainState) -> list[int]:
        """Returns the leaf index, in parameters and model state, of each array of `get_weights`."""
        leaves, structure = jax.tree.flatten((state.params, state.model_state))
        numbers = structure.unflatten([np.int64(index) for index in range(len(leaves))])
        exported = self._core.adapter.export(Variables(*numbers))
        if isinstance(exported, list):
            return [int(number) for number in exported]
        return list(range(len(leaves)))

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replaces the parts of the state that `arrays` holds, as soon as the model is built."""
        if not self.built:
            self._waiting = arrays
            return
        self.start_optimizer()
        if weights := only(arrays, "params", "model_state"):
            self.replace_variables(weights)
        self.replace_optimizer_state(arrays)

    def replace_variables(
        self, arrays: Mapping[str, np.ndarray], *, skip_mismatch: bool = False
    ) -> None:
        """Replaces parameters and model state by host arrays."""
        self._replace(self._fitting(arrays) if skip_mismatch else arrays, "params", "model_state")
        self._core.write_back_outside_fit()

    def replace_optimizer_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replaces the optimizer state by that in `arrays`, if it is of the same kind."""
        saved = only(arrays, "opt_state", "step")
        if self._core.compilation is None or not saved:
            return
        # Whether gradients are accumulated may have changed.
        current = state_arrays(self.require_built())
        accumulated = only(arrays, "accumulated", "residual")
        saved |= {path: x for path, x in accumulated.items() if path in current}
        try:
            self._replace(saved, *OF_OPTIMIZER)
        except ValueError as error:
            logger.warning(
                "The optimizer keeps its state, because the saved state belongs to another one. %s",
                error,
            )

    def _fitting(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Returns the variables, with those in `arrays` where they fit; warns of the others."""
        current = only(state_arrays(self.require_built()), "params", "model_state")
        try:
            check_match(current, arrays)
        except ValueError as error:
            logger.warning("Leaves that do not fit keep their values. %s", error)
        fitting = {
            path: x
            for path, x in arrays.items()
            if path in current and _jax.kind_of(x) == _jax.kind_of(current[path])
        }
        return current | fitting

    def _replace(self, arrays: Mapping[str, np.ndarray], *parts: str) -> None:
        state = self.require_built()
        current = state_arrays(state)
        arrays = for_ranks(arrays, only(current, *parts))
        check_match(only(current, *parts), arrays)
        put = {path: _jax.put(leaf, current[path].sharding) for path, leaf in arrays.items()}
        self._core.trainer.state = with_arrays(state, {**current, **put})


def only(arrays: Mapping[str, Any], *parts: str) -> dict[str, Any]:
    """Returns the arrays of some parts of the training state, such as `"params"`, by path."""
    return {path: leaf for path, leaf in arrays.items() if path.split("/")[0] in parts}
