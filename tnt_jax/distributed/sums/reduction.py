"""Sums the gradients of all ranks inside a step: in buckets, in order, compressed, or by host.

All functions except those that plan run inside `shard_map` over the data axis. The defaults for
GPUs are those that the compiler modelled for H100s, and nobody has measured: `python -m benchmarks
--choose-defaults` measures them on the GPUs that it finds, and says what to write here.
benchmarks/README.md has the model's tables.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax import _jax
from tnt_jax.distributed.sums.fused_psum import flatten, psum, split_like
from tnt_jax.settings import Settings

# Up to this many ranks, sums are taken to stay within a host.
RANKS_OF_A_HOST = 8
# Size of a bucket of gradients within a host, and between hosts, where any sum takes long.
HOST_BUCKET_BYTES, CLUSTER_BUCKET_BYTES = 8 * 2**20, 100 * 2**20
# Whether a bucket is one array that waits for the bucket before.
IS_CHAINED = True
# Between hosts, up to this many ranks and from this many bytes of gradients on, the compiler's own
# grouping was modelled as faster: Transformer-big and -base, but not ResNet-50 with its 98 MiB.
MOST_RANKS_FOR_XLA, XLA_BYTES = 64, 200 * 2**20

_TRIED_KB = (1024, 4096, 8192, 25600, 102400)


def sum_in_bfloat16(
    values: jax.Array, axis_name: str = _jax.DATA_AXIS
) -> tuple[jax.Array, jax.Array]:
    """Returns the sum `[n]` over the ranks, each of which rounds a shard, and rounding errors."""
    num_ranks, rank = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)
    parts = _pad(values, num_ranks).reshape(num_ranks, -1)
    sent = parts.astype(jnp.bfloat16)
    received = _from_bits(jax.lax.all_to_all(_bits(sent), axis_name, 0, 0, tiled=True))
    own = jnp.sum(received.astype(jnp.float32), axis=0)
    rounded = own.astype(jnp.bfloat16)
    gathered = _from_bits(_jax.all_gather_invariant(_bits(rounded), axis_name))
    # Only this rank can correct the error of the shard that it rounded for all.
    rest = (parts - sent.astype(jnp.float32)).at[rank].add(own - rounded.astype(jnp.float32))
    return gathered[: values.size].astype(jnp.float32), rest.reshape(-1)[: values.size]


def sum_by_hosts(values: jax.Array, ranks_per_host: int) -> jax.Array:
    """Returns the sum `[n]` over the ranks: within hosts, then between them, then gathered."""
    num_ranks = jax.lax.axis_size(_jax.DATA_AXIS)
    ranks = np.arange(num_ranks).reshape(-1, ranks_per_host)  # A row for each host.
    part = _pad(values, num_ranks)
    for groups in (ranks.tolist(), ranks.T.tolist()):
        part = jax.lax.psum_scatter(part, _jax.DATA_AXIS, axis_index_groups=groups, tiled=True)
    # Rank (host, local) holds part `host` of part `local`.
    gathered = _jax.all_gather_invariant(part).reshape(*ranks.shape, -1)
    return jnp.swapaxes(gathered, 0, 1).reshape(-1)[: values.size]


def _pad(values: jax.Array, multiple: int) -> jax.Array:
    return jnp.pad(values, (0, -values.size % multiple))


def _bits(x: jax.Array) -> jax.Array:
    # Sent as integers: a CPU would widen bfloat16 to float32 and send that.
    return jax.lax.bitcast_convert_type(x, jnp.uint16)


def _from_bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.bfloat16)


_CPU_BUCKET_BYTES = 2 * 2**20  # Measured, see benchmarks/README.md.

Threshold = int | Literal["xla"]


@dataclass(frozen=True)
class Reduction:
    """How gradients are summed over the ranks.

    Attributes:
        threshold: Bytes from which a bucket is full; 0 gives each array a bucket of its own;
            `"xla"` leaves the grouping and the order to the compiler.
        chained: Whether a bucket is one array that waits for the previous bucket. This keeps the
            compiler from merging buckets and from sending first layers first, and costs a copy.
        compression: `"bfloat16"` sends 16 bits per 32-bit gradient and corrects the rounding in the
            next step; None sends gradients unchanged.
        ranks_per_host: Neighbouring ranks of a host that are summed before the hosts exchange.
        shard_optimizer_state: Whether each rank keeps and updates only its own shard of it.
        xla_bytes: Bytes of gradients from which the threshold is `"xla"`; None for never.
    """

    threshold: Threshold = 0
    chained: bool = False
    compression: Literal["bfloat16"] | None = None
    ranks_per_host: int = 1
    shard_optimizer_state: bool = False
    xla_bytes: int | None = None

    def resolve(self, nbytes: int) -> "Reduction":
        """Returns this reduction for a given number of bytes of gradients."""
        leaves_all = self.xla_bytes is not None and nbytes >= self.xla_bytes
        return self.left_to_compiler() if leaves_all else replace(self, xla_bytes=None)

    def left_to_compiler(self) -> "Reduction":
        """Returns this reduction with the threshold `"xla"`."""
        return replace(self, threshold="xla", chained=False, xla_bytes=None)

    @property
    def keeps_residual(self) -> bool:
        """Whether ranks keep the rounding errors of a step for the next one."""
        return self.compression is not None


def default_reduction(platform: str, num_ranks: int) -> Reduction:
    """Returns the fastest exact reduction for a kind of devices; for GPUs, as modelled."""
    if platform == "cpu":
        return Reduction(_CPU_BUCKET_BYTES)
    if num_ranks <= RANKS_OF_A_HOST:
        return Reduction(HOST_BUCKET_BYTES, chained=IS_CHAINED)
    xla_bytes = XLA_BYTES if num_ranks <= MOST_RANKS_FOR_XLA else None
    return Reduction(CLUSTER_BUCKET_BYTES, chained=IS_CHAINED, xla_bytes=xla_bytes)


def choose_reduction(
    platform: str,
    num_ranks: int,
    *,
    settings: Settings,
    threshold_kb: Threshold | None = None,
    **choices: Any,
) -> Reduction:
    """Returns the reduction that the user chose, or a ValueError that names invalid options.

    `threshold_kb` is in KiB, `"xla"`, or None for that of the environment or the platform;
    `choices` are other attributes of `Reduction`, which take the platform's default.
    """
    reduction = replace(default_reduction(platform, num_ranks), **choices)
    threshold_kb = settings.fusion_threshold_kb if threshold_kb is None else threshold_kb
    if threshold_kb == "xla":
        reduction = reduction.left_to_compiler()
    elif threshold_kb is not None:
        if isinstance(threshold_kb, (bool, str)) or threshold_kb < 0:
            raise ValueError(
                "fusion_threshold must be a number of KiB of at least 0, or 'xla', but is "
                f"{threshold_kb!r}."
            )
        reduction = replace(reduction, threshold=int(threshold_kb * 1024), xla_bytes=None)
    if reduction.compression not in (None, "bfloat16"):
        raise ValueError(
            f"gradient_compression must be 'bfloat16' or None, but is {reduction.compression!r}."
        )
    if reduction.ranks_per_host < 1 or num_ranks % reduction.ranks_per_host:
        raise ValueError(
            f"ranks_per_host ({reduction.ranks_per_host}) must be at least 1 and divide the number "
            f"of ranks ({num_ranks}); leave it at 1 where hosts differ in their number of devices."
        )
    special = {
        "gradient_compression": reduction.compression is not None,
        "ranks_per_host": reduction.ranks_per_host > 1,
        "shard_optimizer_state": reduction.shard_optimizer_state,
    }
    chosen = [name for name, is_chosen in special.items() if is_chosen]
    if chosen:
        reduction = replace(reduction, xla_bytes=None)
    if len(chosen) > 1:
        raise ValueError(
            f"{' and '.join(chosen)} exclude one another: each is a different way to sum "
            "gradients. Choose one."
        )
    if chosen and reduction.threshold == "xla":
        raise ValueError(
            f"{chosen[0]} works on buckets: pass fusion_threshold as a number of KiB, or leave it "
            "out."
        )
    return reduction


def list_thresholds(
    platform: str, num_ranks: int, nbytes: int
) -> list[tuple[Threshold, Reduction]]:
    """Returns the thresholds, in KiB, that make a difference for gradients of so many bytes."""
    # All thresholds above the whole ask for one bucket.
    sizes = [
        kb for before, kb in zip((0, *_TRIED_KB), _TRIED_KB, strict=False) if before * 1024 < nbytes
    ]
    choose = partial(choose_reduction, platform, num_ranks, settings=Settings())
    return [(kb, choose(threshold_kb=kb)) for kb in (0, *sizes, "xla")]


def plan_buckets(
    nbytes: Sequence[int], threshold: int, *, kinds: Sequence[Any] | None = None
) -> list[list[int]]:
    """Groups consecutive arrays, given their bytes, into buckets by Tarantella's greedy rule.

    A bucket takes further arrays as long as it holds fewer than `threshold` bytes; so a bucket can
    exceed the threshold by its last array, and no array is split. What has another of the `kinds`
    goes to another bucket, without ending this one. Returns the indices of each bucket, in the
    order of the last array of each.

    >>> plan_buckets([376, 68, 8, 324], threshold=40)
    [[0], [1], [2, 3]]
    """
    if threshold < 0:
        raise ValueError(
            f"The threshold of gradient buckets must be at least 0 bytes, but is {threshold}."
        )
    buckets: list[list[int]] = []
    filling: dict[Any, tuple[list[int], int]] = {}
    for index, bytes_ in enumerate(nbytes):
        kind = None if kinds is None else kinds[index]
        bucket, size = filling.get(kind, ([], threshold))
        if not bucket or size >= threshold:
            bucket, size = [], 0
            buckets.append(bucket)
        bucket.append(index)
        filling[kind] = bucket, size + bytes_
    return sorted(buckets, key=lambda bucket: bucket[-1])


def plan(leaves: Sequence[Any], threshold: Threshold) -> list[list[int]]:
    """Returns the buckets of arrays in order; with `"xla"` one, which the compiler divides."""
    if threshold == "xla":
        return [list(range(len(leaves)))] if leaves else []
    sizes = [x.size * x.dtype.itemsize for x in leaves]
    return plan_buckets(sizes, threshold, kinds=[x.dtype for x in leaves])


def sum_over_ranks(tree: Any, reduction: Reduction, *, order: Sequence[int] | None = None) -> Any:
    """Returns the sum of `tree` over the ranks, with 32-bit additions and without compression.

    `order` has the indices of the leaves in order of availability; by default, that of the tree.
    """
    reduction = reduction.resolve(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)))

    def total_of_bucket(arrays: list[jax.Array]) -> list[jax.Array]:
        if reduction.ranks_per_host > 1:
            return split_like(sum_by_hosts(flatten(arrays), reduction.ranks_per_host), arrays)
        if reduction.chained:
            return split_like(psum(flatten(arrays)), arrays)
        return psum(arrays, join_small=False if reduction.threshold == "xla" else None)

    return in_buckets(total_of_bucket, tree, reduction, order=order)


def sum_compressed(
    tree: Any, residual: Any, reduction: Reduction, *, order: Sequence[int]
) -> tuple[Any, Any]:
    """Returns the sum of `tree` over the ranks, sent in bfloat16, and this rank's residual.

    A rank sends its gradients plus its residual, rounded to 8 significant bits; the sum, made in
    float32, is rounded once more. Both errors go into the residual, so sums over many steps are off
    by the residuals alone, at most 2**-8 of the values of one step (error feedback: Seide et al.
    2014, Interspeech; Karimireddy et al. 2019, arXiv:1901.09847). Only float32 is compressed.
    """
    left: dict[int, jax.Array] = {}
    residuals = jax.tree.leaves(residual)

    def total_of_bucket(arrays: list[jax.Array], indices: list[int]) -> list[jax.Array]:
        kept = [residuals[index] for index in indices]
        if arrays[0].dtype != jnp.float32:
            left.update(zip(indices, kept, strict=True))
            return psum(arrays)
        total, rest = sum_in_bfloat16(flatten(arrays) + flatten(kept))
        left.update(zip(indices, split_like(rest, arrays), strict=True))
        return split_like(total, arrays)

    summed = in_buckets(total_of_bucket, tree, reduction, order=order, with_indices=True)
    return summed, jax.tree.unflatten(
        jax.tree.structure(residual), [left[index] for index in range(len(residuals))]
    )


def in_buckets(
    total_of_bucket: Callable,
    tree: Any,
    reduction: Reduction,
    *,
    order: Sequence[int] | None = None,
    with_indices: bool = False,
) -> Any:
    """Returns `tree` with the leaves of each bucket replaced by the result of `total_of_bucket`.

    That maps a list of arrays of one dtype, and with `with_indices` the indices of the leaves, to
    as many results. `order` is as in `sum_over_ranks`.
    """
    leaves, structure = jax.tree.flatten(tree)
    order = range(len(leaves)) if order is None else order
    results: dict[int, Any] = {}
    before = None
    for bucket in plan([leaves[index] for index in order], reduction.threshold):
        indices = [order[position] for position in bucket]
        arrays = [leaves[index] for index in indices]
        if reduction.chained and before is not None:
            arrays, _ = jax.lax.optimization_barrier((arrays, before))
        totals = total_of_bucket(arrays, indices) if with_indices else total_of_bucket(arrays)
        results.update(zip(indices, totals, strict=True))
        before = totals[-1]
    return jax.tree.unflatten(structure, [results[index] for index in range(len(leaves))])
