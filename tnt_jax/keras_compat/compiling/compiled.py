"""Resolves the arguments of `compile` for the first batch, and checks that they fit by a trace."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from types import FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax.adapters.base import Adapter
from tnt_jax.keras_compat import losses, metrics
from tnt_jax.keras_compat.compiling.output_specs import (
    Layout,
    OutputSpec,
    is_users,
    log_names,
    make_output_specs,
)
from tnt_jax.keras_compat.compiling.row_checks import PerRow, outputs_per_row
from tnt_jax.keras_compat.keras_objects import mask_of_outputs
from tnt_jax.keras_compat.losses import Loss
from tnt_jax.keras_compat.losses.base import standardized
from tnt_jax.keras_compat.metrics import Metric
from tnt_jax.keras_compat.metrics.reduction import MeanMetricWrapper, and_valid
from tnt_jax.train.contracts import Apply, Batch, LossTerm, StepParts

# The errors that JAX raises if a function needs the values of a traced array.
_NEEDS_NUMBERS = (
    jax.errors.TracerArrayConversionError,
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerIntegerConversionError,
)
_BY_INDEX = ("SparseCategoricalAccuracy", "SparseTopKCategoricalAccuracy")


def check_traceable(part: Loss | Metric, y_true: Any, y_pred: Any) -> None:
    """Checks that a custom loss or metric is written in JAX."""
    kind, function = ("Loss", part.terms) if isinstance(part, Loss) else ("Metric", part.increments)
    try:
        jax.eval_shape(function, y_true, y_pred)
    except _NEEDS_NUMBERS as error:
        raise ValueError(
            f"{kind} {part.name!r} needs the values of its arrays ({type(error).__name__}), which "
            "are unknown while a step is traced. Write it with jax.numpy instead of NumPy, "
            "scikit-learn or Python's if and float, or compute it in a callback from model.predict."
        ) from None


def check_activation(loss: Loss, activation: str | None) -> None:
    """Checks that a loss of logits does not get probabilities."""
    takes_logits = getattr(loss, "fn_kwargs", {}).get("from_logits") or getattr(
        loss, "takes_logits", None
    )
    if not takes_logits or activation is None:
        return
    own = hasattr(loss, "takes_logits")
    other = "" if own else f", or use tnt_jax.losses.{type(loss).__name__}(from_logits=False)"
    raise ValueError(
        f"Loss {loss.name!r} expects logits, but the model ends with a {activation}, so its "
        f"outputs are probabilities. Leave the {activation} out of the model{other}."
    )


def check_targets_of_metric(metric: Metric, y_true: Any, y_pred_shape: tuple[int, ...]) -> None:
    """Checks that the targets are the class indices or distributions that a metric needs."""
    loss = getattr(metric, "loss", None)
    by_index = type(metric).__name__ in _BY_INDEX or getattr(loss, "targets", "") == "class_index"
    shape = np.shape(y_true)
    features = y_pred_shape[1:]
    if by_index and features and features[-1] > 1 and shape[1:] == features:
        raise ValueError(
            f"Metric {metric.name!r} needs integer labels of shape {shape[:-1]} for outputs of "
            f"{features[-1]} classes, but the targets have the shape {shape}. One-hot targets need "
            "'categorical_accuracy', 'categorical_crossentropy', or 'accuracy', which takes either."
        )


@dataclass(frozen=True)
class CompileArguments:
    """The arguments of `compile` that decide what a step computes."""

    loss: Any
    loss_weights: Any = None
    metrics: Any = None
    weighted_metrics: Any = None
    objective: Any = None

    def check_names(self) -> None:
        """Raises a ValueError for unknown losses, outputs before targets, or bad factors."""
        for loss in jax.tree.leaves(self.loss):
            losses.get(loss)
        for metric in jax.tree.leaves((self.metrics, self.weighted_metrics)):
            if isinstance(metric, (FunctionType, partial)):
                losses.get(metric)
        weights = jax.tree.leaves(self.loss_weights)
        if not all(
            isinstance(weight, Real) or (hasattr(weight, "dtype") and np.ndim(weight) == 0)
            for weight in weights
        ):
            raise ValueError(
                f"loss_weights, the third argument of compile, must be a number for each output, "
                f"but is {self.loss_weights!r}. Pass "
                "metrics by name: metrics=[...]."
            )


class Compiled:
    """Losses and metrics of every output, for outputs and targets of known shapes."""

    def __init__(
        self,
        arguments: CompileArguments,
        outputs: Any,
        targets: Any,
        declared: Sequence[str] | None = None,
    ) -> None:
        self._layout = layout = Layout(outputs, declared)
        asked = [
            layout.arguments(arguments.loss, "loss"),
            layout.arguments(arguments.loss_weights, "loss_weights"),
            layout.arguments(arguments.metrics, "metrics", many=True),
            layout.arguments(arguments.weighted_metrics, "weighted_metrics", many=True),
        ]
        parts = list(zip(*asked, strict=True))
        self._needs_target = [
            bool(jax.tree.leaves((loss, plain, weighted))) for loss, _, plain, weighted in parts
        ]
        true, pred = self._targets(targets), layout.outputs(outputs)
        self.specs = tuple(
            spec
            for index, part in enumerate(parts)
            for spec in make_output_specs(layout, index, part, true[index], pred[index])
        )
        self._metric_names = log_names(self.specs)

    def check_traced(self, outputs: Any, activations: Any, targets: Any) -> None:
        """Checks losses and metrics against the trace of a forward pass."""
        all_true, all_pred = self._targets(targets), self._layout.outputs(outputs)
        made_by = self._layout.outputs(activations)
        for spec in self.specs:
            true, pred = all_true[spec.index], all_pred[spec.index]
            activation = made_by[spec.index]
            if true is None:
                continue
            # Targets are this process's rows, outputs those of all.
            rows = jax.tree.leaves(true)[0].shape[0]
            pred = jax.tree.map(
                lambda x, rows=rows: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), pred
            )
            for metric in spec.metrics + spec.weighted_metrics:
                check_targets_of_metric(metric, true, spec.shape)
                if (
                    not type(metric).__module__.startswith(metrics.__name__)
                    or type(metric) is MeanMetricWrapper
                ):
                    check_traceable(metric, true, pred)
            if spec.loss is not None:
                check_activation(spec.loss, activation or None)
                if is_users(spec.loss):
                    check_traceable(spec.loss, true, pred)

    def step_parts(self, apply: Apply, rows_at_once: int | None = None) -> StepParts:
        """Returns the functions of a step around the forward pass `apply`."""
        return StepParts(apply, self._loss_terms, self._increments, rows_at_once)

    def kept(self, sums: Any) -> Any:
        """Returns the sums with which the next epoch begins; None if no metric keeps its own."""
        keeps = [
            [metric.keeps_sums for metric in spec.metrics + spec.weighted_metrics]
            for spec in self.specs
        ]
        if not any(map(any, keeps)):
            return None
        start = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), sums)
        ended = jax.tree.map(np.asarray, sums["metrics"]["outputs"])
        for begun, *values in zip(start["metrics"]["outputs"], ended, keeps, strict=True):
            begun[:] = [
                kept if keeps_sums else zeros
                for zeros, kept, keeps_sums in zip(begun, *values, strict=True)
            ]
        return start

    @property
    def has_own_losses(self) -> bool:
        """Whether a loss is the user's, and may compare rows."""
        return any(spec.loss is not None and is_users(spec.loss) for spec in self.specs)

    def per_row(self, adapter: Adapter) -> PerRow:
        """Returns what computes outputs and the user's own losses, for `dependence_of_rows`."""
        outputs_of = outputs_per_row(adapter)

        def per_row(params: Any, model_state: Any, batch: Batch, *others: Any) -> dict[str, Any]:
            outputs = outputs_of(params, model_state, batch, *others)
            own = next(iter(outputs.values()))
            return outputs | self._own_losses(own, batch)

        return per_row

    def _own_losses(self, outputs: Any, batch: Batch) -> dict[str, Any]:
        values = {}
        for spec, true, pred, _ in self._by_output(outputs, batch):
            if spec.loss is not None and is_users(spec.loss):
                name = f"Loss {spec.loss.name!r}" + (f" of {spec.name!r}" if spec.name else "")
                values[name] = spec.loss.call(*standardized(true, pred))
        return values

    def results(self, sums: Any) -> dict[str, Any]:
        """Returns the logs of an epoch's sums: loss, those of several outputs, and metrics."""
        sums = jax.tree.map(np.asarray, sums)
        logs: dict[str, Any] = {"loss": _ratio(sums["loss"])}
        trained = self._trained()
        if len(trained) > 1:
            logs |= {
                f"{spec.prefix}loss": _ratio(pair)
                for spec, pair in zip(trained, sums["losses"], strict=True)
                if spec.prefix
            }
        for spec, names, spec_sums in zip(
            self.specs, self._metric_names, sums["metrics"]["outputs"], strict=True
        ):
            for metric, name, metric_sums in zip(
                spec.metrics + spec.weighted_metrics, names, spec_sums, strict=True
            ):
                value = np.asarray(metric.compute(metric_sums))
                # A metric of several thresholds or classes has a vector of results, as in Keras.
                logs[name] = float(value) if value.ndim == 0 else value
        return logs

    def metrics_by_log(self) -> dict[str, tuple[Metric, Callable[[Any], Any]]]:
        """Returns each metric by the name of its log, with what finds its sums in an epoch's."""

        def sums_of(output: int, number: int) -> Callable[[Any], Any]:
            return lambda sums: sums["metrics"]["outputs"][output][number]

        return {
            name: (metric, sums_of(output, number))
            for output, (spec, names) in enumerate(zip(self.specs, self._metric_names, strict=True))
            for number, (metric, name) in enumerate(
                zip(spec.metrics + spec.weighted_metrics, names, strict=True)
            )
        }

    def metrics_names(self) -> list[str]:
        """Returns the names of the logs, in the order in which `evaluate` lists them."""
        names = ["loss"]
        if len(trained := self._trained()) > 1:
            names += dict.fromkeys(f"{spec.prefix}loss" for spec in trained if spec.prefix)
        return names + [name for of_spec in self._metric_names for name in of_spec]

    @property
    def looks_at_outputs(self) -> bool:
        """Whether `check_first_batch` needs the model's outputs."""
        return any(spec.looks_at_outputs for spec in self.specs)

    def check_first_batch(self, outputs: Any, targets: Any, *, rows: int) -> None:
        """Checks concrete outputs and targets of a batch against what the losses expect."""
        if rows == 0:
            return
        all_true = self._targets(targets)
        for spec in self.specs:
            if all_true[spec.index] is None:
                continue
            true = np.asarray(all_true[spec.index])[:rows]
            if spec.loss is not None:
                losses.check_labels(spec.loss, true, (rows, *spec.shape[1:]))
            if spec.looks_at_outputs and outputs is not None:
                spec.check(true, np.asarray(self._layout.outputs(outputs)[spec.index])[:rows])

    def check_classes(self, class_weight: Mapping[int, float]) -> None:
        """Raises a ValueError if a class has a weight that the single output does not have."""
        shape = self.specs[0].shape
        num_classes = shape[-1] if len(self.specs) == 1 and len(shape) == 2 else 1
        highest = max(class_weight)
        if 1 < num_classes <= highest:
            raise ValueError(
                f"class_weight names class {highest}, but the model's output has {num_classes} "
                f"classes, 0 to {num_classes - 1}."
            )

    def _loss_terms(self, outputs: Any, batch: Batch) -> list[LossTerm]:
        terms = []
        for spec, true, pred, weight in self._by_output(outputs, batch):
            if spec.loss is not None:
                valid = mask_of_outputs(pred)
                # A subclass of the user's need not know what Keras's layers attach.
                extra = {} if valid is None else {"valid": valid}
                total, count = spec.loss.terms(true, pred, weight, batch.mask, **extra)
                terms.append(LossTerm(total, count, spec.weight))
        return terms

    def _increments(self, outputs: Any, batch: Batch) -> list[list[Any]]:
        increments = []
        for spec, true, pred, weight in self._by_output(outputs, batch):
            weighted = _masked_weight(weight, batch.mask)
            pairs = [(metric, batch.mask) for metric in spec.metrics]
            for metric in spec.weighted_metrics:
                given = weighted
                if weight is not None and isinstance(metric, MeanMetricWrapper):
                    given = metric.without_ignored(true, pred, weighted)
                pairs.append((metric, given))
            increments.append(
                [
                    metric.increments(true, pred, _valid_weight(metric, given, pred))
                    for metric, given in pairs
                ]
            )
        return increments

    def _by_output(self, outputs: Any, batch: Batch) -> list[tuple[OutputSpec, Any, Any, Any]]:
        weights = (
            self._layout.data(batch.weight, self._needs_target, "sample weight")
            if isinstance(batch.weight, (Mapping, tuple, list))
            else [batch.weight] * len(self._layout.keys)
        )
        true, pred = self._targets(batch.targets), self._layout.outputs(outputs)
        return [
            (spec, true[spec.index], pred[spec.index], weights[spec.index]) for spec in self.specs
        ]

    def _targets(self, targets: Any) -> list[Any]:
        if targets is None:
            return [None] * len(self._layout.keys)
        return self._layout.data(targets, self._needs_target, "target")

    def _trained(self) -> list[OutputSpec]:
        return [spec for spec in self.specs if spec.loss is not None]


def _masked_weight(weight: Any, mask: Any) -> Any:
    if weight is None or mask is None:
        return mask if weight is None else weight
    return weight * mask.reshape(-1, *(1,) * (jnp.ndim(weight) - 1))


def _valid_weight(metric: Metric, weight: Any, outputs: Any) -> Any:
    """Returns weights without what outputs mask; as in Keras, only means of values respect it."""
    valid = mask_of_outputs(outputs) if isinstance(metric, MeanMetricWrapper) else None
    return and_valid(weight, valid)


def _ratio(pair: tuple[np.ndarray, np.ndarray]) -> float:
    total, count = pair
    return float(total) / float(count) if count else 0.0
