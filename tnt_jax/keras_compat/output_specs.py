"""The outputs of a model, and the loss, loss weight and metrics that `compile` gives to each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnt_jax.keras_compat import losses, metrics
from tnt_jax.keras_compat.losses import Loss
from tnt_jax.keras_compat.losses.from_functions import OptaxLoss
from tnt_jax.keras_compat.metrics import Metric


@dataclass(frozen=True)
class OutputSpec:
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
        parts = (
            self.loss,
            *(
                part
                for metric in self.metrics + self.weighted_metrics
                for part in (metric, getattr(metric, "loss", None))
            ),
        )
        expects = [
            getattr(part, "expects_probabilities", False) or getattr(part, "threshold", None) == 0.5
            for part in parts
        ]
        return any(expects)

    def check(self, true: np.ndarray, outputs: np.ndarray) -> None:
        """Raises a ValueError if loss or metrics cannot work on such outputs `[rows, ...]`."""
        if self.loss is not None:
            losses.check_outputs(self.loss, outputs)
        for metric in self.metrics + self.weighted_metrics:
            metrics.check_outputs(metric, outputs)


def split(tree: Any, names: Sequence[str]) -> list[Any]:
    """Returns the part of each output.

    The tree is one value, a list or tuple in order, or a dict by name.

    Raises:
        ValueError: If the parts do not match the names.
    """
    if isinstance(tree, Mapping):
        if set(names) - set(tree):
            raise ValueError(
                f"The model has the outputs {list(names)}, but the data has targets for "
                f"{sorted(tree)}."
            )
        return [tree[name] for name in names]
    if isinstance(tree, (tuple, list)):
        if len(tree) != len(names):
            raise ValueError(
                f"The model has {len(names)} output(s), but the data has {len(tree)} target(s)."
            )
        return list(tree)
    if len(names) != 1:
        raise ValueError(
            f"The model has {len(names)} outputs ({', '.join(names)}), but the data has one target."
        )
    return [tree]


def output_names(outputs: Any) -> list[str]:
    """Returns a name for each output.

    The names are the keys of a dict, `output_0` and so on for a list or tuple, and the empty name
    for a single output.
    """
    if isinstance(outputs, Mapping):
        return list(outputs)
    if isinstance(outputs, (tuple, list)):
        return [f"output_{index}" for index in range(len(outputs))]
    return [""]


def per_output(value: Any, names: Sequence[str], what: str, *, many: bool = False) -> list[Any]:
    """Returns what each output was given.

    One value serves all outputs, lists go by position, dicts by name.
    """
    if isinstance(value, Mapping):
        if set(value) - set(names):
            raise ValueError(
                f"{what} names the output(s) {sorted(set(value) - set(names))}; the model has "
                f"{list(names)}."
            )
        return [value.get(name) for name in names]
    is_list = isinstance(value, (tuple, list))
    if is_list and not (
        many and (len(names) == 1 or not any(isinstance(item, (tuple, list)) for item in value))
    ):
        if len(value) != len(names):
            raise ValueError(
                f"{what} has {len(value)} entries for {len(names)} output(s); give one for each, "
                f"or a dict by name."
            )
        return list(value)
    return [value] * len(names)


def make_output_spec(
    name: str, loss: Any, weight: Any, plain: Any, weighted: Any, true: Any, pred: Any
) -> OutputSpec:
    """Returns what is asked of an output, with losses and metrics resolved.

    Args:
        name: Name of the output.
        loss: Its loss or the name of one; None for an output that is not trained.
        weight: Factor of its loss; None for 1.
        plain: Metrics that ignore sample weights, one or a list.
        weighted: Metrics that use them, one or a list.
        true: Targets, or their shapes, `[rows, ...]`.
        pred: The output, or its shape, `[rows, ...]`.
    """
    resolved = None if loss is None else losses.get(loss)

    def resolve(given: Any) -> tuple[Metric, ...]:
        if given is None:
            return ()
        listed = given if isinstance(given, (tuple, list)) else [given]
        return tuple(
            metrics.get(item, np.shape(true), np.shape(pred), loss=resolved) for item in listed
        )

    return OutputSpec(
        name,
        resolved,
        1.0 if weight is None else float(weight),
        resolve(plain),
        resolve(weighted),
        np.shape(pred),
    )


def log_names(specs: Sequence[OutputSpec]) -> list[list[str]]:
    """Returns the names of each output's metrics in the logs, each once, as Keras makes them.

    Of metrics of one name the first has it. A later one of `metrics` gets a number; one of
    `weighted_metrics` the prefix `weighted_`, and a number if that is taken too.
    """
    used: set[str] = {"loss", *(f"{spec.prefix}loss" for spec in specs if spec.loss is not None)}
    names = [
        [_unused(f"{spec.prefix}{metric.name}", used) for metric in spec.metrics] for spec in specs
    ]
    for spec, of_spec in zip(specs, names, strict=True):
        for metric in spec.weighted_metrics:
            name = f"{spec.prefix}{metric.name}"
            of_spec.append(
                _unused(f"{spec.prefix}weighted_{metric.name}" if name in used else name, used)
            )
    return names


def _unused(name: str, used: set[str]) -> str:
    candidates = [name, *(f"{name}_{index}" for index in range(1, len(used) + 1))]
    unused = next(candidate for candidate in candidates if candidate not in used)
    used.add(unused)
    return unused


def is_users(loss: Loss) -> bool:
    """Returns whether a loss may compare rows with each other, which none of this package does."""
    return type(loss) in (losses.LossFunctionWrapper, OptaxLoss) or not type(
        loss
    ).__module__.startswith(losses.__name__)
