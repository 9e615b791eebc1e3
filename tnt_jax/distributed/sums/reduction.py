"""Sums over the ranks inside a step: of any values, and of gradients as they become available.

All functions except those that plan run inside `shard_map` over the data axis. Gradients are summed
in buckets, in the order in which backpropagation finishes them, compressed, or by host. That order
is read from the traced program: that of the leaves of a tree says little about it. Dict keys are
sorted by name (`Block_10` before `Block_2`), a decoder may come before the encoder that it needs,
and the gradient of a shared matrix is finished only with its last use. With them travel the
averages of the state that a model updates itself.

The defaults for GPUs are those that the compiler modelled for H100s, and nobody has measured:
`python -m benchmarks --choose-defaults` measures them on the GPUs that it finds, and says what to
write here. benchmarks/README.md has the model's tables.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax import _jax
from tnt_jax.distributed.shared_sums import joining as shared_sums
from tnt_jax.settings import Settings

# Below this size, between CPU processes, a copy into a joint array costs less than a separate sum;
# see benchmarks/README.md.
_SMALL_BYTES = 2**20


def psum(tree: Any, *, join_small: bool | None = None, axis_name: str | None = None) -> Any:
    """Returns the sum over the ranks, or an axis, inside `shard_map`.

    By `join_small`, arrays below 1 MiB with the same dtype are summed as one; that is the default
    between CPU processes, where each sum waits up to milliseconds for another process's thread.
    """
    axes = _jax.rank_axes() if axis_name is None else axis_name
    # XLA's CPU compiler would keep the collective of one rank, which copies all gradients. With
    # stages, `shard_map` must see that values are the same on all ranks.
    if jax.lax.axis_size(axes) == 1 and _jax.STAGE_AXIS not in _jax.mapped_axes():
        return tree
    if not (_has_slow_starts() if join_small is None else join_small):
        return jax.lax.psum(tree, axes)
    leaves, structure = jax.tree.flatten(tree)
    # Joined with parameters of stages, those of all stages would seem to differ between stages.
    on_stages = [_jax.STAGE_AXIS in _jax.varying_axes(x) for x in leaves]
    places = groups_of_small(leaves, _SMALL_BYTES, kinds=on_stages)
    groups = [[leaves[index] for index in indices] for indices in places]
    joined = [group[0] if len(group) == 1 else flatten(group) for group in groups]
    results: dict[int, Any] = {}
    for indices, group, total in zip(places, groups, jax.lax.psum(joined, axes), strict=True):
        parts = [total] if len(group) == 1 else split_like(total, group)
        results.update(zip(indices, parts, strict=True))
    return structure.unflatten([results[index] for index in range(len(leaves))])


def groups_of_small(
    arrays: Sequence[Any], limit: int, *, kinds: Sequence[Any] | None = None
) -> list[list[int]]:
    """Returns the positions of arrays below `limit` bytes, grouped by dtype and by their `kinds`.

    Larger arrays and plain numbers are groups of their own.
    """
    groups: dict[Any, list[int]] = {}
    for index, x in enumerate(arrays):
        is_small = hasattr(x, "dtype") and x.size * x.dtype.itemsize < limit
        kind = None if kinds is None else kinds[index]
        groups.setdefault((x.dtype, kind) if is_small else index, []).append(index)
    return list(groups.values())


def flatten(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns arrays of one dtype as one array `[total size]`."""
    parts = [x.reshape(-1) for x in arrays]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def split_like(flat: jax.Array, arrays: Sequence[Any]) -> list[jax.Array]:
    """Returns the pieces of `flat`, `[total size]`, in the shapes of `arrays`."""
    ends = accumulate(x.size for x in arrays)
    return [flat[end - x.size : end].reshape(x.shape) for x, end in zip(arrays, ends, strict=True)]


def _has_slow_starts() -> bool:
    is_cpu = jax.default_backend() == "cpu"
    return jax.process_count() > 1 and is_cpu and not shared_sums.are_open()


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


# Where an output of a traced program is computed: the position of the equation, then the position
# within that equation, and so on.
_Position = tuple[int, ...]


def trace_grads(
    function: Callable[[Any], tuple[Any, Any]],
    params: Any,
    *,
    rewrite: Callable[[Any], Any] | None = None,
) -> tuple[Any, Any, list[int]]:
    """Returns the pair `function(params)`, gradients second, and the order of their leaves.

    The order has the indices of the leaves as they are finished, earliest first. The function is
    traced once; `rewrite` maps that program to the one to run, of the same arguments and results.
    """
    traced, shapes = jax.make_jaxpr(function, return_shape=True)(params)
    if rewrite is not None:
        traced = rewrite(traced)
    outputs = _jax.jaxpr_as_fun(traced)(*jax.tree.leaves(params))
    others, grads = jax.tree.unflatten(jax.tree.structure(shapes), outputs)
    positions = output_positions(traced.jaxpr)[len(jax.tree.leaves(others)) :]
    return others, grads, sorted(range(len(positions)), key=lambda index: positions[index])


def prepend_to_order(first: Any, order: Sequence[int]) -> list[int]:
    """Returns the order of the leaves of `(first, tree)`, given that of `tree`."""
    num_first = len(jax.tree.leaves(first))
    return [*range(num_first), *(num_first + index for index in order)]


def output_positions(jaxpr: Any) -> list[_Position]:
    """Returns where in a jaxpr each output is computed; positions compare like times."""
    made: dict[Any, _Position] = {}
    for index, equation in enumerate(jaxpr.eqns):
        places = zip(equation.outvars, _positions_inside(equation), strict=True)
        made |= {variable: (index, *place) for variable, place in places}
    # An output that no equation computes is available from the start; a literal cannot be looked
    # up.
    return [
        () if isinstance(variable, _jax.Literal) else made.get(variable, ())
        for variable in jaxpr.outvars
    ]


def _positions_inside(equation: Any) -> Sequence[_Position]:
    """Returns the positions, inside a called program, of an equation's outputs."""
    called = [
        inner
        for inner in _jax.jaxprs_in_params(equation.params)
        if len(inner.outvars) == len(equation.outvars)
    ]
    # A loop finishes all its outputs with its last iteration, and a condition runs one branch only.
    is_call = len(called) == 1 and equation.primitive.name not in ("scan", "while")
    return output_positions(called[0]) if is_call else [()] * len(equation.outvars)


class Summed(NamedTuple):
    """The sums of an exchange, the same on all ranks; and what compression left out on this one.

    Attributes:
        first: Sums of the values that are ready before any gradient.
        others: Sums of the other values that a step exchanges.
        residual: Arrays `[1, ...]`; None without compression.
    """

    grads: Any
    first: Any
    others: Any
    residual: Any


def sum_gradients(
    grads: Any,
    reduction: Reduction,
    *,
    order: Sequence[int],
    first: Any = (),
    others: Any = (),
    residual: Any = None,
) -> Summed:
    """Returns the sums over the ranks of the values that a step exchanges, inside `shard_map`.

    `order` is that of `trace_grads`; `first` is ready before any gradient, such as the loss;
    `others` are summed in any bucket; `residual` is that of the step before.
    """
    if residual is not None:
        own = jax.tree.map(lambda x: x[0], residual)
        first, others = psum(first), psum(others)
        grads, own = sum_compressed(grads, own, reduction, order=order)
        return Summed(grads, first, others, jax.tree.map(lambda x: x[None], own))
    first, grads = sum_over_ranks((first, grads), reduction, order=prepend_to_order(first, order))
    return Summed(grads, first, psum(others), None)


def adasum(tree: Any, axis_name: str) -> Any:
    """Returns the Adasum of each array over the ranks of an axis, the same bits on every rank.

    Two gradients give `(1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b` (Maleki et al. 2020,
    arXiv:2006.02924, section 3): their sum where they are orthogonal, their mean where they are
    parallel. More are combined in a binary tree, neighbours first (section 3.4). As in the paper's
    and Horovod's implementation, each array is combined by itself. Products are summed in float32.
    """
    num_ranks = jax.lax.axis_size(axis_name)
    if num_ranks & (num_ranks - 1):
        raise ValueError(
            f"Adasum combines ranks in pairs and needs a power of two of them, but {axis_name!r} "
            f'has {num_ranks}. Use op="average", or fewer ranks.'
        )
    rank = jax.lax.axis_index(axis_name)
    distance = 1
    while distance < num_ranks:
        pairs = [(source, source ^ distance) for source in range(num_ranks)]
        combined = partial(_combined, is_lower=rank & distance == 0)
        tree = jax.tree.map(combined, tree, jax.lax.ppermute(tree, axis_name, pairs))
        distance *= 2
    return _same_everywhere(tree, axis_name)


def _combined(own: jax.Array, other: jax.Array, is_lower: jax.Array) -> jax.Array:
    # Both partners compute the same sum in the same order.
    a = jnp.where(is_lower, own, other).astype(jnp.float32)
    b = jnp.where(is_lower, other, own).astype(jnp.float32)
    product, a_square, b_square = jnp.vdot(a, b), jnp.vdot(a, a), jnp.vdot(b, b)
    a_share, b_share = (
        1 - jnp.where(square > 0, product / (2 * jnp.where(square > 0, square, 1)), 0)
        for square in (a_square, b_square)
    )
    return (a_share * a + b_share * b).astype(own.dtype)


def _same_everywhere(tree: Any, axis_name: str) -> Any:
    """Returns arrays that are equal on all ranks marked as such, where arrays are marked."""
    if not _jax.tracks_varying(axis_name):
        return tree
    is_first = jax.lax.axis_index(axis_name) == 0
    return jax.tree.map(
        lambda x: jax.lax.psum(jnp.where(is_first, x, jnp.zeros_like(x)), axis_name), tree
    )


class StateAverage:
    """The average over the ranks of the model state that differs between them, in two parts.

    `share` is this rank's part of the global batch's real rows; None for equal parts. `summands` is
    what this rank adds to the averages; pass their sums over the ranks to `result`.
    """

    def __init__(self, tree: Any, share: jax.Array | None) -> None:
        self._tree, self._share = tree, share
        self.summands = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if _jax.is_varying(leaf):
                check_can_be_averaged(path, leaf)
                self.summands.append(leaf if share is None else leaf * share.astype(leaf.dtype))

    def result(self, totals: list[jax.Array]) -> Any:
        """Returns the model state, averaged from the sums of `summands` over the ranks."""
        num_ranks = jax.lax.axis_size(_jax.rank_axes())
        remaining = iter(totals)

        def average(leaf: jax.Array) -> jax.Array:
            if not _jax.is_varying(leaf):
                return leaf
            return next(remaining) / num_ranks if self._share is None else next(remaining)

        return jax.tree.map(average, self._tree)


def check_can_be_averaged(path: Any, leaf: jax.Array) -> None:
    """Raises a TypeError if a leaf of model state that differs between ranks is not floating."""
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        raise TypeError(
            f"Model state {jax.tree_util.keystr(path)} ({leaf.dtype}) differs between ranks and "
            "cannot be averaged. Only floating state may depend on the batch; make this state the "
            f"same on every rank, for instance with jax.lax.psum(..., {_jax.DATA_AXIS!r})."
        )
