"""The data of calls: their arguments, the batches of steps, and which inputs a model takes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax.adapters.base import CallStyle
from tnt_jax.data.arguments import is_arrays
from tnt_jax.data.elements import unpack
from tnt_jax.data.sources import HostBatch, Source, common_length
from tnt_jax.data.streams import EpochStream
from tnt_jax.keras_compat.keras_objects import is_keras
from tnt_jax.train.contracts import Batch

Weighting = Callable[[Any, Any], Any]
# Returns the inputs of a step.
Unpack = Callable[[HostBatch], Batch]
# Usual keys of targets in datasets of dicts.
_TARGETS = ("y", "label", "labels", "target", "targets")


def to_batch(item: HostBatch, weighting: Weighting | None = None) -> Batch:
    """Returns inputs, targets, weights and mask of this process's rows, still on the host."""
    inputs, targets, weight = unpack(item.data)
    if weighting is not None:
        weight = weighting(targets, weight)
    return Batch(inputs, targets, weight, item.mask)


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


def kinds(tree: Any) -> Any:
    """Returns what a step is traced for: the structure of a batch, row shapes and dtypes."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((np.shape(leaf)[1:], str(jnp.result_type(leaf))) for leaf in leaves)


def shapes(tree: Any) -> str:
    """Describes the shapes of a batch; the number of rows is written as "rows"."""
    texts = [
        f"[{', '.join(['rows', *map(str, np.shape(leaf)[1:])])}]" for leaf in jax.tree.leaves(tree)
    ]
    text = str(jax.tree.unflatten(jax.tree.structure(tree), texts))
    return text.replace("'[", "[").replace("]'", "]")


def input_problem(module: Any, inputs: Any) -> str | None:
    """Returns what is wrong with the number of inputs, or None if the signature does not tell."""
    if isinstance(inputs, Mapping):
        return None
    if is_keras(module):
        # The call of models that are neither functional nor Sequential accepts any number.
        tensors = getattr(module, "inputs", None) if module.built else None
        names = tuple(x.name for x in tensors) if tensors else None
        num_given = len(jax.tree.leaves(inputs))
    else:
        num_given = len(inputs) if isinstance(inputs, (tuple, list)) else 1
        style = CallStyle.of(module.__call__)
        names = style.positional
        most = num_given if style.is_variadic else len(names)
        if not style.unpack or style.num_required <= num_given <= most:
            return None
        if num_given < style.num_required:
            names = names[: style.num_required]
    if names is None or num_given == len(names):
        return None
    example = f"(({', '.join(names)}), targets)" if len(names) > 1 else "(inputs, targets)"
    return (
        f"{type(module).__name__} takes {len(names)} input(s) ({', '.join(names)}), but the data "
        f"gives {num_given}: {describe(inputs)}. Let each element be {example}; with arrays, pass "
        "the targets as y."
    )


def signature_tells(module: Any, inputs: Any) -> bool:
    """Returns whether the signature takes such inputs; a tuple, say, may be one argument."""
    if not isinstance(inputs, (tuple, list, Mapping)) or is_keras(module):
        return True
    style = CallStyle.of(module.__call__)
    if isinstance(inputs, Mapping):
        return bool(inputs) and set(style.positional[: style.num_required]) <= set(inputs) <= set(
            style.names
        )
    return style.unpack and len(inputs) == style.num_required


def describe(inputs: Any) -> str:
    """Describes the shapes of a batch's inputs; only the first few if there are many."""
    leaves = jax.tree_util.tree_leaves_with_path(inputs)
    shown = [
        f"{jax.tree_util.keystr(path)} {x.dtype}{list(np.shape(x))}".strip()
        for path, x in leaves[:6]
    ]
    return ", ".join([*shown, "..."] if len(leaves) > len(shown) else shown)


def unusable_inputs(module: Any, inputs: Any, error: Exception) -> str:
    """Returns the error text for a Flax module that fails on a tuple, list or dict of inputs."""
    names = ", ".join(CallStyle.of(module.__call__).positional) or "*args"
    reason = next(iter(str(error).strip().splitlines()), "")
    return (
        f"{type(module).__name__} takes ({names}) and cannot use the {type(inputs).__name__} of "
        f"{len(inputs)} that the data gives as inputs: {describe(inputs)}. It ends in "
        f"{type(error).__name__}: {reason}\n"
        "Let each element be (inputs, targets), with the inputs as the module takes them; a "
        "dataset of dicts needs a map such as lambda element: (element['image'], element['label'])."
    )


def class_weighting(class_weight: Mapping[int, float] | None) -> Weighting | None:
    """Returns the function that applies class weights to sample weights; None without them."""
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
            labels = targets[..., 0] if targets.shape[-1] == 1 else np.argmax(targets, axis=-1)
        labels = np.round(np.asarray(labels)).astype(np.int64)
        is_known = (labels >= 0) & (labels < len(table))
        weights = np.where(is_known, table[np.where(is_known, labels, 0)], np.float32(1))
        # Reversed, because one may have fewer dimensions: their leading ones are alike.
        return weights if weight is None else (weights.T * np.transpose(weight)).T

    return weigh


@dataclass(frozen=True)
class DataArguments:
    """The arguments of `fit`, `evaluate` and `predict` that describe the data."""

    x: Any
    y: Any = None
    sample_weight: Any = None
    batch_size: int | None = None
    micro_batch_size: int | Literal["auto"] | None = None
    shuffle: bool = False
    distribute: bool = True
    predicts: bool = False  # Targets and weights are ignored.
    is_inputs: bool = False  # `x` has no targets in it, even if it is a tuple or list.

    def __post_init__(self) -> None:
        """Raises a ValueError if the rows of a rank are another word than "auto"."""
        if isinstance(self.micro_batch_size, str) and not self.fits_memory:
            raise ValueError(
                "tnt_micro_batch_size must be a number of rows or 'auto', but is "
                f"{self.micro_batch_size!r}."
            )

    @property
    def rows_per_rank(self) -> int | None:
        """Rows of one rank, if they decide the global batch."""
        return None if self.micro_batch_size == "auto" else self.micro_batch_size

    @property
    def fits_memory(self) -> bool:
        """Whether as many rows are computed at once as fit the memory of a device."""
        return self.micro_batch_size == "auto"


@dataclass(frozen=True)
class FitArguments:
    """The arguments of `fit` except training data and callbacks; see `Model.fit`."""

    class_weight: Mapping[int, float] | None
    initial_epoch: int
    epochs: int
    steps_per_epoch: int | None
    validation_split: float
    validation_data: Any
    validation_steps: int | None
    validation_batch_size: int | None
    validation_micro_batch_size: int | None
    validation_freq: int | list[int]
    distribute_validation: bool
    checkpoint_directory: Path | None
    ignored_changes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises a TypeError if a number is something else, a ValueError if it is too small."""
        names = ["epochs", "initial_epoch", "steps_per_epoch", "validation_steps"]
        for name in (*names, "tnt_validation_micro_batch_size"):
            value = getattr(self, name.removeprefix("tnt_"))
            if value is not None and not isinstance(value, (int, np.integer)):
                raise TypeError(f"{name} must be a whole number, but is {value!r}.")
        freq = self.validation_freq
        if isinstance(freq, (int, np.integer)) and freq < 1:
            raise ValueError(
                f"validation_freq must be 1 or more, or a list of epochs, but is {freq}."
            )


@dataclass(frozen=True)
class Plan:
    """The plan of the loop of epochs."""

    stream: EpochStream
    first: HostBatch
    unpack: Unpack
    validation: Source | None
    arguments: FitArguments

    def validates_after(self, epoch: int) -> bool:
        """Returns whether validation follows epoch number `epoch`, from 0."""
        freq = self.arguments.validation_freq
        is_due = (
            (epoch + 1) % freq == 0 if isinstance(freq, (int, np.integer)) else epoch + 1 in freq
        )
        return self.validation is not None and is_due


def carry_out_split(
    data: DataArguments, arguments: FitArguments
) -> tuple[DataArguments, FitArguments]:
    """Returns the arguments of `fit` with the last rows as validation data, as in Keras."""
    share = arguments.validation_split
    if not share or arguments.validation_data is not None:
        return data, arguments
    if not is_arrays(data.x):
        raise ValueError(
            f"validation_split needs arrays, but x is a {type(data.x).__name__}. Pass "
            "validation_data instead."
        )
    arrays = (data.x, data.y, data.sample_weight)
    num_examples = common_length(arrays)
    first = int(num_examples * (1 - share))
    if not 0 < share < 1 or first in (0, num_examples):
        raise ValueError(
            f"validation_split must leave examples on both sides, but {share} splits "
            f"{num_examples} examples into {first} and {num_examples - first}."
        )
    x, y, sample_weight = jax.tree.map(lambda array: array[:first], arrays)
    held_out = jax.tree.map(lambda array: array[first:], arrays)
    return (
        replace(data, x=x, y=y, sample_weight=sample_weight),
        replace(arguments, validation_data=held_out),
    )
