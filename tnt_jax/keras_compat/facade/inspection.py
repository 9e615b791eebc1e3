"""Inspection of a model: its arrays, layers, metrics and compiled program."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from tnt_jax.adapters.base import Variables
from tnt_jax.data.streams import EpochStream
from tnt_jax.distributed.host.collectives import Description, describe
from tnt_jax.distributed.joining import runtime
from tnt_jax.keras_compat.callbacks.recording import draw_curves
from tnt_jax.keras_compat.compiling.compiled import Compiled
from tnt_jax.keras_compat.configuration import plain
from tnt_jax.keras_compat.fit.data_intake import DataArguments, kinds, to_batch
from tnt_jax.keras_compat.fit.preparation import Shared
from tnt_jax.keras_compat.keras_objects import is_keras
from tnt_jax.keras_compat.state.core import Core
from tnt_jax.keras_compat.state.optimizer_view import StateVariable, state_variables
from tnt_jax.sharded.planning import StepMemory
from tnt_jax.train.contracts import Batch


def summary_table(name: str, params: Any, model_state: Any) -> str:
    """Returns a table with path, shape, dtype, count and bytes of every array, and the totals."""
    rows = [("Array", "Shape", "Type", "Count", "Bytes")]
    totals = []
    for title, tree in (("Trained", params), ("State", model_state)):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        for path, leaf in leaves:
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            kind = (str(leaf.shape), str(leaf.dtype))
            rows.append((where, *kind, f"{leaf.size:,}", f"{leaf.nbytes:,}"))
        count = sum(leaf.size for _, leaf in leaves)
        nbytes = sum(leaf.nbytes for _, leaf in leaves)
        totals.append(
            f"{title}: {count:,} values in {len(leaves)} arrays, {nbytes / 2**20:,.2f} MiB"
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    line = "-" * (sum(widths) + 2 * (len(widths) - 1))
    body = [
        "  ".join(
            text.ljust(width) if column < 3 else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([f"Model: {name}", line, body[0], line, *body[1:], line, *totals])


class NamedWeight(np.ndarray):
    """A weight with the attribute `path`, like Keras's variables; its `name` is the same."""

    path: str

    @property
    def name(self) -> str:
        """The path, by which callbacks of Keras 3.12 name weights."""
        return self.path


@dataclass(eq=False)
class Layer:
    """A layer of a model: the first part of the paths of its weights, and copies of these."""

    name: str
    weights: list[NamedWeight]

    def get_weights(self) -> list[np.ndarray]:
        """Returns copies of its weights as plain arrays."""
        return [np.array(weight) for weight in self.weights]


class Inspection:
    """Summaries, names and plans of a `Model`."""

    _core: Core
    _shared: Shared

    def summary(self, x: Any = None, y: Any = None, batch_size: int | None = None) -> None:
        """Prints a table of all arrays with shapes, counts and bytes, on the master.

        With data or a batch size, also the memory of a training step on each device, which is
        compiled for it: parameters, optimizer state, activations, and the arrays that take most.

        Args:
            x: Data as for `fit`, of which only the shapes of rows count; by default that of the
                last `fit`.
            y: Targets, with arrays only.
            batch_size: Rows of the global batch, whatever the data has; 32 by default.

        Raises:
            RuntimeError: With a batch size, of a model that is not compiled.
            ValueError: If the batch size is below 1, or no data is known.
        """
        step = None
        if x is not None or batch_size is not None:
            step = self._memory_of_step(x, y, 32 if batch_size is None else batch_size)
        variables = self._built_variables()
        if runtime.is_master_rank() or runtime.init().settings.output_on_all_devices:
            table = summary_table(self._core.adapter.name, *variables)
            print(table if step is None else f"{table}\n{step}", flush=True)

    def _memory_of_step(self, x: Any, y: Any, batch_size: int) -> StepMemory:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, but is {batch_size}.")
        compilation, trainer = self._core.require_compiled(), self._core.trainer
        known = compilation.known_kinds
        if x is not None:
            batch = self._first_batch(x, y, None)
            known = {kinds((batch.inputs, batch.targets))}
        if len(known) != 1:
            raise ValueError(
                "The memory of a step depends on the shapes of the data, of which the model has "
                f"seen {len(known)} kinds: pass x and y."
            )
        [(structure, leaves)] = known
        inputs, targets = structure.unflatten(
            [np.broadcast_to(np.zeros((), dtype), (batch_size, *shape)) for shape, dtype in leaves]
        )
        group = trainer.described_batch(Batch(inputs, targets), batch_size)
        return StepMemory.of(trainer.memory_of(group), trainer.require_state())

    @property
    def variables(self) -> Any:
        """Copies of the variables in the form of the model's library.

        Linen's is a dict for `module.apply`, NNX's a state for `nnx.update`, Keras's a list.
        """
        return self._core.adapter.export(self._built_variables())

    @property
    def name(self) -> str:
        """Name of the wrapped module."""
        return self._core.adapter.name

    @property
    def layers(self) -> list[Any]:
        """The layers of a Keras model itself; of a Flax module, copies of their weights.

        A layer of a Flax module is the first part of its weights' paths; there is none before it is
        built. A callback gets the layers of a Keras model with the weights of the last step.
        """
        if is_keras(self._core.module):
            return self._core.current_module.layers
        if not self._shared.state.built:
            return []
        weights: dict[str, list[NamedWeight]] = {}
        for path, leaf in self.weights_by_path().items():
            weight = leaf.view(NamedWeight)
            weight.path = path
            weights.setdefault(path.split("/")[0], []).append(weight)
        return [Layer(name, listed) for name, listed in weights.items()]

    @property
    def weights(self) -> list[StateVariable]:
        """All current arrays in the order of `get_weights`, as variables that can be assigned."""
        state = self._shared.state.require_built()
        core = self._core
        part = partial(state_variables, core.trainer, after=core.write_back_outside_fit)
        params = part(lambda s: s.params, lambda s, new: replace(s, params=new), trainable=True)
        others = part(lambda s: s.model_state, lambda s, new: replace(s, model_state=new))
        order = self._shared.state.order_of_weights(state)
        variables = [(params + others)[index] for index in order]
        if held := self._core.adapter.held_variables():
            # Layers may have been frozen since the state was made.
            trained = {id(variable) for variable in self._core.module.trainable_variables}
            for variable in variables:
                variable.trainable = id(held.get(variable.path)) in trained
        return variables

    @property
    def trainable_weights(self) -> list[StateVariable]:
        """The arrays among `weights` that gradients train, without the frozen ones."""
        return [variable for variable in self.weights if variable.trainable]

    @property
    def non_trainable_weights(self) -> list[StateVariable]:
        """The arrays among `weights` that gradients do not train."""
        return [variable for variable in self.weights if not variable.trainable]

    trainable_variables = trainable_weights
    non_trainable_variables = non_trainable_weights

    @property
    def trainable(self) -> bool:
        """Whether a Keras model is trained; setting it freezes or unfreezes all of its layers.

        As in Keras, the layers of `layers` can be frozen one by one. It takes effect in the next
        call: the optimizer then starts afresh. The parameters of a Flax module are chosen by
        `Model(trainable=..., frozen=...)`.
        """
        return getattr(self._core.module, "trainable", True)

    @trainable.setter
    def trainable(self, value: bool) -> None:
        if not is_keras(self._core.module):
            raise ValueError(
                "model.trainable is for Keras models. Pass tnt_jax.Model(module, frozen=[...]) or "
                "trainable=[...], with the paths of parameters."
            )
        self._core.module.trainable = value

    @property
    def compiled(self) -> bool:
        """Whether `compile` was called."""
        return self._core.compilation is not None

    def get_compile_config(self) -> dict[str, Any]:
        """Returns the arguments of `compile` as plain values; empty before `compile`.

        Raises:
            TypeError: If one of them has no plain form, such as an Optax transformation.
        """
        if (compilation := self._core.compilation) is None:
            return {}
        given = dict(compilation.given)
        if compilation.optimizer.name == "optax":
            # Its error is clear, whereas the bare transformation is a tuple of functions.
            given["optimizer"] = compilation.optimizer
        return {name: plain(value) for name, value in given.items()}

    def count_params(self) -> int:
        """Returns the number of values in all arrays."""
        return sum(math.prod(variable.shape) for variable in self.weights)

    def get_layer(self, name: str | None = None, index: int | None = None) -> Any:
        """Returns the layer of a name or an index; a ValueError names those there are."""
        if (name is None) == (index is None):
            raise ValueError(
                f"get_layer takes a name or an index, but got name={name!r} and index={index!r}."
            )
        layers = self.layers
        known = {layer.name: layer for layer in layers}
        if name is not None and name in known:
            return known[name]
        if index is not None and -len(known) <= index < len(known):
            return layers[index]
        wanted = f"number {index}" if name is None else repr(name)
        raise ValueError(
            f"There is no layer {wanted}: the layers with weights are "
            f"{', '.join(known) or 'none (build the model)'}."
        )

    def weights_by_path(self) -> dict[str, np.ndarray]:
        """Returns copies of the trained arrays by path, such as `Dense_0/kernel`."""
        leaves = jax.tree_util.tree_leaves_with_path(self._built_variables().params)
        return {
            jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves
        }

    @property
    def metrics_names(self) -> list[str]:
        """Names of the logs in the order of `evaluate`; empty before data is known."""
        functions = self._core.functions
        if functions is None:
            return []
        return functions.metrics_names() + list(self._held_metrics())

    @property
    def metrics_by_log(self) -> dict[str, Any]:
        """The metrics by log, also of Keras layers; empty before data is known.

        Their results are those of the last epoch or call.
        """
        functions = self._core.functions
        if functions is None:
            return {}
        sums = self._shared.progress.epoch_sums
        found = functions.metrics_by_log(sums) if isinstance(functions, Compiled) else {}
        return found | self._held_metrics()

    def _held_metrics(self) -> dict[str, Any]:
        return self._core.by_log_name(self._core.adapter.held_metrics())

    @property
    def metrics(self) -> list[Any]:
        """The metrics in the order of their logs; empty before data is known."""
        return list(self.metrics_by_log.values())

    def plot_history(
        self, path: str | os.PathLike[str], history: Mapping[str, list[float]] | None = None
    ) -> None:
        """Draws the curves of logs, by default of the last `fit`, to a file, on the master.

        The file extension, for instance `.png`, determines the format. Needs matplotlib.
        """
        values = history
        epochs = None
        if values is None:
            if (last := self._shared.progress.history) is None:
                raise RuntimeError("There is no history to draw yet: call fit first.")
            values, epochs = last.history, last.epoch
        if runtime.is_master_rank():
            draw_curves(path, values, epochs)

    def lowered_text(
        self, x: Any, y: Any = None, batch_size: int | None = None, *, optimized: bool = False
    ) -> str:
        """Returns the program of a training step for data like `x` and `y`, without running it.

        With `reproducible=True` a step has several programs, each after a comment with its name.
        The text is StableHLO or, if `optimized`, the HLO that the devices run, with the reductions
        that XLA made of the gradients' buckets. The other arguments are those of `fit`.
        """
        batch = self._first_batch(x, y, batch_size)
        lowered = self._core.trainer.lower_train_step(batch)
        return lowered.compile().as_text() or "" if optimized else lowered.as_text()

    def describe_collectives(
        self, x: Any, y: Any = None, batch_size: int | None = None
    ) -> Description:
        """Returns the collectives of a training step for data like `x` and `y`, without running it.

        They are those that the step asks for, and what the compiler made of them. Print the result
        for a summary. The arguments are those of `fit`.
        """
        described = describe(self._core.trainer, self._first_batch(x, y, batch_size))
        return described._replace(reason=self._core.require_compiled().dependence)

    def _first_batch(self, x: Any, y: Any, batch_size: int | None) -> Batch:
        """Returns the first batch of data, for which the steps are then ready."""
        self._core.require_compiled()
        first = EpochStream(self._shared.source(DataArguments(x, y, batch_size=batch_size))).peek(0)
        batch = to_batch(first)
        self._shared.prepare(batch)
        self._shared.check_rows(batch, train=True)
        return batch

    def _built_variables(self) -> Variables:
        self._shared.state.require_built()
        return self._core.trainer.variables()
