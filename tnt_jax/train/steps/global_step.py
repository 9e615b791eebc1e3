"""Steps over the whole global batch, which the compiler divides among the devices.

The step is that of one rank whose rows lie on all devices: a model computes with `[global batch,
...]`, so its rows may depend on one another, and random numbers, statistics and losses are those of
one device. The axes of the ranks, which the step is mapped over, have size 1, and there are axes
that the compiler divides the rows over. Where parameters are whole, the optimizer state is sharded
over these axes: without that, XLA sums whole gradients on every device and updates all parameters
there.

Padded rows are dropped before a step, because rows may depend on them. Rows that the devices cannot
share equally lie on the largest number of devices that divides them, in equal copies.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from tnt_jax import _jax
from tnt_jax.data.feed import rank_slice_of
from tnt_jax.distributed.joining.runtime import Runtime
from tnt_jax.distributed.sums.reduction import Reduction
from tnt_jax.log import logger
from tnt_jax.train.contracts import Apply, Batch, FusedSteps, Parts, TrainingStep
from tnt_jax.train.execution import DeviceBatches, mapped, scanned
from tnt_jax.train.steps.data_parallel import DataParallelSteps
from tnt_jax.train.steps.sharded_step import Placement, ShardedOptimizer, make_sharded_train_step
from tnt_jax.train.steps.step import compiled, donated, make_eval_step, make_predict_step

# What the names of the axes of a global mesh begin with that rows lie over.
_ROWS = "rows_"


class WholeBatches:
    """The part of `Steps` that computes whole batches, beside a class that places their state."""

    takes_host_arrays = False
    mesh: Mesh  # One that `global_mesh` returned.
    placement: Placement

    def _compute_whole_batches(self, runtime: Runtime) -> None:
        self.rank_slice = rank_slice_of(runtime)
        self.train = partial(_make_train_step, self.placement)
        self.fused = _fused(self.placement)
        self._take = RealRows(self.mesh)

    def without_padding(self, group: DeviceBatches) -> DeviceBatches:
        """Returns a group of batches without their padded rows; all processes must call it."""
        if group.batch.mask is None:
            return group
        batch = self._take(group.batch, group.real_rows, dim=int(group.num_steps > 1))
        return group._replace(batch=batch, shards=_closed_up(group.real_rows))

    def evaluate(self, parts: Parts) -> Callable:
        """Returns the function `(params, model_state, sums, batch) -> sums`."""
        step = _jax.unjitted(make_eval_step(parts, self.mesh))
        return divided(step, self.mesh, at=3, out_shardings=_whole(self.mesh))

    def predict(self, apply: Apply) -> Callable:
        """Returns the function `(params, model_state, inputs) -> outputs`."""
        return divided(
            _jax.unjitted(make_predict_step(apply, self.mesh)), self.mesh, at=2, gives_rows=True
        )


class GlobalSteps(WholeBatches, DataParallelSteps):
    """Implements `Steps` for models whose rows depend on one another; parameters are whole."""

    def __init__(self, runtime: Runtime) -> None:
        whole = replace(runtime, mesh=global_mesh(runtime.mesh))
        super().__init__(whole, Reduction("xla", shard_optimizer_state=True))
        self.placement = ShardedOptimizer(self.mesh, self.reduction)
        self._compute_whole_batches(runtime)


def _make_train_step(
    placement: Placement, training: TrainingStep, *, stacked: bool = False
) -> Callable:
    """Returns the step of `Steps.train`."""
    mesh = placement.mesh
    step = make_sharded_train_step(training, _OneRank(placement), stacked=stacked)
    return divided(
        _jax.unjitted(step),
        mesh,
        at=2,
        dim=int(stacked),
        donate_argnums=donated(),
        out_shardings=(None, _whole(mesh)),
    )


def _fused(placement: Placement) -> FusedSteps:
    mesh = placement.mesh

    def evaluate(step: Callable) -> Callable:
        steps = _jax.unjitted(scanned(step, None))
        return divided(steps, mesh, at=3, dim=1, out_shardings=_whole(mesh))

    def predict(step: Callable) -> Callable:
        return divided(_jax.unjitted(mapped(step, None)), mesh, at=2, dim=1, gives_rows=True)

    return FusedSteps(partial(_make_train_step, placement, stacked=True), evaluate, predict)


class _OneRank(Placement):
    """A placement whose one rank has whole parameters, and whose gradients are their sums."""

    def __init__(self, placement: Placement) -> None:
        self.mesh = placement.mesh
        self.update, self.placed = placement.update, placement.placed

    grad_specs = Placement.param_specs

    def sum(self, grads: Any, params: Any, *, order: Sequence[int]) -> Any:
        return grads


def global_mesh(mesh: Mesh) -> Mesh:
    """Returns a mesh of one rank over the devices of `mesh`, in their order.

    The axes of the ranks, which models may name, have size 1. After them each becomes one axis for
    each of its prime factors, so that rows can be divided over as many devices as divide them. The
    other axes stay.
    """
    sizes = {axis: 1 for axis in mesh.axis_names if axis in _jax.RANK_AXES}
    for axis, size in mesh.shape.items():
        if axis not in _jax.RANK_AXES:
            sizes[axis] = size
            continue
        while size > 1:
            factor = next(n for n in range(2, size + 1) if size % n == 0)
            sizes[f"{_ROWS}{len(sizes)}"], size = factor, size // factor
    devices = mesh.devices.reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def log_choice(reason: str, num_ranks: int) -> None:
    """Says why steps compute the whole global batch, and what it costs."""
    logger.info(
        "%s. So the compiler divides each step over the whole global batch among the %d devices: "
        "results are those of one device. It chooses what is exchanged, and sums gradients by its "
        "own choice, not in fused buckets; a batch whose rows the devices cannot share equally is "
        "computed on fewer of them, in copies.",
        reason,
        num_ranks,
    )


class RealRows:
    """Drops the padded rows of batches on the devices of a mesh that `global_mesh` returned."""

    def __init__(self, mesh: Mesh) -> None:
        self._take = jax.jit(partial(_taken, mesh), static_argnums=(1, 2))

    def __call__(self, batch: Batch, real_rows: Sequence[slice], *, dim: int = 0) -> Batch:
        """Returns the real rows of a batch, and no mask; all processes must call it."""
        if batch.mask is None:
            return batch
        ends = tuple((part.start, part.stop) for part in real_rows)
        return self._take(batch._replace(mask=None), ends, dim)


def divided(
    step: Callable, mesh: Mesh, *, at: int, dim: int = 0, gives_rows: bool = False, **options: Any
) -> Callable:
    """Returns the jitted step of one rank that the compiler divides over a global mesh.

    Its argument number `at` is arrays with rows in the dimension `dim`, and so are its results if
    it `gives_rows`. The options are those of `jax.jit`.
    """

    def run(*args: Any) -> Any:
        rows = by_rows(args[at], mesh, dim=dim)
        results = step(*args[:at], rows, *args[at + 1 :])
        return by_rows(results, mesh, dim=dim) if gives_rows else results

    return compiled(run, mesh, **options)


def _whole(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())


def by_rows(tree: Any, mesh: Mesh, *, dim: int = 0) -> Any:
    """Divides arrays `[rows, ...]` over the devices of a global mesh, inside `jax.jit`."""

    def divide(x: jax.Array) -> jax.Array:
        sharding = row_sharding(mesh, x.shape[dim], dim=dim)
        return jax.lax.with_sharding_constraint(x, sharding)

    return jax.tree.map(divide, tree)


def row_sharding(mesh: Mesh, num_rows: int, *, dim: int = 0) -> NamedSharding:
    """Returns how arrays are sharded whose dimension `dim` is `num_rows` rows."""
    axes: list[str] = []
    for name in (name for name in mesh.axis_names if name.startswith(_ROWS)):
        if num_rows % mesh.shape[name] == 0:
            axes.append(name)
            num_rows //= mesh.shape[name]
    return NamedSharding(mesh, PartitionSpec(*[None] * dim, tuple(axes) or None))


def _taken(mesh: Mesh, batch: Any, rows: tuple[tuple[int, int], ...], dim: int) -> Any:
    """Returns ranges of the rows of arrays, one after the other."""

    def take(x: jax.Array) -> jax.Array:
        parts = [jax.lax.slice_in_dim(x, *ends, axis=dim) for ends in rows]
        return jnp.concatenate(parts, axis=dim)

    return by_rows(jax.tree.map(take, batch), mesh, dim=dim)


def _closed_up(parts: Sequence[slice]) -> tuple[slice, ...]:
    """Returns where ranges of rows lie once what is between them is gone."""
    ends, closed = 0, []
    for part in parts:
        closed.append(slice(ends, ends := ends + part.stop - part.start))
    return tuple(closed)
