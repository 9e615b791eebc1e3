"""Sharded updates: each rank updates and keeps one shard of the optimizer state (ZeRO-1).

Rajbhandari et al. 2020, arXiv:1910.02054, section 5.1: gradients are reduce-scattered, each rank
updates its shard of the parameters, and the shards are gathered. Arrays keep their shapes and are
sharded along one dimension. The update runs outside `shard_map`, where the compiler adds the
communication that an optimizer needs, such as for the norm of a whole array. So all Optax
transformations work, and a checkpoint does not depend on the number of ranks.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tnt_jax import _jax
from tnt_jax.distributed.sums.fused_psum import psum, split_like
from tnt_jax.distributed.sums.reduction import Reduction, in_buckets


def shard_dim(shape: Sequence[int], num_ranks: int) -> int | None:
    """Returns the largest dimension that `num_ranks` divides, along which to shard, or None."""
    fitting = [dim for dim, size in enumerate(shape) if size and size % num_ranks == 0]
    return max(fitting, key=lambda dim: shape[dim], default=None)


def shard_spec(shape: Sequence[int], num_ranks: int) -> PartitionSpec:
    """Returns how an array of the optimizer state is sharded over the ranks."""
    dim = shard_dim(shape, num_ranks)
    return PartitionSpec() if dim is None else PartitionSpec(*[None] * dim, _jax.DATA_AXIS)


def shardings(tree: Any, mesh: Mesh, *, before: int = 0) -> Any:
    """Returns how each array is sharded over all axes; its first dimensions `before` are not."""

    def sharding(x: Any) -> NamedSharding:
        dim = shard_dim(jnp.shape(x)[before:], mesh.size)
        spec = () if dim is None else (*[None] * (before + dim), mesh.axis_names)
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map(sharding, tree)


def scatter(grads: Any, reduction: Reduction, *, order: Sequence[int]) -> Any:
    """Returns this rank's shard of the sums of gradients over the ranks, inside `shard_map`.

    Arrays that cannot be sharded are summed whole. `order` is as in `sum_over_ranks`.
    """
    num_ranks = jax.lax.axis_size(_jax.DATA_AXIS)

    def parts_of_bucket(arrays: list[jax.Array]) -> list[jax.Array]:
        dims = [shard_dim(x.shape, num_ranks) for x in arrays]
        results: dict[int, jax.Array] = {}
        whole = [index for index, dim in enumerate(dims) if dim is None]
        results.update(zip(whole, psum([arrays[index] for index in whole]), strict=True))
        sharded = [(index, dim) for index, dim in enumerate(dims) if dim is not None]
        if sharded:
            moved = [jnp.moveaxis(arrays[index], dim, 0) for index, dim in sharded]
            rows = jnp.concatenate([x.reshape(num_ranks, -1) for x in moved], axis=1)
            own = jax.lax.psum_scatter(rows, _jax.DATA_AXIS, scatter_dimension=0)
            shapes = [
                jax.ShapeDtypeStruct((len(x) // num_ranks, *x.shape[1:]), x.dtype) for x in moved
            ]
            for (index, dim), part in zip(sharded, split_like(own, shapes), strict=True):
                results[index] = jnp.moveaxis(part, 0, dim)
        return [results[index] for index in range(len(arrays))]

    return in_buckets(parts_of_bucket, grads, reduction, order=order)


def update_shards(
    optimizer: optax.GradientTransformation, grads: Any, params: Any, opt_state: Any, mesh: Mesh
) -> tuple[Any, Any]:
    """Returns whole parameters and sharded optimizer state after an update, outside `shard_map`.

    Gradients and optimizer state are one shard per rank, parameters whole.
    """

    def sharded(tree: Any) -> Any:
        return jax.lax.with_sharding_constraint(tree, shardings(tree, mesh))

    shards = sharded(params)
    updates, opt_state = optimizer.update(grads, opt_state, shards)
    whole = NamedSharding(mesh, PartitionSpec())
    new = sharded(optax.apply_updates(shards, updates))
    return jax.lax.with_sharding_constraint(new, whole), sharded(opt_state)
