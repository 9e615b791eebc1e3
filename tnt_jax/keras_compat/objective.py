"""A user's own loss in place of a comparison of outputs with targets: several forward passes, several models, no targets."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax.keras_compat.losses.base import LossFunctionWrapper
from tnt_jax.keras_compat.metrics.base import Mean
from tnt_jax.step import Apply, Batch, LossTerm, Measured

Objective = Callable[..., Any]

_mean_over_rows = LossFunctionWrapper(lambda _, values: values, name="objective")


class CompiledObjective:
    """What `compile(objective=...)` makes of a function; it serves a step as `Compiled` does.

    Args:
        objective: `f(params, batch, rngs) -> values` or `-> (values, metrics)`; see `Model.compile`.
    """

    looks_at_outputs = False

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._names: list[str] = []

    def step_parts(self, apply: Apply) -> "ObjectiveParts":
        """Returns the parts of a step around the objective and the forward pass `apply`."""
        return ObjectiveParts(self._objective, apply, self._names)

    def results(self, sums: Any) -> dict[str, float]:
        """Returns the logs for the sums of an epoch so far: `loss` and the metrics of the objective."""
        total, count = (float(np.asarray(value)) for value in sums["loss"])
        metrics = {name: float(Mean().compute(pair)) for name, pair in sums["metrics"]["outputs"].items()}
        return {"loss": total / count if count else 0.0} | metrics

    def metrics_names(self) -> list[str]:
        """Returns the names of the logs; those of the metrics are known when the objective has been called."""
        return ["loss", *self._names]


class ObjectiveParts:
    """Parts of a step that call a user's objective.

    Args:
        objective: See `CompiledObjective`.
        apply: Forward pass of the wrapped model.
        names: List that receives the names of the metrics.
    """

    def __init__(self, objective: Objective, apply: Apply, names: list[str]) -> None:
        self._objective, self._apply, self._names = objective, apply, names
        self._takes_apply = "apply" in inspect.signature(objective).parameters

    def measure(self, params: Any, model_state: Any, batch: Batch, *, key: jax.Array | None, train: bool) -> Measured:
        """Returns the objective of one rank's rows."""
        forward = _Forward(self._apply, model_state, batch, key, train)
        rngs = {} if key is None else {"params": jax.random.fold_in(key, 0), "dropout": jax.random.fold_in(key, 1)}
        arguments = {"apply": forward} if self._takes_apply else {}
        result = self._objective(params, batch, rngs, **arguments)
        values, metrics = result if isinstance(result, tuple) else (result, {})
        _check(values, metrics, len(jax.tree.leaves(batch.inputs)[0]))
        self._names[:] = sorted(metrics)
        total, count = _mean_over_rows.terms(values, values, batch.weight, batch.mask)
        increments = {name: Mean().increments(value, batch.mask) for name, value in metrics.items()}
        increments = {"outputs": increments, "model": forward.increments}
        return Measured([LossTerm(total, count)], forward.penalty, forward.model_state, increments)


class _Forward:
    """The wrapped model's forward pass as a function of parameters and inputs; remembers what it changes."""

    def __init__(self, apply: Apply, model_state: Any, batch: Batch, key: jax.Array | None, train: bool) -> None:
        self.model_state, self.penalty, self.increments = model_state, 0.0, ()
        self._apply, self._mask, self._key, self._train, self._count = apply, batch.mask, key, train, 0

    def __call__(self, params: Any, inputs: Any) -> Any:
        key = None if self._key is None else jax.random.fold_in(self._key, 2 + self._count)
        self._count += 1
        applied = self._apply(params, self.model_state, inputs, key=key, train=self._train, mask=self._mask)
        self.model_state, self.increments = applied.model_state, applied.increments
        self.penalty = self.penalty + applied.penalty
        return applied.outputs


def _check(values: Any, metrics: Any, num_rows: int) -> None:
    if not isinstance(metrics, Mapping):
        raise TypeError(f"The objective must return values or (values, metrics) with a dict of metrics, but gave {metrics!r}.")
    for name, value in {"values": values, **metrics}.items():
        if jnp.shape(value)[:1] != (num_rows,):
            raise ValueError(
                f"The objective must return one value per row, shape ({num_rows},) or ({num_rows}, ...), but {name} has the shape "
                f"{jnp.shape(value)}. Leave the mean over the batch to the step, which sees the rows of all ranks."
            )
