"""From the data arguments of `fit` and a host batch to what a step takes."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from tnt_jax.data.dispatch import is_arrays, unpack
from tnt_jax.data.sources import HostBatch, common_length
from tnt_jax.step import Batch

Weighting = Callable[[Any, Any], Any]


def to_batch(item: HostBatch, weighting: Weighting | None = None) -> Batch:
    """Returns inputs, targets, weights and mask of this process's rows, still on the host.

    Args:
        item: Host batch of `inputs`, `(inputs, targets)` or `(inputs, targets, weights)`.
        weighting: From targets and sample weights to the weights to use.
    """
    inputs, targets, weight = unpack(item.data)
    if weighting is not None:
        weight = weighting(targets, weight)
    return Batch(inputs, targets, weight, item.mask)


def class_weighting(class_weight: Mapping[int, float] | None) -> Weighting | None:
    """Returns how sample weights follow from targets when each class has a weight; None if classes have none.

    Args:
        class_weight: Weight of each class index; classes that are not named weigh 1.
    """
    if class_weight is None:
        return None
    if not isinstance(class_weight, Mapping) or not all(isinstance(label, int) and label >= 0 for label in class_weight):
        raise ValueError(
            f"class_weight must map class indices to weights, for instance {{0: 1.0, 1: 3.0}}, but is {class_weight!r}."
        )
    table = np.ones(max(class_weight, default=0) + 1, np.float32)
    table[list(class_weight)] = list(class_weight.values())

    def weigh(targets: Any, weight: Any) -> np.ndarray:
        if not hasattr(targets, "ndim"):
            raise ValueError("class_weight works for models with one output; pass sample weights instead.")
        labels = targets if targets.ndim == 1 else targets[:, 0] if targets.shape[1] == 1 else np.argmax(targets, axis=-1)
        labels = np.asarray(labels).astype(np.int64)
        weights = np.where(labels < len(table), table[np.minimum(labels, len(table) - 1)], np.float32(1))
        return weights if weight is None else weights * weight

    return weigh


def split_validation(x: Any, y: Any, sample_weight: Any, share: float) -> tuple[tuple[Any, Any, Any], tuple[Any, Any, Any]]:
    """Returns training and validation parts of arrays: the last rows validate, before any shuffle, as in Keras.

    Args:
        x: Inputs `[examples, ...]`.
        y: Targets `[examples, ...]`, or None.
        sample_weight: Weights `[examples]`, or None.
        share: Part of the rows that validate, between 0 and 1.

    Raises:
        ValueError: If `x` is not made of arrays, `share` is out of range, or one part would be empty.
    """
    if not is_arrays(x):
        raise ValueError(f"validation_split needs arrays, but x is a {type(x).__name__}. Pass validation_data instead.")
    arrays = (x, y, sample_weight)
    num_examples = common_length(arrays)
    first = int(num_examples * (1 - share))
    if not 0 < share < 1 or first in (0, num_examples):
        raise ValueError(
            f"validation_split must leave examples on both sides, but {share} splits {num_examples} examples "
            f"into {first} and {num_examples - first}."
        )

    def part(rows: slice) -> tuple[Any, Any, Any]:
        inputs, targets, weight = jax.tree.map(lambda array: array[rows], arrays)
        return inputs, targets, weight

    return part(slice(None, first)), part(slice(first, None))
