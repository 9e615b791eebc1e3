"""Looking at a model: its arrays, layers, metrics, curves and compiled program."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from tnt_jax import runtime
from tnt_jax.adapters.base import Adapter, Variables
from tnt_jax.data.sources import Source
from tnt_jax.data.stream import EpochStream
from tnt_jax.keras_compat.curves import draw_curves
from tnt_jax.keras_compat.inputs import to_batch
from tnt_jax.keras_compat.summary import summary_table
from tnt_jax.loop import Trainer


class NamedWeight(np.ndarray):
    """A weight with the attribute `path`, as Keras's variables have it."""

    path: str


class Layer:
    """A part of a model, as far as Keras's TensorBoard callback looks at it.

    Attributes:
        name: First part of the paths of its weights.
        weights: Copies of its weights.
    """

    def __init__(self, name: str, weights: list[NamedWeight]) -> None:
        self.name, self.weights = name, weights


class InspectionMixin:
    """Read-only views of a `Model`."""

    history: Any
    _adapter: Adapter
    _trainer: Trainer
    _compiled: Any
    _require_compiled: Callable[[], None]
    _source: Callable[..., Source]
    _prepare: Callable[..., None]

    # Keras's TensorBoard callback asks for a graph to draw; a jitted step has none of its kind.
    train_function = None

    def summary(self) -> None:
        """Prints a table of all arrays with shapes, counts and bytes, on the master.

        Raises:
            RuntimeError: If the model has no variables yet.
        """
        variables = self._built_variables()
        if runtime.is_master_rank() or runtime.init().settings.output_on_all_devices:
            print(summary_table(self._adapter.name, *variables), flush=True)

    @property
    def variables(self) -> Any:
        """Copies of the variables in the form of the model's library.

        For Linen a dict ready for `module.apply`, for NNX a state for `nnx.update`, for Keras a list as of `get_weights`.

        Raises:
            RuntimeError: If the model has no variables yet.
        """
        return self._adapter.export(self._built_variables())

    @property
    def name(self) -> str:
        """Name of the wrapped module."""
        return self._adapter.name

    @property
    def layers(self) -> list[Layer]:
        """The parts of the model by the first part of their weights' paths, with copies of the weights; empty before it is built."""
        if self._trainer.state is None:
            return []
        weights: dict[str, list[NamedWeight]] = {}
        for path, leaf in self.weights_by_path().items():
            weight = leaf.view(NamedWeight)
            weight.path = path
            weights.setdefault(path.split("/")[0], []).append(weight)
        return [Layer(name, listed) for name, listed in weights.items()]

    def weights_by_path(self) -> dict[str, np.ndarray]:
        """Returns copies of the trained arrays by path, such as `Dense_0/kernel`.

        Raises:
            RuntimeError: If the model has no variables yet.
        """
        leaves = jax.tree_util.tree_leaves_with_path(self._built_variables().params)
        return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}

    @property
    def metrics_names(self) -> list[str]:
        """Names of the logs in the order in which `evaluate` lists them; empty before data was seen."""
        return [] if self._compiled is None else self._compiled.metrics_names() + list(self._adapter.held_metrics())

    @property
    def metrics_by_log(self) -> dict[str, Any]:
        """The metrics by the names of their logs, those of Keras layers among them; empty before data was seen."""
        heads = getattr(self._compiled, "heads", ())
        held = {} if self._compiled is None else self._adapter.held_metrics()
        return {head.prefix + metric.name: metric for head in heads for metric in head.metrics + head.weighted_metrics} | held

    @property
    def metrics(self) -> list[Any]:
        """The metrics in the order of their logs; empty before data was seen."""
        return list(self.metrics_by_log.values())

    def plot_history(self, path: str | os.PathLike[str], history: Mapping[str, list[float]] | None = None) -> None:
        """Draws the curves of the logs to a file, on the master; the ending chooses the format, for instance `.png`.

        Args:
            path: File to write.
            history: Values of each log by epoch; those of the last `fit` by default.

        Raises:
            ModuleNotFoundError: If matplotlib is not installed.
            RuntimeError: If there is nothing to draw.
        """
        if history is None and self.history is None:
            raise RuntimeError("There is no history to draw yet: call fit first.")
        if runtime.is_master_rank():
            values = self.history.history if history is None else history
            draw_curves(path, values, None if history is not None else self.history.epoch)

    def lowered_text(self, x: Any, y: Any = None, batch_size: int | None = None, *, optimized: bool = False) -> str:
        """Returns the program of a training step for data like `x` and `y`, without running it.

        With `reproducible=True` a step has several programs: they follow one another, each behind a comment with its name.

        Args:
            x: Data as in `fit`.
            y: Targets as in `fit`.
            batch_size: As in `fit`.
            optimized: Whether to compile it: the text is then the HLO that the devices run, with the reductions that XLA made of
                the gradients' buckets; otherwise it is StableHLO.

        Raises:
            RuntimeError: If the model was not compiled.
        """
        self._require_compiled()
        first = EpochStream(self._source(x, y, None, batch_size, None)).peek(0)
        self._prepare(first)
        lowered = self._trainer.lower_train_step(to_batch(first))
        return lowered.compile().as_text() or "" if optimized else lowered.as_text()

    def _built_variables(self) -> Variables:
        self._trainer.require_state()
        return self._trainer.variables()
