"""Detects loaders of other libraries that give batches or read a shard of their own.

None of the libraries is imported.
"""

import sys
from typing import Any


def is_grain_map_dataset(x: Any) -> bool:
    """Returns whether `x` is a Grain `MapDataset`."""
    return any(
        cls.__module__.startswith("grain.") and cls.__name__ == "MapDataset"
        for cls in type(x).__mro__
    )


def gives_batches(dataset: Any) -> bool:
    """Returns whether the elements of a Grain `MapDataset` are batches.

    They are if one of the operations that make it is a batching operation.
    """
    stages = [dataset]
    while stages:
        stage = stages.pop()
        if type(stage).__name__.endswith("BatchMapDataset"):
            return True
        stages.extend(getattr(stage, "parents", ()))
    return False


def is_endless(dataset: Any) -> bool:
    """Returns whether a dataset's length says that it never ends, as in a repeated Grain one."""
    try:
        return len(dataset) >= sys.maxsize
    except (TypeError, OverflowError):
        return False


def num_shards(loader: Any) -> int:
    """Returns the number of shards of which a PyTorch or Grain `DataLoader` reads one.

    The result is 1 if it reads everything.
    """
    sampler = getattr(
        getattr(loader, "batch_sampler", None), "sampler", getattr(loader, "sampler", None)
    )
    # PyTorch's DistributedSampler; Grain's samplers and loaders.
    own = getattr(loader, "_sampler", None)
    counts = [
        getattr(sampler, "num_replicas", 1),
        *(
            getattr(getattr(part, "_shard_options", None), "shard_count", 1)
            for part in (loader, own)
        ),
    ]
    return max((count for count in counts if isinstance(count, int)), default=1)
