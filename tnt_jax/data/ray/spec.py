"""The description of a Ray dataset to train on, and which objects are Ray datasets.

Their type alone tells: Ray is not imported, and neither is JAX.

train = RayData(ray.data.read_parquet(path).map(decode), batch_size=256, targets="label")
model.fit(train, epochs=90)
"""

from dataclasses import dataclass
from typing import Any

from tnt_jax.data.elements import is_of_library
from tnt_jax.data.tables.columns import Names


def is_ray_dataset(x: Any) -> bool:
    """Returns whether `x` is a `ray.data.Dataset`."""
    return is_of_library(x, "ray.data", "Dataset")


def is_ray_iterator(x: Any) -> bool:
    """Returns whether `x` is a `ray.data.DataIterator`."""
    return is_of_library(x, "ray.data", "DataIterator")


def is_ray_shard(x: Any) -> bool:
    """Returns whether `x` is one of the iterators among which a dataset was split."""
    return is_ray_iterator(x) and hasattr(x, "world_size")


def is_function_of_epoch(x: Any) -> bool:
    """Returns whether `x` is a function that returns the dataset of an epoch."""
    return callable(x) and not (isinstance(x, type) or is_ray_dataset(x) or is_ray_iterator(x))


@dataclass(frozen=True)
class RayData:
    """A Ray dataset and the options for training on it.

    Attributes:
        dataset: A `ray.data.Dataset`; a function that returns one for each epoch, counted from 0,
            such as `lambda epoch: dataset.random_shuffle(seed=epoch)`; or a `DataIterator`.
        batch_size: Rows of the global batch; None to derive it from `tnt_micro_batch_size`.
        inputs: As in `tnt_jax.data.columns`.
        targets: As in `tnt_jax.data.columns`.
        sample_weight: As in `tnt_jax.data.columns`.
        drop_remainder: Whether an incomplete last batch is dropped.

    Raises:
        TypeError: If `dataset` is none of these.
    """

    dataset: Any
    batch_size: int | None = None
    inputs: Names | None = None
    targets: Names | None = None
    sample_weight: str | None = None
    drop_remainder: bool = False

    def __post_init__(self) -> None:
        x = self.dataset
        if not (is_ray_dataset(x) or is_ray_iterator(x) or is_function_of_epoch(x)):
            raise TypeError(
                "RayData takes a ray.data.Dataset, a function from the epoch to one, or a "
                f"ray.data.DataIterator, but got {type(x).__module__}.{type(x).__qualname__}."
            )
