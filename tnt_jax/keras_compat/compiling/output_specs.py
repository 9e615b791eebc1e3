"""The outputs of a model, and the loss, loss weight and metrics that `compile` gives to each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tnt_jax.keras_compat import losses, metrics
from tnt_jax.keras_compat.losses import Loss
from tnt_jax.keras_compat.losses.from_functions import OptaxLoss
from tnt_jax.keras_compat.metrics import Metric


@dataclass(frozen=True)
class OutputSpec:
    """One output of the model with what is asked of it."""

    index: int
    name: str  # Empty for the only output.
    loss: Loss | None
    weight: float  # Of the loss.
    metrics: tuple[Metric, ...]  # They ignore sample weights.
    weighted_metrics: tuple[Metric, ...]
    shape: tuple[int, ...]

    @property
    def prefix(self) -> str:
        """Start of the names of this output's logs."""
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


class Layout:
    """The outputs of a model in order, with the names by which a user refers to them.

    They are keys of a dict, names of a functional Keras model, or `output_0` and so on. None has a
    place, but neither loss nor target. A single output is logged without its name.
    """

    def __init__(self, outputs: Any, declared: Sequence[str] | None = None) -> None:
        leaves = jax.tree_util.tree_leaves_with_path(outputs, is_leaf=_is_none)
        paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
        # JAX sorts the keys of a dict; a Keras model may declare another order.
        is_dict = isinstance(outputs, Mapping) and set(paths) == set(outputs)
        given = list(declared or ()) if len(declared or ()) == len(leaves) else []
        if is_dict or hasattr(outputs, "_fields"):
            keys = given if set(given) == set(paths) else paths
        elif given:
            keys = given
        else:
            keys = [f"output_{path}" if path.isdigit() else path or "output" for path in paths]
        self.keys = tuple(keys)
        places = list(range(len(leaves)))
        self._order = [paths.index(key) for key in keys] if is_dict else places
        self._is_there = [leaves[index][1] is not None for index in self._order]
        is_single = sum(self._is_there) == 1
        self.names = tuple("" if is_single else key for key in keys)

    @property
    def is_single(self) -> bool:
        """Whether there is one output."""
        return sum(self._is_there) == 1

    def outputs(self, tree: Any) -> list[Any]:
        """Returns the part of each output; the tree has the structure of the outputs."""
        leaves = jax.tree.leaves(tree, is_leaf=_is_none)
        return [leaves[index] for index in self._order]

    def data(self, tree: Any, needed: Sequence[bool], what: str) -> list[Any]:
        """Returns the part of each output in targets or weights, None where there is none.

        There are parts by name, or in order for each output, or for each that needs one.
        """
        if isinstance(tree, Mapping) and set(tree) <= set(self.keys):
            return [tree.get(key) for key in self.keys]
        leaves = jax.tree.leaves(tree, is_leaf=_is_none)
        if len(leaves) == len(self.keys):
            return [leaves[index] for index in self._order]
        wanted = [index for index, is_needed in enumerate(needed) if is_needed]
        if len(leaves) == len(wanted):
            found: list[Any] = [None] * len(self.keys)
            for index, leaf in zip(wanted, leaves, strict=True):
                found[index] = leaf
            return found
        given = f"a dict of {sorted(tree)}" if isinstance(tree, Mapping) else f"{len(leaves)}"
        raise ValueError(
            f"The model has {len(self.keys)} output(s) ({', '.join(self.keys)}), of which "
            f"{len(wanted)} have a loss or metric, but the data has {given} {what}(s). Pass one "
            f"for each output in order, one for each of these, or a dict by name."
        )

    def arguments(self, value: Any, what: str, *, many: bool = False) -> list[Any]:
        """Returns what an argument of `compile` says of each output.

        One value serves all outputs; others go by position, name or the structure of the outputs.
        """
        if self.is_single and many:
            given = jax.tree.leaves(value)
            return [given if is_there else None for is_there in self._is_there]
        if isinstance(value, Mapping):
            if unknown := set(value) - set(self.keys):
                raise ValueError(
                    f"{what} names the output(s) {sorted(unknown)}; the model has "
                    f"{list(self.keys)}."
                )
            return [value.get(key) for key in self.keys]
        is_list = isinstance(value, (tuple, list))
        if is_list and len(value) == len(self.keys):
            return list(value)
        if is_list and self.is_single:
            return [value if is_there else None for is_there in self._is_there]
        nested = jax.tree.leaves(value, is_leaf=_is_none)
        if is_list and len(nested) == len(self.keys):
            return [nested[index] for index in self._order]
        if is_list and not (many and not any(isinstance(item, (tuple, list)) for item in value)):
            raise ValueError(
                f"{what} has {len(value)} entries for {len(self.keys)} output(s); give one for "
                "each, or a dict by name."
            )
        return [value if is_there else None for is_there in self._is_there]


def make_output_specs(
    layout: Layout, index: int, arguments: Sequence[Any], true: Any, pred: Any
) -> list[OutputSpec]:
    """Returns what is asked of an output, an entry for each of several losses, which add up."""
    loss, weight, *given = arguments
    if jax.tree.leaves((loss, given)) and true is None:
        raise ValueError(
            f"The output {layout.keys[index]!r} has a loss or a metric, but the data has no target "
            "for it. Pass one, or None as its loss."
        )
    resolved = [losses.get(item) for item in jax.tree.leaves(loss)] or [None]
    weights = list(weight) if isinstance(weight, (tuple, list)) else [weight] * len(resolved)

    def resolve(items: Any) -> tuple[Metric, ...]:
        return tuple(
            metrics.get(item, np.shape(true), np.shape(pred), loss=resolved[0])
            for item in jax.tree.leaves(items)
        )

    plain, weighted = map(resolve, given)
    specs = []
    for number, (part, factor) in enumerate(zip(resolved, weights, strict=True)):
        of_first = (plain, weighted) if number == 0 else ((), ())
        factor = 1.0 if factor is None else float(factor)
        name = layout.names[index]
        specs.append(OutputSpec(index, name, part, factor, *of_first, np.shape(pred)))
    return specs


def _is_none(value: Any) -> bool:
    return value is None


def log_names(specs: Sequence[OutputSpec]) -> list[list[str]]:
    """Returns the names of each output's metrics in the logs, each once, as Keras makes them.

    Later ones of the same name get a number, or first, if weighted, the prefix `weighted_`.
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
