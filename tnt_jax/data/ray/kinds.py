"""Which objects are Ray datasets, by their type alone: Ray is not imported, and neither is JAX."""

from typing import Any


def is_ray_dataset(x: Any) -> bool:
    """Returns whether `x` is a `ray.data.Dataset`."""
    return _is_of_ray(x, "Dataset")


def is_ray_iterator(x: Any) -> bool:
    """Returns whether `x` is a `ray.data.DataIterator`."""
    return _is_of_ray(x, "DataIterator")


def is_ray_shard(x: Any) -> bool:
    """Returns whether `x` is one of the iterators among which a dataset was split."""
    return is_ray_iterator(x) and hasattr(x, "world_size")


def is_function_of_epoch(x: Any) -> bool:
    """Returns whether `x` is a function that returns the dataset of an epoch."""
    return callable(x) and not (isinstance(x, type) or is_ray_dataset(x) or is_ray_iterator(x))


def _is_of_ray(x: Any, name: str) -> bool:
    return any(
        cls.__name__ == name and cls.__module__.startswith("ray.data.") for cls in type(x).__mro__
    )
