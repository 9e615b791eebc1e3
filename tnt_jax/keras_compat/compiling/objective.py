"""Custom objectives, such as several forward passes, in place of comparing outputs with targets."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax.adapters.base import Adapter
from tnt_jax.distributed.sums.random_rows import Draws, data_key, key_for
from tnt_jax.keras_compat.compiling.row_checks import PerRow
from tnt_jax.keras_compat.losses.base import LossFunctionWrapper
from tnt_jax.keras_compat.metrics.means import Mean
from tnt_jax.train.contracts import Apply, Batch, LossTerm, Measured

Objective = Callable[..., Any]

_mean_over_rows = LossFunctionWrapper(lambda _, values: values, name="objective")


class CompiledObjective:
    """A compiled custom objective; it serves a step as `Compiled` does.

    The function returns one value per row, `[rows]` or `[rows, ...]`, or `(values, metrics)` with a
    dict of values per row. Values are weighted by sample weights and averaged over the real rows of
    all ranks. It is called with `params`, one rank's rows as a `tnt_jax.train.contracts.Batch`, and
    `rngs` as `module.apply` takes them, empty in evaluation. Two further arguments are passed if it
    has them: `train` tells training from evaluation, and `rngs` are then there in both; `apply` is
    the model's forward pass `apply(params, inputs) -> outputs`, which keeps model state such as
    moving averages.

    Args:
        objective: `f(params, batch, rngs) -> values` or `-> (values, metrics)`.
    """

    has_own_losses = True

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self._names: list[str] = []

    def step_parts(self, apply: Apply, rows_at_once: int | None = None) -> "ObjectiveParts":
        """Returns the parts of a step around the objective and the forward pass `apply`."""
        return ObjectiveParts(self._objective, apply, self._names, rows_at_once)

    def per_row(self, adapter: Adapter) -> PerRow:
        """Returns what computes the objective of each row, for `dependence_of_rows`."""
        return self.step_parts(adapter.apply).per_row

    def results(self, sums: Any) -> dict[str, float]:
        """Returns the logs for the sums of an epoch so far: `loss` and the objective's metrics."""
        total, count = (float(np.asarray(value)) for value in sums["loss"])
        metrics = {
            name: float(Mean().compute(pair)) for name, pair in sums["metrics"]["outputs"].items()
        }
        return {"loss": total / count if count else 0.0} | metrics

    def metrics_names(self) -> list[str]:
        """Returns the names of the logs; those of metrics once the objective was called."""
        return ["loss", *self._names]


@dataclass(eq=False)
class ObjectiveParts:
    """Parts of a step that call a custom objective."""

    objective: Objective
    apply: Apply
    names: list[str]  # Of the metrics, once it was called.
    rows_at_once: int | None
    _draws: dict[Any, Draws] = field(default_factory=dict)

    def measure(
        self, params: Any, model_state: Any, batch: Batch, *, key: jax.Array | None, train: bool
    ) -> Measured:
        """Returns the objective of one rank's rows."""
        values, metrics, forward = self._call(params, model_state, batch, key, train=train)
        used = {"loss"}
        metrics = {unused_name(name, used): metrics[name] for name in sorted(metrics)}
        self.names[:] = sorted(metrics)
        total, count = _mean_over_rows.terms(values, values, batch.weight, batch.mask)
        increments = {name: Mean().increments(value, batch.mask) for name, value in metrics.items()}
        increments = {"outputs": increments, "model": forward.increments}
        return Measured([LossTerm(total, count)], forward.penalty, forward.model_state, increments)

    def per_row(
        self, params: Any, model_state: Any, batch: Batch, key: jax.Array | None, train: bool
    ) -> dict[str, Any]:
        """Returns the values and metrics of each row, for the check that rows are independent."""
        values, metrics, _ = self._call(params, model_state, batch, key, train=train)
        return {"The objective": (values, metrics)}

    def _call(
        self, params: Any, model_state: Any, batch: Batch, key: jax.Array | None, *, train: bool
    ) -> tuple[Any, Mapping[str, Any], "_Forward"]:
        base = data_key(0) if key is None else key
        parameters = inspect.signature(self.objective).parameters

        def call(own_key: jax.Array, batch: Batch) -> tuple[Any, Any, _Forward]:
            forward = _Forward(self.apply, model_state, batch.mask, base, train)
            given = {"apply": forward, "train": train}
            arguments = {name: value for name, value in given.items() if name in parameters}
            streams = ("params", "dropout") if train or "train" in parameters else ()
            rngs = {name: jax.random.fold_in(own_key, i) for i, name in enumerate(streams)}
            result = self.objective(params, batch, rngs, **arguments)
            values, metrics = result if isinstance(result, tuple) else (result, {})
            return values, metrics, forward

        own_key = key_for(lambda *args: call(*args)[:2], base, batch, self._draws, kind=train)
        values, metrics, forward = call(own_key, batch)
        _check(values, metrics, len(jax.tree.leaves(batch.inputs)[0]))
        return values, metrics, forward


@dataclass
class _Forward:
    """The wrapped model's forward pass, which records the changes of the model state."""

    apply: Apply
    model_state: Any
    mask: Any
    key: jax.Array
    train: bool
    penalty: Any = 0.0
    increments: Any = ()
    count: int = 0

    def __call__(self, params: Any, inputs: Any) -> Any:
        key = jax.random.fold_in(self.key, 2 + self.count)
        self.count += 1
        applied = self.apply(
            params, self.model_state, inputs, key=key, train=self.train, mask=self.mask
        )
        self.model_state, self.increments = applied.model_state, applied.increments
        self.penalty = self.penalty + applied.penalty
        return applied.outputs


def unused_name(name: str, used: set[str]) -> str:
    """Returns a name for a log, with a number if it is used already, and adds it to `used`."""
    candidates = [name, *(f"{name}_{index}" for index in range(1, len(used) + 1))]
    unused = next(candidate for candidate in candidates if candidate not in used)
    used.add(unused)
    return unused


def _check(values: Any, metrics: Any, num_rows: int) -> None:
    if not isinstance(metrics, Mapping):
        raise TypeError(
            "The objective must return values or (values, metrics) with a dict of metrics, but "
            f"gave {metrics!r}."
        )
    for name, value in {"values": values, **metrics}.items():
        if jnp.shape(value)[:1] != (num_rows,):
            raise ValueError(
                f"The objective must return one value per row, shape ({num_rows},) or ({num_rows}, "
                f"...), but {name} has the shape {jnp.shape(value)}. Do not average over the "
                "batch: the step does, over the rows of all ranks."
            )
