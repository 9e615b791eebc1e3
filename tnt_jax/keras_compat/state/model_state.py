"""The training state of a `Model`: its variables, its optimizer, reading and replacing arrays."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax import _jax
from tnt_jax.adapters.base import CallStyle, Variables
from tnt_jax.distributed.host import collectives
from tnt_jax.keras_compat.callbacks.base import check_can_read, check_changes_model, current_scope
from tnt_jax.keras_compat.keras_objects import is_keras
from tnt_jax.keras_compat.state.core import Core
from tnt_jax.keras_compat.state.optimizer_view import OptimizerView
from tnt_jax.log import logger
from tnt_jax.train.state import TrainState, check_match, state_arrays, with_arrays


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
        arrays = only(arrays, "opt_state", "step")
        if self._core.compilation is None or not arrays:
            return
        try:
            self._replace(arrays, "opt_state", "step")
        except ValueError as error:
            logger.warning(
                "The optimizer starts from a new state, because the saved state belongs to another "
                "one. %s",
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
        check_match(only(current, *parts), arrays)
        put = {path: _jax.put(leaf, current[path].sharding) for path, leaf in arrays.items()}
        self._core.trainer.state = with_arrays(state, {**current, **put})


def only(arrays: Mapping[str, Any], *parts: str) -> dict[str, Any]:
    """Returns the arrays of some parts of the training state, such as `"params"`, by path."""
    return {path: leaf for path, leaf in arrays.items() if path.split("/")[0] in parts}


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
