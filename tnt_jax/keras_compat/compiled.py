"""What `compile` was told, resolved against the shapes of the first batch into the functions of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax.keras_compat import losses, metrics
from tnt_jax.keras_compat.keras_objects import mask_of_outputs
from tnt_jax.keras_compat.losses import Loss
from tnt_jax.keras_compat.metrics import Metric
from tnt_jax.keras_compat.metrics.base import MeanMetricWrapper
from tnt_jax.step import Apply, Batch, LossTerm, StepParts


@dataclass(frozen=True)
class CompileArguments:
    """The arguments of `compile` that decide what a step computes.

    Attributes:
        loss: A name, loss or callable, or a list or dict of them for several outputs.
        loss_weights: Factor of each output's loss: a number, list or dict; 1 by default.
        metrics: Metrics that ignore sample weights; for several outputs a list or dict of lists.
        weighted_metrics: Metrics that use them.
        objective: A function that takes the place of loss and metrics, or None.
    """

    loss: Any
    loss_weights: Any = None
    metrics: Any = None
    weighted_metrics: Any = None
    objective: Any = None

    def check_names(self) -> None:
        """Raises a ValueError that lists the known names if a loss has an unknown one."""
        for loss in jax.tree.leaves(self.loss):
            losses.get(loss)


@dataclass(frozen=True)
class Head:
    """One output of the model with what is asked of it.

    Attributes:
        name: Name of the output, empty for the only one.
        loss: Its loss, or None for an output that is not trained.
        weight: Factor of its loss.
        metrics: Metrics that ignore sample weights.
        weighted_metrics: Metrics that use them.
        shape: Shape of the output.
    """

    name: str
    loss: Loss | None
    weight: float
    metrics: tuple[Metric, ...]
    weighted_metrics: tuple[Metric, ...]
    shape: tuple[int, ...]

    @property
    def prefix(self) -> str:
        """What the names of this output's logs begin with."""
        return f"{self.name}_" if self.name else ""

    @property
    def looks_at_outputs(self) -> bool:
        """Whether `check` has anything to check."""
        is_users = self.loss is not None and _is_users(self.loss)
        expects = [getattr(part, "expects_probabilities", False) for part in (self.loss, *self.metrics, *self.weighted_metrics)]
        return is_users or any(expects)

    def check(self, true: np.ndarray, outputs: np.ndarray) -> None:
        """Raises a ValueError if loss or metrics cannot work on such outputs `[rows, ...]`."""
        if self.loss is not None:
            losses.check_outputs(self.loss, outputs)
            if _is_users(self.loss):
                losses.check_rows(self.loss, true, outputs)
        for metric in self.metrics + self.weighted_metrics:
            metrics.check_outputs(metric, outputs)


class Compiled:
    """Losses and metrics of every output, for outputs and targets of known shapes.

    Args:
        arguments: What `compile` was told.
        outputs: The model's outputs: pytree with shapes `[rows, ...]`.
        targets: Targets of the same structure.

    Raises:
        ValueError: If targets are missing, or do not fit the outputs, or a name is unknown.
    """

    def __init__(self, arguments: CompileArguments, outputs: Any, targets: Any) -> None:
        names = _output_names(outputs)
        if targets is None:
            raise ValueError(
                "The data holds no targets, but the loss needs them: let each element be (inputs, targets), or pass y beside arrays."
            )
        true, pred = split(targets, names), split(outputs, names)
        parts = [
            _per_output(arguments.loss, names, "loss"),
            _per_output(arguments.loss_weights, names, "loss_weights"),
            _per_output(arguments.metrics, names, "metrics", many=True),
            _per_output(arguments.weighted_metrics, names, "weighted_metrics", many=True),
        ]
        self.names = names
        self.heads = tuple(_make_head(name, *part) for name, *part in zip(names, *parts, true, pred, strict=True))
        if all(head.loss is None for head in self.heads):
            raise ValueError("compile() needs a loss for at least one output; pass for instance loss='mse'.")

    def step_parts(self, apply: Apply) -> StepParts:
        """Returns the functions of a step around the forward pass `apply`."""
        return StepParts(apply, self._loss_terms, self._increments)

    def results(self, sums: Any) -> dict[str, Any]:
        """Returns the logs for the sums of an epoch so far: `loss`, losses by output if there are several, and every metric."""
        sums = jax.tree.map(np.asarray, sums)
        logs: dict[str, Any] = {"loss": _ratio(sums["loss"])}
        trained = [head for head in self.heads if head.loss is not None]
        if len(self.heads) > 1:
            logs |= {f"{head.prefix}loss": _ratio(pair) for head, pair in zip(trained, sums["losses"], strict=True)}
        for head, head_sums in zip(self.heads, sums["metrics"]["outputs"], strict=True):
            for metric, metric_sums in zip(head.metrics + head.weighted_metrics, head_sums, strict=True):
                value = np.asarray(metric.compute(metric_sums))
                # A metric of several thresholds or classes has a vector of results, as in Keras.
                logs[head.prefix + metric.name] = float(value) if value.ndim == 0 else value
        return logs

    def metrics_names(self) -> list[str]:
        """Returns the names of the logs, in the order in which `evaluate` lists them."""
        names = ["loss"]
        if len(self.heads) > 1:
            names += [f"{head.prefix}loss" for head in self.heads if head.loss is not None]
        return names + [head.prefix + metric.name for head in self.heads for metric in head.metrics + head.weighted_metrics]

    @property
    def looks_at_outputs(self) -> bool:
        """Whether `check_first_batch` needs the model's outputs."""
        return any(head.looks_at_outputs for head in self.heads)

    def check_first_batch(self, outputs: Any, targets: Any, *, rows: int) -> None:
        """Checks concrete outputs and targets of a batch against what the losses expect.

        Args:
            outputs: Outputs `[rows, ...]` on the host; None if `looks_at_outputs` is false.
            targets: Targets `[rows, ...]` on the host.
            rows: Rows at the beginning that are not padding.

        Raises:
            ValueError: If logits meet a loss or metric of probabilities, a target is out of range, or a loss of the user's compares
                rows with each other.
        """
        if rows == 0:
            return
        for index, (head, true) in enumerate(zip(self.heads, split(targets, self.names), strict=True)):
            if head.loss is not None:
                losses.check_labels(head.loss, np.asarray(true)[:rows], (rows, *head.shape[1:]))
            if head.looks_at_outputs:
                head.check(np.asarray(true)[:rows], np.asarray(split(outputs, self.names)[index])[:rows])

    def _loss_terms(self, outputs: Any, batch: Batch) -> list[LossTerm]:
        terms = []
        for head, true, pred, weight in self._by_head(outputs, batch):
            if head.loss is not None:
                valid = mask_of_outputs(pred)
                # A subclass of the user's need not know what Keras's layers attach.
                extra = {} if valid is None else {"valid": valid}
                total, count = head.loss.terms(true, pred, weight, batch.mask, **extra)
                terms.append(LossTerm(total, count, head.weight))
        return terms

    def _increments(self, outputs: Any, batch: Batch) -> list[list[Any]]:
        increments = []
        for head, true, pred, weight in self._by_head(outputs, batch):
            weighted = _masked_weight(weight, batch.mask)
            pairs = [(metric, batch.mask) for metric in head.metrics] + [(metric, weighted) for metric in head.weighted_metrics]
            increments.append([metric.increments(true, pred, _valid_weight(metric, given, pred)) for metric, given in pairs])
        return increments

    def _by_head(self, outputs: Any, batch: Batch) -> list[tuple[Head, Any, Any, Any]]:
        weights = split(batch.weight, self.names) if _is_per_output(batch.weight) else [batch.weight] * len(self.names)
        return list(zip(self.heads, split(batch.targets, self.names), split(outputs, self.names), weights, strict=True))


def split(tree: Any, names: Sequence[str]) -> list[Any]:
    """Returns the part of each output, for a tree given as one value, a list or tuple in order, or a dict by name.

    Raises:
        ValueError: If the parts do not match the names.
    """
    if isinstance(tree, Mapping):
        if set(names) - set(tree):
            raise ValueError(f"The model has the outputs {list(names)}, but the data has targets for {sorted(tree)}.")
        return [tree[name] for name in names]
    if isinstance(tree, (tuple, list)):
        if len(tree) != len(names):
            raise ValueError(f"The model has {len(names)} output(s), but the data has {len(tree)} target(s).")
        return list(tree)
    if len(names) != 1:
        raise ValueError(f"The model has {len(names)} outputs ({', '.join(names)}), but the data has one target.")
    return [tree]


def _output_names(outputs: Any) -> list[str]:
    if isinstance(outputs, Mapping):
        return list(outputs)
    if isinstance(outputs, (tuple, list)):
        return [f"output_{index}" for index in range(len(outputs))]
    return [""]


def _per_output(value: Any, names: Sequence[str], what: str, *, many: bool = False) -> list[Any]:
    """Returns what each output was given: one value serves all, lists go by position, dicts by name."""
    if isinstance(value, Mapping):
        if set(value) - set(names):
            raise ValueError(f"{what} names the output(s) {sorted(set(value) - set(names))}; the model has {list(names)}.")
        return [value.get(name) for name in names]
    is_list = isinstance(value, (tuple, list))
    if is_list and not (many and (len(names) == 1 or not any(isinstance(item, (tuple, list)) for item in value))):
        if len(value) != len(names):
            raise ValueError(f"{what} has {len(value)} entries for {len(names)} output(s); give one for each, or a dict by name.")
        return list(value)
    return [value] * len(names)


def _make_head(name: str, loss: Any, weight: Any, plain: Any, weighted: Any, true: Any, pred: Any) -> Head:
    resolved = None if loss is None else losses.get(loss)

    def resolve(given: Any) -> tuple[Metric, ...]:
        listed = given if isinstance(given, (tuple, list)) else [] if given is None else [given]
        return tuple(metrics.get(item, np.shape(true), np.shape(pred), loss=resolved) for item in listed)

    return Head(name, resolved, 1.0 if weight is None else float(weight), resolve(plain), resolve(weighted), np.shape(pred))


def _is_users(loss: Loss) -> bool:
    """Tells whether a loss may compare rows with each other, which none of this package does."""
    return type(loss) is losses.LossFunctionWrapper or not type(loss).__module__.startswith(losses.__name__)


def _is_per_output(weight: Any) -> bool:
    return isinstance(weight, (Mapping, tuple, list))


def _masked_weight(weight: Any, mask: Any) -> Any:
    if weight is None or mask is None:
        return mask if weight is None else weight
    return weight * mask.reshape(-1, *(1,) * (jnp.ndim(weight) - 1))


def _valid_weight(metric: Metric, weight: Any, outputs: Any) -> Any:
    """Returns weights that leave out what the outputs mask; as in Keras, of means of values only."""
    valid = mask_of_outputs(outputs)
    if valid is None or not isinstance(metric, MeanMetricWrapper):
        return weight
    valid = jnp.asarray(valid, jnp.float32)
    return valid if weight is None else valid * weight.reshape(*weight.shape, *(1,) * (valid.ndim - weight.ndim))


def _ratio(pair: tuple[np.ndarray, np.ndarray]) -> float:
    total, count = pair
    return float(total) / float(count) if count else 0.0
