"""An Optax transformation that reduces gradients over ranks, for custom training loops.

```python
optimizer = tnt.distributed_gradients(optax.sgd(0.1))
```
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import core
from jax.sharding import PartitionSpec

from tnt_jax import _jax
from tnt_jax.distributed.joining.process_sets import ProcessSet
from tnt_jax.distributed.sums.reduction import (
    adasum,
    default_reduction,
    flatten,
    in_buckets,
    psum,
    split_like,
    sum_in_bfloat16,
)

_OPS = ("average", "sum", "adasum")


class DistributedState(NamedTuple):
    """State of an optimizer that updates from gradients of several passes.

    Attributes:
        inner: State of the optimizer.
        num_passes: Passes since the last update, int32.
        accumulated: Sums of this rank's gradients since then, arrays `[1, ...]` on a rank.
    """

    inner: Any
    num_passes: Any
    accumulated: Any


class _Options(NamedTuple):
    axis_name: str
    op: str
    compression: str | None
    passes: int
    predivide: float
    process_set: ProcessSet | None


def distributed_gradients(
    optimizer: optax.GradientTransformation,
    *,
    axis_name: str = _jax.DATA_AXIS,
    op: Literal["average", "sum", "adasum"] = "average",
    compression: Literal["bfloat16"] | None = None,
    backward_passes_per_step: int = 1,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that is given the gradients of one rank and updates from those of all.

    In `shard_map` and `pmap` over the axis it reduces gradients in the buckets that `fit` uses. In
    a plain `jit` over global arrays gradients are those of the global batch already, and are left
    as they are. With `check_vma`, `shard_map` sums gradients of replicated parameters by itself:
    take those of `jax.lax.pcast(params, axis_name, to="varying")`. Gradients that are the same on
    all ranks already are refused wherever JAX tells: always with `check_vma`; without it, and in
    `pmap`, where they were made by `psum` or `pmean` in the same function.

    Args:
        optimizer: Optax transformation.
        axis_name: Mapped axis over whose ranks gradients are reduced.
        op: `"average"`; `"sum"`; or `"adasum"`, which adds gradients as far as they are orthogonal
            and averages them as far as they are parallel (Maleki et al. 2020, arXiv:2006.02924),
            over a power of two ranks.
        compression: `"bfloat16"` sends 16 bits of each float32; sums are made in float32, and
            rounded once more. Nothing makes up for the rounding, other than in `fit`.
        backward_passes_per_step: Calls for each update. Each rank adds up its own gradients, and
            ranks exchange them once an update; an average, and Adasum, is of the mean over the
            calls. In between, updates are zero. The state holds arrays that differ between ranks:
            see `state_specs`.
        gradient_predivide_factor: What gradients are divided by before the sum; the rest of the
            division by the number of ranks comes after it. For `"average"` alone.
        process_set: The ranks that the axis must consist of, as that of `process_set.mesh()` does;
            any by default.

    Raises:
        ValueError: If an argument is unknown, or two exclude one another; when an update is traced,
            if gradients were reduced before, if those of several processes cannot be known to be
            global, or if an argument needs gradients of single ranks and these are global.
    """
    options = _Options(
        axis_name, op, compression, backward_passes_per_step, gradient_predivide_factor, process_set
    )
    _check_options(options)
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Any:
        state = inner.init(params)
        return state if options.passes == 1 else _started(state, params, options)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        is_global = not _is_bound(axis_name)
        if is_global:
            _check_global(updates, options)
        else:
            _check_local(updates, options)
            if options.passes > 1:
                _check_own(state, axis_name)

        def reduce(grads: Any) -> Any:
            return grads if is_global else _reduced(grads, options)

        if options.passes == 1:
            return inner.update(reduce(updates), state, params, **extra)
        step = partial(inner.update, params=params, **extra)
        return _accumulated(updates, state, step, reduce, options)

    return optax.GradientTransformationExtraArgs(init, update)


def state_specs(state: Any, axis_name: str = _jax.DATA_AXIS) -> Any:
    """Returns the `PartitionSpec` of each array of a training state, for `shard_map`.

    The state may be any tree that holds a state of `distributed_gradients`. Every array is
    replicated except the gradients that each rank accumulates on its own.

    Args:
        state: Optimizer's state, or a training state with one in it.
        axis_name: The axis of the ranks.
    """

    def specs(part: Any) -> Any:
        if not isinstance(part, DistributedState):
            return PartitionSpec()
        own = jax.tree.map(lambda _: PartitionSpec(axis_name), part.accumulated)
        return DistributedState(state_specs(part.inner, axis_name), PartitionSpec(), own)

    return jax.tree.map(specs, state, is_leaf=lambda part: isinstance(part, DistributedState))


def _check_options(options: _Options) -> None:
    if options.op not in _OPS:
        raise ValueError(f"op must be one of {', '.join(_OPS)}, but is {options.op!r}.")
    if options.compression not in (None, "bfloat16"):
        raise ValueError(f"compression must be 'bfloat16' or None, but is {options.compression!r}.")
    if options.compression is not None and options.op == "adasum":
        raise ValueError('compression works on sums; leave it out with op="adasum".')
    if not isinstance(options.passes, int) or options.passes < 1:
        raise ValueError(
            f"backward_passes_per_step must be an integer of at least 1, but is {options.passes!r}."
        )
    if not options.predivide > 0 or (options.predivide != 1 and options.op != "average"):
        raise ValueError(
            f"gradient_predivide_factor ({options.predivide}) must be positive, and divides an "
            f'average: leave it at 1 with op="{options.op}".'
        )


def _is_bound(axis_name: str) -> bool:
    try:
        jax.lax.axis_size(axis_name)
    except NameError:
        return False
    return True


def _check_global(grads: Any, options: _Options) -> None:
    """Raises a ValueError unless gradients outside of the axis can be those of the global batch."""
    wanted = {
        f"op={options.op!r}": options.op != "average",
        "compression": options.compression is not None,
        "gradient_predivide_factor": options.predivide != 1,
        "process_set": options.process_set is not None,
    }
    chosen = [name for name, is_chosen in wanted.items() if is_chosen]
    where = f"The axis {options.axis_name!r} is not mapped here"
    if others := _jax.mapped_axes():
        raise ValueError(
            f"{where}, but {' and '.join(map(repr, others))} is: pass axis_name, the axis over "
            "whose ranks gradients are to be reduced."
        )
    if chosen:
        raise ValueError(
            f"{where}, so gradients are those of the global batch, and {' and '.join(chosen)} "
            "cannot be applied to those of single ranks. Call update in shard_map or pmap over the "
            "axis, or leave the argument out."
        )
    if jax.process_count() > 1 and not all(map(_is_global, jax.tree.leaves(grads))):
        raise ValueError(
            f"{where}, and nothing tells that the gradients are those of the global batch rather "
            "than of this process alone. Call update in shard_map over the axis, or in jit on "
            "global arrays, whose sharding names a mesh of all processes."
        )


def _is_global(x: Any) -> bool:
    if not isinstance(x, core.Tracer):
        return isinstance(x, jax.Array) and not x.is_fully_addressable
    meshes = (jax.typeof(x).sharding.mesh, jax.sharding.get_abstract_mesh())
    return any(mesh.size > jax.local_device_count() for mesh in meshes if not mesh.empty)


def _check_local(grads: Any, options: _Options) -> None:
    """Raises a ValueError if gradients were reduced before, or the ranks are of another set."""
    axis_name = options.axis_name
    num_ranks = jax.lax.axis_size(axis_name)
    if options.process_set is not None and options.process_set.size != num_ranks:
        raise ValueError(
            f"The axis {axis_name!r} has {num_ranks} ranks, but the process set "
            f"{options.process_set.size} ({options.process_set}). Run the step over "
            "process_set.mesh()."
        )
    if num_ranks == 1:
        return
    tracks = _jax.tracks_varying(axis_name)
    for path, leaf in jax.tree_util.tree_leaves_with_path(grads):
        is_same = tracks and not _jax.is_varying(leaf, axis_name)
        if is_same or _jax.was_summed(leaf, axis_name):
            raise ValueError(
                f"The gradient {jax.tree_util.keystr(path)} was reduced over the axis "
                f"{axis_name!r} before, and would be reduced twice: by psum or pmean, or by "
                "shard_map, which sums gradients of replicated parameters. Leave out the psum, and "
                "differentiate with respect to "
                f'jax.lax.pcast(params, {axis_name!r}, to="varying").'
            )


def _reduced(grads: Any, options: _Options) -> Any:
    """Returns the reduction of gradients over the axis, in the buckets of the platform."""
    axis_name = options.axis_name
    num_ranks = jax.lax.axis_size(axis_name)
    if options.op == "adasum":
        return adasum(grads, axis_name)
    if num_ranks == 1:
        # Nothing is sent; it says that all ranks have the same.
        return jax.lax.psum(grads, axis_name) if _jax.tracks_varying(axis_name) else grads
    leaves = jax.tree.leaves(grads)
    reduction = default_reduction(jax.default_backend(), num_ranks).resolve(
        sum(x.size * x.dtype.itemsize for x in leaves)
    )

    def total_of_bucket(arrays: list[jax.Array]) -> list[jax.Array]:
        if options.compression is not None and arrays[0].dtype == jnp.float32:
            return split_like(sum_in_bfloat16(flatten(arrays), axis_name)[0], arrays)
        if reduction.chained:
            return split_like(psum(flatten(arrays), axis_name=axis_name), arrays)
        return psum(arrays, axis_name=axis_name)

    # A sum is not divided; its `predivide` is 1.
    grads = _scaled(grads, 1 / options.predivide)
    # Backpropagation usually finishes the last layers first.
    order = list(range(len(leaves)))[::-1]
    total = in_buckets(total_of_bucket, grads, reduction, order=order)
    return total if options.op == "sum" else _scaled(total, options.predivide / num_ranks)


def _scaled(tree: Any, factor: float) -> Any:
    return tree if factor == 1 else jax.tree.map(lambda x: x * jnp.asarray(factor, x.dtype), tree)


def _started(inner: Any, params: Any, options: _Options) -> DistributedState:
    """Returns the state before the first pass; outside of the axis, with all ranks' arrays."""
    if _is_bound(options.axis_name):
        num_ranks = 1
    else:
        num_ranks = options.process_set.size if options.process_set else jax.device_count()
    accumulated = jax.tree.map(lambda x: jnp.zeros((num_ranks, *np.shape(x)), x.dtype), params)
    return DistributedState(inner, jnp.zeros((), jnp.int32), accumulated)


def _accumulated(
    grads: Any,
    state: DistributedState,
    step: Callable[[Any, Any], tuple[Any, Any]],
    reduce: Callable[[Any], Any],
    options: _Options,
) -> tuple[Any, DistributedState]:
    """Returns the updates of a pass, zero in all of a step but the last, and the state after it."""
    totals = jax.tree.map(lambda total, x: total.at[0].add(x), state.accumulated, grads)
    is_last = state.num_passes + 1 == options.passes
    divisor = 1 if options.op == "sum" else options.passes

    def exchange(totals: Any) -> Any:
        return reduce(_scaled(jax.tree.map(lambda x: x[0], totals), 1 / divisor))

    def wait(totals: Any) -> Any:
        return jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), totals)

    # All ranks are at the same pass, so that they exchange together or not at all.
    updates, inner = step(jax.lax.cond(is_last, exchange, wait, totals), state.inner)
    return (
        jax.tree.map(lambda x: jnp.where(is_last, x, jnp.zeros_like(x)), updates),
        DistributedState(
            jax.tree.map(lambda new, old: jnp.where(is_last, new, old), inner, state.inner),
            jnp.where(is_last, 0, state.num_passes + 1),
            jax.tree.map(lambda x: jnp.where(is_last, jnp.zeros_like(x), x), totals),
        ),
    )


def _check_own(state: DistributedState, axis_name: str) -> None:
    """Raises a ValueError if what ranks add up for themselves came as the same on all of them."""
    own = jax.tree.leaves(state.accumulated)
    if _jax.tracks_varying(axis_name) and not all(_jax.is_varying(x, axis_name) for x in own):
        raise ValueError(
            "With backward_passes_per_step each rank adds up its own gradients, but the "
            "optimizer's state came to shard_map as replicated. Pass tnt.state_specs(state) for "
            "it, in in_specs and out_specs."
        )
