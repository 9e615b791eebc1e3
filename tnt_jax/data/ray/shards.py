"""Parts of `streaming_split`: each process reads the rows that Ray gives it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tnt_jax.data.agreement import CoordinationBoard
from tnt_jax.data.layout import RankSlice, resolve_batch_size
from tnt_jax.data.ray.spec import RayData, is_ray_shard
from tnt_jax.data.shards import ShardSource
from tnt_jax.data.sources import warn_once
from tnt_jax.data.tables.columns import ColumnRoles, dense
from tnt_jax.on_ray.worker import role

_UNORDERED = (
    "Ray deals the blocks of a dataset out to the processes in the order in which they are ready, "
    "which is another one in every run: set ray.data.DataContext.get_current().execution_options."
    "preserve_order = True before the dataset is made, or pass the whole dataset as "
    "tnt_jax.data.RayData"
)


def shard_source(
    spec: RayData,
    rank_slice: RankSlice,
    num_processes: int,
    *,
    micro_batch_size: int | None = None,
    board: CoordinationBoard | None = None,
) -> ShardSource:
    """Returns the source of the rows that Ray gives this process."""
    shard = spec.dataset
    count = shard.world_size() if hasattr(shard, "world_size") else num_processes
    if count != num_processes:
        raise ValueError(
            f"The dataset was split for {count} processes, but the job has {num_processes}. Split "
            f"it with streaming_split({num_processes}), or pass the whole dataset to "
            "tnt_jax.data.RayData."
        )
    if is_ray_shard(shard) and role() == "worker":
        warn_once(
            "Ray Train gives each worker the same number of rows, and leaves out what remains of "
            "an epoch, fewer rows than there are workers. To train on every row, in the same "
            "global batches on any number of workers, pass "
            "dataset_config=ray.train.DataConfig(datasets_to_split=[]) to the trainer."
        )
    if spec.drop_remainder:
        raise ValueError(
            "drop_remainder=True is for a whole dataset: the shards of processes end in different "
            "steps. Pass the whole dataset to tnt_jax.data.RayData, or leave it out."
        )
    size = resolve_batch_size(rank_slice, batch_size=spec.batch_size, micro=micro_batch_size)
    if size % rank_slice.num_ranks:
        raise ValueError(
            f"Each rank reads as many rows of its shard in a step as any other, but the batch size "
            f"{size} is no multiple of the {rank_slice.num_ranks} ranks. Use such a multiple, or "
            "pass the whole dataset to tnt_jax.data.RayData, which splits every batch."
        )
    micro = size // rank_slice.num_ranks
    roles = ColumnRoles(spec.inputs, spec.targets, spec.sample_weight)
    rows = _Batches(shard, micro * rank_slice.local_ranks, roles)
    source = ShardSource(rows, rank_slice=rank_slice, micro_batch_size=micro, board=board)
    context = shard.get_context() if hasattr(shard, "get_context") else shard.context
    if not context.execution_options.preserve_order:
        source.row_order = replace(source.row_order, unrepeatable=_UNORDERED)
    return source


class _Batches:
    """The batches of a shard, each pass anew."""

    def __init__(self, shard: Any, num_rows: int, roles: ColumnRoles) -> None:
        self._shard = shard
        self._num_rows = num_rows
        self._roles = roles

    def __iter__(self) -> Iterator[Any]:
        batches = self._shard.iter_batches(
            batch_size=self._num_rows, batch_format="numpy", prefetch_batches=2
        )
        for batch in batches:
            yield self._roles.element(dense(batch))
