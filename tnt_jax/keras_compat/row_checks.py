"""Checks that the result for a row depends neither on other rows nor on its position.

Ranks see parts of a batch, so a module or an objective that compares rows, or draws random numbers
by the position of a row, would give results that depend on the number of ranks. The check runs
once, before training, on a few rows of the first batch: the same program runs on two selections,
and rows in both must have equal results. Losses that a model adds must be a mean over rows.
"""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jax.tree_util import GetAttrKey, SequenceKey

from tnt_jax import _jax
from tnt_jax.adapters.base import Adapter
from tnt_jax.distributed.random_rows import DrawError, row_key, step_key
from tnt_jax.log import logger
from tnt_jax.train.contracts import Batch
from tnt_jax.train.epoch_sums import num_local_rows
from tnt_jax.train.step import has_statistics
from tnt_jax.train.trainer import Trainer

# Maps parameters, model state, rows, key and the train flag to values `[rows, ...]` and the model
# state afterwards.
PerRow = Callable[[Any, Any, Batch, jax.Array | None, bool], tuple[Any, Any]]

_NUM_ROWS = 4
# Of the parameters of a sharded model, which are gathered for the check.
_MOST_BYTES = 2**30
# The program and the shapes are the same, so rounding hardly differs; half precision may be
# accumulated in another order.
_TOLERANCE, _HALF_TOLERANCE = 1e-3, 3e-2
_SIZE_TOLERANCE = 1e-2
_ALL_ROWS = (
    "Ranks see parts of a batch, so results would depend on their number. Let the values of a row "
    "depend on this row alone, or gather the rows of all ranks: jax.lax.all_gather(x, 'data', "
    "axis=0, tiled=True)."
)
_PLACES = (
    "Results would depend on the number of ranks. Draw random numbers for all rows at once, as an "
    "array [rows, ...], with the keys that the call is given (make_rng('dropout') in Linen, "
    "rngs.dropout() in NNX, rngs in an objective), not with a constant key."
)


@jax.disable_jit(False)  # Programs that are compiled by hand do not run where it is disabled.
def problem_of_rows(
    trainer: Trainer,
    batch: Batch,
    per_row: PerRow,
    *,
    what: str,
    sizes: bool = False,
    last_rows: int = 0,
) -> ValueError | None:
    """Returns what is wrong if values of a row depend on other rows or on its position, or None.

    A function that communicates with other ranks itself is not checked; if it does so in training
    only, as synchronised BatchNorm does, evaluation is checked. So it is with batch statistics,
    such as BatchNorm's, which are allowed: they change the model state, and the step warns of
    them. A sharded model with parameters of more than 1 GiB is not checked.

    Args:
        trainer: Trainer of the model, which is built.
        batch: This process's rows of the first batch, on the host.
        per_row: The function to check; see `PerRow`.
        what: Its name in the message.
        sizes: Whether to check also that values do not depend on the number of rows.
        last_rows: Rows of a rank in the last batch if they are fewer, else 0: its random numbers
            must be told apart, too.
    """
    if _is_too_large(trainer):
        logger.info(
            "Whether rows are independent is not checked: the model is sharded, and the check "
            "needs it whole on one device."
        )
        return None
    num_real = _num_real(batch)
    per_rank = min(num_local_rows(batch) // trainer.rank_slice.local_ranks, num_real)
    num_rows = [rows for rows in (min(_NUM_ROWS, num_real), per_rank) if rows > 1]
    if not num_rows:
        return None
    try:
        if last_rows:
            _trace_last_batch(trainer, batch, per_row, last_rows)
        return _problem_of_programs(trainer, batch, per_row, num_rows, what, sizes)
    except DrawError as error:
        # One device draws the same in any case.
        return None if trainer.rank_slice.num_ranks == 1 else ValueError(f"{what}: {error}")


def _trace_last_batch(trainer: Trainer, batch: Batch, per_row: PerRow, num_rows: int) -> None:
    try:
        _Program(trainer, batch, per_row, num_rows, train=True)
    except DrawError:
        raise
    except (TypeError, ValueError) as error:  # The step on the last batch raises it, too.
        logger.info("The model cannot be traced with %d row(s): %s", num_rows, error)


def _problem_of_programs(
    trainer: Trainer, batch: Batch, per_row: PerRow, num_rows: list[int], what: str, sizes: bool
) -> ValueError | None:
    # A step that was traced before has told; else the training pass is traced to see.
    if not has_statistics(trainer.programs.parts):
        training = _program(trainer, batch, per_row, num_rows, train=True)
        _warn_of_ids(training, batch, what)
        if not training.communicates and not training.has_statistics():
            problem = _problem(training, what, sizes)
            is_alone = trainer.rank_slice.num_ranks == 1  # It computes the whole batch.
            return problem if is_alone else problem or _problem_of_penalty(training, what)
    evaluation = _program(trainer, batch, per_row, num_rows, train=False)
    _warn_of_ids(evaluation, batch, what)
    return None if evaluation.communicates else _problem(evaluation, f"{what} in evaluation", sizes)


def _is_too_large(trainer: Trainer) -> bool:
    """Returns whether a model that is sharded had better not be gathered on one device."""
    params = jax.tree.leaves(trainer.require_state().params)
    is_cut = any(not x.is_fully_replicated for x in params)
    return is_cut and sum(x.nbytes for x in params) > _MOST_BYTES


def _num_real(batch: Batch) -> int:
    return num_local_rows(batch) if batch.mask is None else int(batch.mask.sum())


def _program(
    trainer: Trainer, batch: Batch, per_row: PerRow, num_rows: list[int], *, train: bool
) -> "_Program":
    if num_rows[0] != num_rows[-1]:
        # The model may be written for one number of rows, that of a rank; any other error recurs
        # below.
        with suppress(TypeError, ValueError):
            return _Program(trainer, batch, per_row, num_rows[0], train=train)
    return _Program(trainer, batch, per_row, num_rows[-1], train=train)


class _Program:
    """The checked function, compiled for one device of this process.

    Args:
        num_rows: Number of rows of `batch` that it runs on.
        train: Whether it runs as in training.

    Attributes:
        communicates: Whether it communicates with other ranks; it cannot be run then.
        tolerance: Difference that rounding can explain, relative to the largest value.
    """

    def __init__(
        self, trainer: Trainer, batch: Batch, per_row: PerRow, num_rows: int, *, train: bool
    ) -> None:
        state = trainer.require_state()
        num_real = _num_real(batch)
        self.num_rows = num_rows
        mesh = trainer.runtime.mesh
        self._mesh = _jax.one_rank_mesh(mesh.local_devices[0], mesh)
        variables = (state.params, state.model_state, state.key)
        self._variables = jax.tree.map(lambda x: trainer.gather(x).addressable_data(0), variables)
        # Rows from all over the batch: neighbours may be alike.
        chosen = np.linspace(0, num_real - 1, num_rows).astype(int)
        self._batch = jax.tree.map(lambda x: np.asarray(x)[chosen], batch._replace(mask=None))
        self._per_row = per_row
        self._train = train
        traced = self._trace(np.arange(num_rows))
        self.communicates = _jax.communicates(traced)
        self.tolerance = _HALF_TOLERANCE if _jax.computes_in_half(traced) else _TOLERANCE
        self._traced, self._compiled = traced, None

    def run(self, rows: np.ndarray, first_row: int = 0) -> Any:
        """Returns the values of rows of the batch that start at `first_row`, `num_rows` of them."""
        if self._compiled is None:
            self._compiled = _compiled(self._traced)
        return self._values(self._compiled, rows, first_row)

    def run_alone(self, rows: np.ndarray, first_row: int) -> Any:
        """Returns values of rows of the batch, in a program for their number."""
        return self._values(_compiled(self._trace(rows)), rows, first_row)

    def has_statistics(self) -> bool:
        """Returns whether the model state afterwards depends on the rows."""
        values, model_state = self._traced.out_info
        others, states = (
            jax.tree.map(lambda _: False, values),
            jax.tree.map(lambda _: True, model_state),
        )
        *_, batch, _ = _jax.needed_operands(self._traced, (others, states))
        return any(jax.tree.leaves(batch))

    def embedded_inputs(self) -> set[tuple[Any, int]]:
        """Returns paths of inputs by which an embedding is read, with its number of entries."""
        in_avals, _ = self._traced.in_avals
        paths = [path for path, _ in jax.tree.leaves_with_path(in_avals)]
        labels = {
            variable: path[2:]
            for variable, path in zip(self._traced.jaxpr.jaxpr.invars, paths, strict=True)
            if path[:2] == (SequenceKey(3), GetAttrKey("inputs"))
        }
        return set(_jax.looked_up(self._traced.jaxpr.jaxpr, labels))

    def adds_loss_of_rows(self) -> bool:
        """Returns whether losses that a model adds depend on the rows."""
        values, _ = self._traced.out_info
        if not isinstance(values, _Applied):
            return False
        nothing = jax.tree.map(lambda _: False, self._traced.out_info)
        flags = (nothing[0]._replace(penalty=True), nothing[1])
        *_, batch, _ = _jax.needed_operands(self._traced, flags)
        return any(jax.tree.leaves(batch))

    def _values(self, compiled: Any, rows: np.ndarray, first_row: int) -> Any:
        values, _ = compiled(*self._variables, self._take(rows), first_row)
        return jax.tree.map(np.asarray, _jax.finished(values))

    def _trace(self, rows: np.ndarray) -> Any:
        def run(
            params: Any, model_state: Any, words: Any, batch: Batch, first_row: Any
        ) -> tuple[Any, Any]:
            key = row_key(step_key(words, 0), first_row)
            return self._per_row(params, model_state, batch, key, self._train)

        spec: Any = PartitionSpec()
        mapped = _jax.shard_map(run, mesh=self._mesh, in_specs=(spec,) * 5, out_specs=spec)
        return jax.jit(mapped).trace(*self._variables, self._take(rows), 0)

    def _take(self, rows: np.ndarray) -> Batch:
        return jax.tree.map(lambda x: np.asarray(x)[rows], self._batch)


def _warn_of_ids(program: _Program, batch: Batch, what: str) -> None:
    """Warns of ids in the inputs of a batch for which an embedding has no entry."""
    for path, size in program.embedded_inputs():
        ids = np.asarray(dict(jax.tree.leaves_with_path(batch.inputs))[path])
        if len(ids) and (ids.max() >= size or ids.min() < -size):
            logger.warning(
                "%s looks up ids from %d to %d of the inputs%s in an embedding of %d entries, "
                "which gives NaN for ids that it lacks: the largest is %d. Correct the ids, or make the "
                "embedding larger (num_embeddings).",
                what, ids.min(), ids.max(), jax.tree_util.keystr(path), size, size - 1,
            )  # fmt: skip


def _compiled(traced: Any) -> Any:
    return traced.lower().compile(_jax.options_of_one_run())


class _Applied(NamedTuple):
    """What a model computes from rows: outputs, and the losses that it adds, if any."""

    outputs: Any
    penalty: Any


def _problem_of_penalty(program: _Program, what: str) -> ValueError | None:
    """Returns what is wrong if the losses that a model adds are not a mean over rows, or None."""
    if not program.adds_loss_of_rows():
        return None
    halves = np.split(np.arange(program.num_rows // 2 * 2), 2)
    rows = np.concatenate(halves)
    try:
        whole = float(program.run_alone(rows, 0).penalty)
        parts = [float(program.run_alone(half, half[0]).penalty) for half in halves]
    except (TypeError, ValueError):  # The model may be written for one number of rows.
        return None
    close = program.tolerance * np.max(np.abs(parts))
    if np.isclose(whole, np.mean(parts), rtol=0, atol=close, equal_nan=True):
        return None
    return ValueError(
        f"{what} adds losses (sow, or variables of a class Loss) that are not a mean over rows: "
        f"{whole:.6g} for {len(rows)} rows, but {parts[0]:.6g} and {parts[1]:.6g} for the "
        "halves of them. Results would depend on the number of devices. Compute one value per row, "
        "and add jnp.mean of them."
    )


def _problem(program: _Program, what: str, sizes: bool) -> ValueError | None:
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
            return ValueError(
                f"{what} compares rows of a batch with each other: {seen} among other rows. "
                f"{_ALL_ROWS}"
            )
        return ValueError(
            f"{what} gives a row values that depend on its position in the batch: {seen} at "
            f"another position. {_PLACES}"
        )
    if not sizes:
        return None
    seen = _difference(
        whole,
        back,
        program.run_alone(rows[back], half),
        slice(None),
        max(program.tolerance, _SIZE_TOLERANCE),
    )
    if seen is None:
        return None
    return ValueError(
        f"{what} gives a row values that depend on the number of rows: {seen} in a smaller one. Do "
        f"not average over the batch: the step does. {_ALL_ROWS}"
    )


def _difference(
    values: Any, rows: slice, others: Any, other_rows: slice, tolerance: float
) -> str | None:
    """Describes how rows of two pytrees of arrays `[rows, ...]` differ; None if they are equal.

    Arrays without floating numbers are not compared: a small difference may choose another class.
    """
    for left, right in zip(jax.tree.leaves(values), jax.tree.leaves(others), strict=True):
        if not jnp.issubdtype(left.dtype, jnp.floating) or left.ndim == 0:
            continue
        left, right = left[rows].astype(np.float64), right[other_rows].astype(np.float64)
        scale = np.max(np.abs(left), where=np.isfinite(left), initial=0.0)
        is_same = np.isclose(left, right, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
        if not is_same.all():
            index = tuple(np.argwhere(~is_same)[0])
            return f"a row gets {left[index]:.6g} in one batch but {right[index]:.6g}"
    return None


def outputs_per_row(adapter: Adapter) -> PerRow:
    """Returns the forward pass of a model as a function for `problem_of_rows`."""

    def per_row(
        params: Any, model_state: Any, batch: Batch, key: jax.Array | None, train: bool
    ) -> tuple[Any, Any]:
        applied = adapter.apply(params, model_state, batch.inputs, key=key, train=train, mask=None)
        if adapter.adds_means and train:
            return _Applied(applied.outputs, applied.penalty), applied.model_state
        return applied.outputs, applied.model_state

    return per_row
