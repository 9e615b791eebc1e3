"""Turns the data arguments of `fit` and a host batch into the inputs of a step."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from tnt_jax.data.elements import unpack
from tnt_jax.data.kinds import is_arrays
from tnt_jax.data.sources import HostBatch, common_length
from tnt_jax.train.contracts import Batch

Weighting = Callable[[Any, Any], Any]
# Usual keys of targets in datasets of dicts.
_TARGETS = ("y", "label", "labels", "target", "targets")


def to_batch(item: HostBatch, weighting: Weighting | None = None) -> Batch:
    """Returns inputs, targets, weights and mask of this process's rows, still on the host.

    Args:
        item: Host batch of `inputs`, `(inputs, targets)` or `(inputs, targets, weights)`.
        weighting: Maps targets and sample weights to the weights to use.
    """
    inputs, targets, weight = unpack(item.data)
    if weighting is not None:
        weight = weighting(targets, weight)
    return Batch(inputs, targets, weight, item.mask)


def few_rows(arrays: Any, num_rows: int) -> Any:
    """Returns zeros `[num_rows, ...]` for a pytree of arrays `[examples, ...]`."""
    return jax.tree.map(
        lambda x: np.zeros((num_rows, *np.shape(x)[1:]), np.asarray(x[:1]).dtype), arrays
    )


def require_targets(batch: Batch) -> None:
    """Raises a ValueError, with a way out that fits the data, if a batch has no targets."""
    if batch.targets is not None:
        return
    if not isinstance(batch.inputs, Mapping):
        raise ValueError(
            "The data holds no targets, but the loss needs them: let each element be (inputs, "
            "targets), or pass y with arrays."
        )
    keys = list(batch.inputs)
    targets = next((key for key in keys if str(key).lower() in _TARGETS), keys[-1])
    rest = [key for key in keys if key != targets]
    inputs = (
        f"element[{rest[0]!r}]"
        if len(rest) == 1
        else "{" + ", ".join(f"{key!r}: element[{key!r}]" for key in rest) + "}"
    )
    raise ValueError(
        "The data holds no targets, but the loss needs them: a dict, here with the keys "
        f"{', '.join(map(repr, keys))}, counts as inputs alone. Let each element be (inputs, "
        f"targets), for instance with dataset.map(lambda element: ({inputs}, "
        f"element[{targets!r}])), or pass y with arrays."
    )


def class_weighting(class_weight: Mapping[int, float] | None) -> Weighting | None:
    """Returns the function that applies class weights to sample weights; None without them.

    Args:
        class_weight: Weight of each class index; other classes have the weight 1.
    """
    if class_weight is None:
        return None
    if not isinstance(class_weight, Mapping) or not all(
        isinstance(label, int) and label >= 0 for label in class_weight
    ):
        raise ValueError(
            "class_weight must map class indices to weights, for instance {0: 1.0, 1: 3.0}, but is "
            f"{class_weight!r}."
        )
    table = np.ones(max(class_weight, default=0) + 1, np.float32)
    table[list(class_weight)] = list(class_weight.values())

    def weigh(targets: Any, weight: Any) -> np.ndarray:
        if not hasattr(targets, "ndim"):
            raise ValueError(
                "class_weight works for models with one output; pass sample weights instead."
            )
        labels = targets
        if targets.ndim > 1:
            labels = targets[:, 0] if targets.shape[1] == 1 else np.argmax(targets, axis=-1)
        labels = np.asarray(labels).astype(np.int64)
        weights = np.where(
            labels < len(table), table[np.minimum(labels, len(table) - 1)], np.float32(1)
        )
        return weights if weight is None else weights * weight

    return weigh


def split_validation(
    x: Any, y: Any, sample_weight: Any, share: float
) -> tuple[tuple[Any, Any, Any], tuple[Any, Any, Any]]:
    """Returns training and validation parts of arrays.

    As in Keras, the last rows are for validation, before any shuffle.

    Args:
        x: Inputs `[examples, ...]`.
        y: Targets `[examples, ...]`, or None.
        sample_weight: Weights `[examples]`, or None.
        share: Fraction of the rows used for validation, between 0 and 1.

    Raises:
        ValueError: If `x` does not consist of arrays, `share` is out of range, or one part would be
            empty.
    """
    if not is_arrays(x):
        raise ValueError(
            f"validation_split needs arrays, but x is a {type(x).__name__}. Pass validation_data "
            "instead."
        )
    arrays = (x, y, sample_weight)
    num_examples = common_length(arrays)
    first = int(num_examples * (1 - share))
    if not 0 < share < 1 or first in (0, num_examples):
        raise ValueError(
            f"validation_split must leave examples on both sides, but {share} splits "
            f"{num_examples} examples into {first} and {num_examples - first}."
        )

    def part(rows: slice) -> tuple[Any, Any, Any]:
        inputs, targets, weight = jax.tree.map(lambda array: array[rows], arrays)
        return inputs, targets, weight

    return part(slice(None, first)), part(slice(first, None))
