"""From whatever the user hands to `fit`, `evaluate` or `predict` to a `Source`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import numpy as np

from tnt_jax.data.layout import Place, resolve_batch_size
from tnt_jax.data.pydataset import PyDatasetSource, is_py_dataset
from tnt_jax.data.random_access import RandomAccess, RandomAccessSource
from tnt_jax.data.sources import ArraySource, IterableSource, Source, common_length
from tnt_jax.data.tfdata import TfData, tf_source
from tnt_jax.data.token_batches import TokenBatches, TokenBatchSource
from tnt_jax.log import logger

# Keras's default for arrays.
_DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True)
class Reading:
    """How the data is to be read.

    Attributes:
        place: This process's part of the data axis.
        batch_size: Global batch for arrays and other unbatched data, as the user gave it.
        micro_batch_size: `tnt_micro_batch_size`: rows of one rank.
        shuffle: Whether unordered data (arrays) gets a new order every epoch.
        seed: Seed of that order and of shuffles without a seed.
        distribute: Whether the data is the same on every process and is to be split; otherwise each process brings its own shard.
        reproducible: Whether a `tf.data` pipeline must give the same elements in every run.
    """

    place: Place
    batch_size: int | None = None
    micro_batch_size: int | None = None
    shuffle: bool = False
    seed: int = 42
    distribute: bool = True
    reproducible: bool = False


def as_source(x: Any, y: Any, sample_weight: Any, reading: Reading) -> Source:
    """Returns a source of global batches `(inputs, targets, weight)`.

    Args:
        x: Arrays (or a dict, tuple or list of arrays), a `tf.data.Dataset` (or a `TfData` of one), a random-access dataset of examples
            (or a `RandomAccess` of one), a Keras `PyDataset`, an iterable of batches, or a source.
        y: Targets for arrays; None otherwise.
        sample_weight: Weights for arrays; None otherwise.
        reading: How the data is to be read.

    Raises:
        ValueError: If the data is empty, its parts differ in length, sizes contradict one another, or `y` or `sample_weight` comes with
            data that holds its own.
        TypeError: If nothing can be read from `x`.
    """
    if x is None:
        raise ValueError("x is missing: pass arrays, a tf.data.Dataset, or an iterable of batches.")
    if reading.reproducible and not reading.distribute:
        _warn_of_own_shards()
    if is_arrays(x):
        return _array_source(x, y, sample_weight, reading)
    for name, value in (("y", y), ("sample_weight", sample_weight)):
        if value is not None:
            raise ValueError(
                f"{name} was given beside a {type(x).__name__}, which must hold it itself: let each element be "
                "(inputs, targets) or (inputs, targets, sample_weight)."
            )
    if isinstance(x, Source):
        return x
    if isinstance(x, RandomAccess) or _gives_examples(x):
        return _random_access_source(x, reading)
    if isinstance(x, TokenBatches):
        _check_distributed("Token batches", reading)
        return TokenBatchSource(x, reading.place)
    if is_py_dataset(x):
        return PyDatasetSource(
            x, reading.place, micro_batch_size=reading.micro_batch_size, shuffle=reading.shuffle, seed=reading.seed
        )
    if isinstance(x, TfData) or is_tf_dataset(x):
        return tf_source(x, reading)
    if isinstance(x, Iterable):
        return _iterable_source(x, reading)
    raise TypeError(
        f"x must be arrays, a tf.data.Dataset, an iterable of batches or a source, but is {type(x).__module__}.{type(x).__name__}."
    )


@cache
def _warn_of_own_shards() -> None:
    logger.warning(
        "With tnt_distribute_dataset=False each process brings its own shard, and training is reproducible only if the shards, put "
        "together, are the same global batches for every number of processes. Pass the whole dataset and leave the splitting to fit."
    )


def is_arrays(x: Any) -> bool:
    """Tells whether `x` is an array, or a dict, tuple or list of arrays, rather than a stream of batches.

    A list or tuple whose elements are tuples or dicts is a stream: each element is a batch.
    """
    if isinstance(x, Mapping):
        return bool(x) and all(is_arrays(value) for value in x.values())
    if isinstance(x, (tuple, list)):
        return bool(x) and all(
            isinstance(value, (int, float)) or (not isinstance(value, (tuple, Mapping)) and is_arrays(value)) for value in x
        )
    return isinstance(x, (np.ndarray, jax.Array)) or (hasattr(x, "__array__") and hasattr(x, "shape"))


def is_tf_dataset(x: Any) -> bool:
    """Tells whether `x` is a `tf.data.Dataset`, without importing TensorFlow."""
    return any(cls.__module__.startswith("tensorflow.") and cls.__name__ == "DatasetV2" for cls in type(x).__mro__)


def unpack(data: Any) -> tuple[Any, Any, Any]:
    """Returns inputs, targets and sample weights of an element: a tuple of up to three, or inputs alone, as in Keras."""
    if not isinstance(data, tuple):
        return data, None, None
    if len(data) > 3:
        raise ValueError(
            f"An element of the data must be inputs, (inputs, targets) or (inputs, targets, sample_weight), but is a tuple of {len(data)}. "
            "Put several inputs into a tuple or dict of their own."
        )
    inputs, targets, weight = (*data, None, None)[:3]
    return inputs, targets, weight


def _array_source(x: Any, y: Any, sample_weight: Any, reading: Reading) -> Source:
    arrays = (_as_arrays(x), _as_arrays(y), _as_arrays(sample_weight))
    num_examples = common_length(arrays)
    micro = reading.micro_batch_size
    default = None if micro is not None else max(_DEFAULT_BATCH_SIZE, reading.place.num_ranks)
    size = resolve_batch_size(
        reading.place,
        batch_size=reading.batch_size if reading.batch_size is not None else default,
        micro=micro,
        num_examples=num_examples,
    )
    if not reading.distribute:
        raise ValueError(
            "Arrays are split over all processes; tnt_distribute_dataset=False is for datasets that each process shards itself. "
            "Pass the same arrays on every process, or a dataset."
        )
    return ArraySource(arrays, global_batch_size=size, place=reading.place, shuffle=reading.shuffle, seed=reading.seed)


def _gives_examples(x: Any) -> bool:
    """Tells whether `x` gives single examples by number: a TFDS or Grain data source, a PyTorch map-style dataset, or their like."""
    has_items = hasattr(x, "__len__") and hasattr(x, "__getitem__")
    return has_items and not isinstance(x, (list, tuple, Mapping, str)) and not is_py_dataset(x) and not is_tf_dataset(x)


def _check_distributed(what: str, reading: Reading) -> None:
    if not reading.distribute:
        raise ValueError(
            f"{what} are split over all processes; tnt_distribute_dataset=False is for datasets that each process shards itself. "
            "Pass the same data on every process."
        )


def _random_access_source(x: Any, reading: Reading) -> Source:
    _check_distributed("Random-access datasets", reading)
    if not isinstance(x, RandomAccess):
        default = None if reading.micro_batch_size is not None else max(_DEFAULT_BATCH_SIZE, reading.place.num_ranks)
        x = RandomAccess(x, batch_size=default, shuffle=reading.shuffle, seed=reading.seed)
    if reading.batch_size is not None:
        x = replace(x, batch_size=reading.batch_size)
    return RandomAccessSource(x, reading.place, micro_batch_size=reading.micro_batch_size)


def _iterable_source(x: Iterable[Any], reading: Reading) -> Source:
    if reading.batch_size is not None:
        raise ValueError(
            f"batch_size={reading.batch_size} was given beside a {type(x).__name__}, whose elements are batches already. Leave it unset."
        )
    if not reading.distribute:
        from tnt_jax.data.shards import ShardSource

        return ShardSource(x, place=reading.place, micro_batch_size=reading.micro_batch_size)
    return IterableSource(x, place=reading.place, micro_batch_size=reading.micro_batch_size)


def _as_arrays(x: Any) -> Any:
    """Turns lists of numbers into arrays and leaves other structure as it is."""
    if isinstance(x, (tuple, list)) and x and all(isinstance(value, (int, float)) for value in x):
        return np.asarray(x)
    if isinstance(x, Mapping):
        return {key: _as_arrays(value) for key, value in x.items()}
    if isinstance(x, (tuple, list)):
        return type(x)(_as_arrays(value) for value in x)
    return x
