"""Finds out whether the result for a row depends on other rows or on its position.

A rank of `DataParallelSteps` sees a part of the batch, so with a module, a loss or an objective
that compares rows, or draws random numbers by the position of a row, results would depend on the
number of ranks; `GlobalSteps` are for these. The traced program tells most (`traced_dependence`).
Otherwise it runs once, before training, on two selections of a few rows of the first batch: rows in
both must have equal results (`dependence_of_rows`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey, SequenceKey

from tnt_jax import _jax
from tnt_jax.adapters import batch_norm_off
from tnt_jax.adapters.base import Adapter
from tnt_jax.distributed.sums.random_rows import DrawError, row_key, step_key
from tnt_jax.log import logger
from tnt_jax.train.contracts import Batch
from tnt_jax.train.steps.epoch_sums import num_local_rows, num_real_local_rows
from tnt_jax.train.steps.row_dependence import Free, Mixed, dependences, is_by_row
from tnt_jax.train.trainer import Trainer

# Maps parameters, model state, rows, key and the train flag to values `[rows, ...]` by what makes
# them.
PerRow = Callable[[Any, Any, Batch, jax.Array | None, bool], dict[str, Any]]
_T = TypeVar("_T")

_NUM_ROWS = 4
# Of the parameters of a sharded model, which are gathered for the check.
_MOST_BYTES = 2**30
# The program and the shapes are the same, so rounding hardly differs; half precision may be
# accumulated in another order.
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 3e-2
_SIZE_TOLERANCE = 1e-2
# Losses that a Flax module adds, a scalar among the values of rows.
_ADDED = "added losses"


def traced_dependence(
    trainer: Trainer,
    batch: Batch,
    per_row: PerRow,
    *,
    train: bool,
    sizes: bool = False,
    last_rows: int = 0,
) -> tuple[str | None, bool]:
    """Returns how values of a row depend on other rows, and whether that is known.

    Nothing runs, and variables may still be on their way. A function that communicates itself is
    not examined. The rows of statistics are for `BatchNorm(axis_name=...)` and the like to say.
    `sizes` says whether values may depend on the number of rows, which a trace never tells;
    `last_rows` are those of a rank in a smaller last batch, else 0, with random numbers of its own.
    """
    variables = _described_variables(trainer)
    per_rank = num_local_rows(batch) // trainer.rank_slice.local_ranks

    inputs, batch = batch.inputs, batch._replace(mask=None)

    def trace(num_rows: int) -> Any:
        rows = _described_rows(batch, num_rows)
        return _traced(trainer, per_row, variables, rows, train=train)

    # With one row, its position would not matter.
    several = max(per_rank, 2)
    try:
        traced = _for_some_rows(trace, [several, per_rank])
        for rows in {per_rank, last_rows} - {0, several}:
            _for_some_rows(trace, [rows, several])
    except DrawError as error:
        return str(error).partition(". ")[0], True
    _warn_of_ids(traced, inputs)
    if _jax.communicates(traced):
        return None, True
    holds_rows = [False] * len(jax.tree.leaves(variables)) + [True] * len(jax.tree.leaves(batch))
    results, _ = dependences(traced.jaxpr.jaxpr, [*holds_rows, False])
    paths = jax.tree_util.tree_leaves_with_path(traced.out_info)
    is_known = not sizes
    for (path, _), found in zip(paths, results, strict=True):
        what = path[0].key
        if what == _ADDED:
            is_known &= isinstance(found, Free)
        elif isinstance(found, Mixed):
            return f"{what} compares rows of a batch with each other, by {found}", True
        else:
            is_known &= is_by_row(found)
    return None, is_known


def bytes_of_products(trainer: Trainer, batch: Batch, per_row: PerRow) -> int | None:
    """Returns the bytes of training's products for a global batch; None in half precision."""
    ranks = trainer.rank_slice
    per_rank = num_local_rows(batch) // ranks.local_ranks
    rows = _described_rows(batch._replace(mask=None), per_rank)
    traced = _traced(trainer, per_row, _described_variables(trainer), rows, train=True)
    if _jax.computes_in_half(traced):
        return None
    return ranks.num_ranks * _jax.bytes_of_products(traced.jaxpr.jaxpr)


def _described_variables(trainer: Trainer) -> Any:
    state = trainer.described()
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype),
        (state.params, state.model_state, state.key),
    )


def _described_rows(batch: Batch, num_rows: int) -> Batch:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((num_rows, *np.shape(x)[1:]), jnp.result_type(x)), batch
    )


def _warn_of_ids(traced: Any, inputs: Any) -> None:
    """Warns of ids for which an embedding has no entry, in the inputs of a batch."""
    paths = [path for path, _ in jax.tree.leaves_with_path(traced.in_avals[0])]
    labels = {
        variable: path[2:]
        for variable, path in zip(traced.jaxpr.jaxpr.invars, paths, strict=True)
        if path[:2] == (SequenceKey(3), GetAttrKey("inputs"))
    }
    arrays = dict(jax.tree.leaves_with_path(inputs))
    for path, size in sorted(set(_jax.looked_up(traced.jaxpr.jaxpr, labels)), key=str):
        ids = np.asarray(arrays[path])
        if ids.size and (ids.max() >= size or ids.min() < -size):
            logger.warning(
                "Ids from %d to %d of the inputs%s are looked up in an embedding of %d entries, "
                "which gives NaN for ids that it lacks: the largest is %d. Correct the ids, or "
                "make the embedding larger (num_embeddings).",
                ids.min(),
                ids.max(),
                jax.tree_util.keystr(path),
                size,
                size - 1,
            )


@jax.disable_jit(False)  # Programs that are compiled by hand do not run where it is disabled.
def dependence_of_rows(
    trainer: Trainer, batch: Batch, per_row: PerRow, *, train: bool, sizes: bool = False
) -> str | None:
    """Returns how values of a row depend on other rows or on its position; None if they do not.

    It runs the function, where `traced_dependence` does not know. With `sizes` it also checks that
    values do not depend on the number of rows.
    """
    params = jax.tree.leaves(trainer.require_state().params)
    is_cut = any(not x.is_fully_replicated for x in params)
    # The check gathers the model on one device.
    if is_cut and sum(x.nbytes for x in params) > _MOST_BYTES:
        logger.info(
            "Whether rows are independent is not checked: the model is sharded, and the check "
            "needs it whole on one device."
        )
        return None
    num_real = num_real_local_rows(batch)
    per_rank = min(num_local_rows(batch) // trainer.rank_slice.local_ranks, num_real)
    num_rows = [rows for rows in (min(_NUM_ROWS, num_real), per_rank) if rows > 1]
    if not num_rows:
        return None
    program = _for_some_rows(
        lambda rows: _Program(trainer, batch, per_row, rows, train=train), num_rows
    )
    return _dependence(program, sizes)


def _for_some_rows(make: Callable[[int], _T], num_rows: list[int]) -> _T:
    """Returns what is made for the first number of rows, or for the last."""
    if num_rows[0] != num_rows[-1]:
        # The model may be written for one number of rows, that of a rank; any other error recurs
        # below.
        try:
            return make(num_rows[0])
        except DrawError:
            raise
        except (TypeError, ValueError) as error:
            logger.debug("Rows are not checked with %d of them: %s", num_rows[0], error)
    return make(num_rows[-1])


def _traced(trainer: Trainer, per_row: PerRow, variables: Any, batch: Batch, *, train: bool) -> Any:
    """Returns the trace, for one device, of a function of variables, rows and the first row."""
    mesh = trainer.runtime.mesh

    def run(
        params: Any, model_state: Any, words: Any, batch: Batch, first_row: Any
    ) -> dict[str, Any]:
        key = row_key(step_key(words, 0), first_row)
        with batch_norm_off():
            return per_row(params, model_state, batch, key, train)

    spec: Any = PartitionSpec()
    one_rank = _jax.one_rank_mesh(mesh.local_devices[0], mesh)
    mapped = _jax.shard_map(run, mesh=one_rank, in_specs=(spec,) * 5, out_specs=spec)
    return jax.jit(mapped).trace(*variables, batch, 0)


class _Program:
    """The checked function, compiled for one device of this process."""

    def __init__(
        self, trainer: Trainer, batch: Batch, per_row: PerRow, num_rows: int, *, train: bool
    ) -> None:
        state = trainer.require_state()
        num_real = num_real_local_rows(batch)
        self.num_rows = num_rows
        variables = (state.params, state.model_state, state.key)
        self._variables = jax.tree.map(lambda x: trainer.gather(x).addressable_data(0), variables)
        # Rows from all over the batch: neighbours may be alike.
        chosen = np.linspace(0, num_real - 1, num_rows).astype(int)
        self._batch = jax.tree.map(lambda x: np.asarray(x)[chosen], batch._replace(mask=None))
        self._trace = lambda rows: _traced(
            trainer, per_row, self._variables, self._take(rows), train=train
        )
        traced = self._trace(np.arange(num_rows))
        self.tolerance = _HALF_TOLERANCE if _jax.computes_in_half(traced) else _TOLERANCE
        self._traced = traced
        self._programs: dict[int, Any] = {}

    def run(self, rows: np.ndarray, first_row: int = 0) -> Any:
        """Returns the values of rows that start at `first_row`, in a program for their number."""
        number = len(rows)
        if number not in self._programs:
            traced = self._traced if number == self.num_rows else self._trace(rows)
            self._programs[number] = traced.lower().compile(_jax.options_of_one_run())
        values = self._programs[number](*self._variables, self._take(rows), first_row)
        return jax.tree.map(np.asarray, _jax.finished(values))

    def _take(self, rows: np.ndarray) -> Batch:
        return jax.tree.map(lambda x: np.asarray(x)[rows], self._batch)


def _dependence(program: _Program, sizes: bool) -> str | None:
    rows = np.arange(program.num_rows)
    half = program.num_rows // 2
    back = slice(half, None)
    num_back = program.num_rows - half
    whole = program.run(rows)
    moved = program.run(half + rows % num_back, half)
    seen = _difference(whole, back, moved, slice(num_back), program.tolerance)
    if seen is not None:
        repeated = program.run(rows % half)
        if _difference(whole, slice(half), repeated, slice(half), program.tolerance) is not None:
            return f"{seen.what} compares rows of a batch with each other: {seen} among other rows"
        return (
            f"{seen.what} gives a row values that depend on its position in the batch: {seen} at "
            "another position"
        )
    if _ADDED in whole and (found := _dependence_of_added(program, float(whole[_ADDED]))):
        return found
    if not sizes:
        return None
    tolerance = max(program.tolerance, _SIZE_TOLERANCE)
    seen = _difference(whole, back, program.run(rows[back], half), slice(None), tolerance)
    if seen is None:
        return None
    found = f"{seen.what} gives a row values that depend on the number of rows"
    logger.warning(
        "%s: %s in a smaller batch. Do not average over the rows of the batch: the step does.",
        found,
        seen,
    )
    return found


def _dependence_of_added(program: _Program, whole: float) -> str | None:
    """Returns how the losses that a module adds differ from a mean over rows, or None."""
    rows = np.arange(program.num_rows)
    halves = np.split(rows, [len(rows) // 2])
    try:
        parts = [float(program.run(half, half[0])[_ADDED]) for half in halves]
    except (TypeError, ValueError) as error:  # The module may be written for one number of rows.
        return f"Whether added losses are a mean over rows cannot be told ({error})"
    mean = np.average(parts, weights=list(map(len, halves)))
    limit = program.tolerance * np.max(np.abs(parts))
    if np.isclose(whole, mean, rtol=0, atol=limit, equal_nan=True):
        return None
    return (
        f"The module adds losses that are not a mean over rows: {whole:.6g} for some rows, but "
        f"{parts[0]:.6g} and {parts[1]:.6g} for the halves of them"
    )


class _Difference(NamedTuple):
    """A value of a row that is not the same in two batches."""

    what: str
    left: Any
    right: Any

    def __str__(self) -> str:
        return f"a row gets {self.left:.6g} in one batch but {self.right:.6g}"


def _difference(
    values: dict[str, Any], rows: slice, others: Any, other_rows: slice, tolerance: float
) -> _Difference | None:
    """Returns where floating numbers of rows differ in pytrees of arrays `[rows, ...]`, or None."""
    for what in values:
        pairs = zip(jax.tree.leaves(values[what]), jax.tree.leaves(others[what]), strict=True)
        for left, right in pairs:
            if not jnp.issubdtype(left.dtype, jnp.floating) or left.ndim == 0:
                continue
            left, right = left[rows].astype(np.float64), right[other_rows].astype(np.float64)
            scale = np.max(np.abs(left), where=np.isfinite(left), initial=0.0)
            limit = tolerance * scale
            is_same = np.isclose(left, right, rtol=tolerance, atol=limit, equal_nan=True)
            if not is_same.all():
                index = tuple(np.argwhere(~is_same)[0])
                return _Difference(what, left[index], right[index])
    return None


def outputs_per_row(adapter: Adapter) -> PerRow:
    """Returns what computes the model's outputs, in training also losses of unknown shares."""

    def per_row(
        params: Any, model_state: Any, batch: Batch, key: jax.Array | None, train: bool
    ) -> dict[str, Any]:
        applied = adapter.apply(params, model_state, batch.inputs, key=key, train=train, mask=None)
        values = {f"The model {adapter.name!r}": applied.outputs}
        if train and isinstance(applied.penalty, jax.Array) and not adapter.knows_penalty:
            values[_ADDED] = applied.penalty
        return values

    return per_row
