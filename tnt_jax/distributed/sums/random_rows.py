"""Random numbers per row of the global batch: dropout does not depend on the number of devices.

A key of the implementations below behaves like a threefry key, except for arrays that have a
dimension of rows. These are filled from counters (row of the global batch, position in the row), so
rank 3 of 4 draws the numbers that a single device draws for the same rows. All other arrays are the
same on every rank.

Sizes do not tell which dimension that is: a mask `[8, 1]` over 8 positions looks like one of 8
rows. A function is therefore traced for two numbers of rows; the dimension is the one that changes.
The key of `batch_key` draws nothing itself; that of `key_for` draws the arrays of a function.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tnt_jax import _jax

Shape = tuple[int, ...]
# Name of the primitive and shape: keys and numbers are told apart.
Drawn = tuple[str, Shape]
# Words of a key: two of threefry, and the rank's first row in the global batch.
_KEY_WORDS = 3


class DrawError(ValueError):
    """Nothing tells which numbers a function draws per row."""


class RowDim(NamedTuple):
    """The dimension of an array that holds its rows, `per_row` consecutive entries each."""

    dim: int
    per_row: int


@dataclass(frozen=True)
class Draws:
    """Random arrays that a function draws, and how they depend on its number of rows.

    Each kind of array comes once, as it is drawn for one row, with its dimension of rows, or None.
    `unknown` says why it cannot be told which arrays are drawn per row; None if it can.
    """

    kinds: frozenset[tuple[Drawn, RowDim | None]] = frozenset()
    unknown: str | None = None

    def row_dims(self, num_rows: int) -> dict[Drawn, set[RowDim | None]]:
        """Returns the possible dimensions of rows of each array that is drawn for `num_rows`."""
        found: dict[Drawn, set[RowDim | None]] = {}
        for (name, shape), rows in self.kinds:
            found.setdefault((name, _grown(shape, rows, num_rows)), set()).add(rows)
        return found

    def problem(self, num_rows: int) -> str | None:
        """Returns why the arrays that are drawn for `num_rows` rows are not told apart, or None."""
        if self.unknown is not None:
            return self.unknown
        alike = [shape for (_, shape), dims in self.row_dims(num_rows).items() if len(dims) > 1]
        if not alike:
            return None
        return (
            f"with {num_rows} row(s) on a device, an array of random numbers per row and one for "
            f"all rows have the same shape {list(alike[0])}"
        )


_ADVICE = (
    "Results would depend on the number of devices. Choose a batch size that gives each device "
    "another number of rows (also for the last batch, or leave that out with drop_remainder), or "
    "draw numbers that all rows share with another shape, such as one dimension fewer."
)


def draws_of(function: Callable[[jax.Array, Any], Any], key: jax.Array, rows: Any) -> Draws:
    """Returns what a function of a key and rows draws, by tracing it for two numbers of rows."""
    probe = jax.random.wrap_key_data(jax.random.key_data(key), impl=_ROWS)

    def program(num_rows: int) -> Any:
        sized = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), jnp.result_type(x)), rows
        )

        def run(sized: Any) -> Any:
            alike = jax.tree.map(lambda x, like: _jax.vary(x, _jax.varying_axes(like)), sized, rows)
            return function(probe, alike)

        return jax.make_jaxpr(run)(sized).jaxpr

    num_rows = jax.tree.leaves(rows)[0].shape[0]
    here = program(num_rows)
    if not _jax.draws_in(here, probe.dtype):
        return Draws()
    unknown = ""
    for other_rows in (2 * num_rows, num_rows + 1):
        try:
            other = program(other_rows)
        except Exception as error:  # A function may be written for one number of rows.
            unknown = unknown or f"it fails with {other_rows} row(s) ({error})"
            continue
        # Whether a draw that nothing needs is in a traced program depends on when Python frees it.
        for clean in (lambda jaxpr: jaxpr, _jax.without_dead_code):
            ours, theirs = (_jax.draws_in(clean(jaxpr), probe.dtype) for jaxpr in (here, other))
            draws = _compared(ours, theirs, num_rows, other_rows)
            if draws.unknown is None:
                return draws
        return draws
    return Draws(unknown=unknown)


def _compared(here: list[Drawn], other: list[Drawn], num_rows: int, other_rows: int) -> Draws:
    """Returns the draws of a function that draws these arrays for two numbers of rows."""
    if len(here) != len(other):
        numbers = f"{len(here)} arrays for {num_rows} row(s), but {len(other)} for {other_rows}"
        return Draws(unknown=f"it draws {numbers}")
    found = set()
    for (name, shape), (_, changed) in zip(here, other, strict=True):
        rows = _row_dim(shape, changed, num_rows, other_rows)
        if isinstance(rows, str):
            return Draws(unknown=rows)
        found.add(((name, _grown(shape, rows, 1)), rows))
    return Draws(frozenset(found))


def _row_dim(shape: Shape, changed: Shape, num_rows: int, other_rows: int) -> RowDim | str | None:
    """Returns the dimension of rows of an array that is drawn twice, or why nothing tells it."""
    differ = [dim for dim, (a, b) in enumerate(zip(shape, changed, strict=False)) if a != b]
    if len(shape) == len(changed) and not differ:
        return None
    if len(shape) == len(changed) and len(differ) == 1:
        dim = differ[0]
        per_row, rest = divmod(shape[dim], num_rows)
        if not rest and changed[dim] == per_row * other_rows:
            return RowDim(dim, per_row)
    return (
        f"it draws an array {list(shape)} for {num_rows} row(s), but {list(changed)} for "
        f"{other_rows}; one dimension must be a multiple of the rows"
    )


def _grown(shape: Shape, rows: RowDim | None, num_rows: int) -> Shape:
    """Returns a shape with the dimension of rows, if any, for so many rows."""
    if rows is None:
        return shape
    return (*shape[: rows.dim], rows.per_row * num_rows, *shape[rows.dim + 1 :])


def key_for(
    function: Callable[[jax.Array, Any], Any],
    key: jax.Array,
    rows: Any,
    known: dict[Any, Draws],
    *,
    kind: Any = None,
) -> jax.Array:
    """Returns the key with which `function(key, rows)` draws per row of the global batch.

    Keys that `row_key` did not make are returned as they are. `known` keeps the draws of the
    function, by the structure of `rows` and by `kind`: with another it may draw other arrays. A
    DrawError says if it cannot be told which are drawn per row.
    """
    if (base := jax.random.key_impl(key)) not in (_ROWS, _WHOLE):
        return key
    leaves, structure = jax.tree.flatten(rows)
    kind = (kind, structure, tuple((x.shape[1:], jnp.result_type(x)) for x in leaves))
    if kind not in known:
        known[kind] = draws_of(function, key, rows)
    draws, num_rows = known[kind], leaves[0].shape[0]
    if (problem := draws.problem(num_rows)) is None:
        dims = ((drawn, next(iter(dims))) for drawn, dims in draws.row_dims(num_rows).items())
        return jax.random.wrap_key_data(jax.random.key_data(key), impl=_impl(frozenset(dims)))
    if base == _WHOLE:
        return key
    raise DrawError(f"Random numbers cannot be drawn by row: {problem}. {_ADVICE}")


def batch_key(
    words: jax.Array,
    step: jax.Array | int,
    num_rows: int,
    *,
    first_rank: jax.Array | int = 0,
    rows_before: jax.Array | None = None,
) -> jax.Array:
    """Returns this rank's key for one step, inside `shard_map` over the data axis.

    `words` are those of the run, uint32 `[2]`; `num_rows` counts this rank's rows with padding, and
    `first_rank` the ranks of other meshes that compute earlier rows, or `rows_before` those rows.
    """
    axes, first_row = _jax.rank_axes(), 0
    if rows_before is not None:
        first_row = rows_before + jax.lax.axis_index(axes).astype(jnp.uint32) * num_rows
    elif not (isinstance(first_rank, int) and first_rank == 0 and jax.lax.axis_size(axes) == 1):
        first_row = (first_rank + jax.lax.axis_index(axes)) * num_rows
    return row_key(step_key(words, step), first_row)


def evaluation_key(first_row: jax.Array | int, num_rows: int) -> jax.Array:
    """Returns this rank's key for a batch of evaluation, inside `shard_map` over the data axis.

    `first_row` counts the rows before the batch, `num_rows` those of this rank with padding.
    """
    own = jax.lax.axis_index(_jax.rank_axes()) * num_rows
    return data_key(jnp.asarray(first_row, jnp.uint32) + own.astype(jnp.uint32))


def data_key(first_row: jax.Array | int) -> jax.Array:
    """Returns the key of evaluation for rows that begin at `first_row` of the data."""
    return row_key(step_key(jnp.zeros(2, jnp.uint32), 0), first_row)


def step_key(words: jax.Array, step: jax.Array | int) -> jax.Array:
    """Returns the key of a step, the same on every rank, from the words `[2]` of the run."""
    return jax.random.fold_in(jax.random.wrap_key_data(words, impl="threefry2x32"), step)


def row_key(key: jax.Array, first_row: jax.Array | int) -> jax.Array:
    """Returns a key for rows that begin at `first_row` of the global batch; see `key_for`.

    With the number 0 it is the key of a device that holds the whole batch, which draws any array.
    """
    words = _alike(jax.random.key_data(key), jnp.asarray(first_row, jnp.uint32)[None])
    is_whole = isinstance(first_row, int) and first_row == 0
    if _ROWS is None:  # On several devices, `_jax.shard_map` refuses to draw.
        return key
    return jax.random.wrap_key_data(jnp.concatenate(words), impl=_WHOLE if is_whole else _ROWS)


def row_dim_of(dtype: Any, drawn: Drawn) -> RowDim | None:
    """Returns the dimension of rows of what keys of a dtype draw; None if there is none."""
    return _known_draws.get(dtype, {}).get(drawn)


def keys_of_parts(key: jax.Array, num_parts: int, part_rows: int) -> jax.Array:
    """Returns the words of keys for consecutive parts of a rank's rows, uint32 `[parts, words]`.

    `key` is one of `row_key` for all rows; each part has `part_rows` of them.
    """
    words = jax.random.key_data(key)
    first = words[2] + jnp.arange(num_parts, dtype=jnp.uint32) * part_rows
    columns = (jnp.broadcast_to(x, num_parts) for x in (words[0], words[1], first))
    return jnp.stack(_alike(*columns), axis=-1)


def key_of_part(words: jax.Array) -> jax.Array:
    """Returns the key with the words of one of the `keys_of_parts`."""
    return jax.random.wrap_key_data(words, impl=_ROWS)


def draws_by_row(x: Any) -> bool:
    """Returns whether a value is one key of `key_for`."""
    return getattr(x, "dtype", None) in _known_draws and x.ndim == 0


def key_of_fewer_rows(words: jax.Array, like: jax.Array, num_rows: int) -> jax.Array:
    """Returns the key with words of `keys_of_parts` that draws for fewer rows what `like` draws.

    A DrawError says if it cannot be told which arrays are drawn per row.
    """
    dims = _known_draws[like.dtype].items()
    known = frozenset(((name, _grown(shape, dim, num_rows)), dim) for (name, shape), dim in dims)
    if len({drawn for drawn, _ in known}) < len(dims):
        raise DrawError(
            f"Random numbers cannot be drawn by row: with {num_rows} row(s) at once, arrays that "
            f"are drawn per row and for all rows have the same shape. {_ADVICE}"
        )
    return jax.random.wrap_key_data(words, impl=_impl(known))


def _alike(*arrays: jax.Array) -> list[jax.Array]:
    """Makes all arrays varying if one is: in `shard_map` operands must agree."""
    if any(_jax.is_varying(x) for x in arrays):
        return [_jax.make_varying(x) for x in arrays]
    return list(arrays)


def _seed(seed: jax.Array) -> jax.Array:
    # A fresh seed belongs to no batch: its numbers are the same on every rank.
    words = _jax.threefry_prng_impl.seed(seed)
    return jnp.concatenate([words, jnp.zeros_like(words[:1])])


def _fold_in(key: jax.Array, data: jax.Array | int) -> jax.Array:
    words = _jax.threefry_prng_impl.fold_in(key[:2], jnp.asarray(data))
    return jnp.concatenate(_alike(words, key[2:]))


def _counters(
    key: jax.Array, shape: Shape, rows: RowDim | None
) -> tuple[jax.Array, jax.Array, jax.Array, int]:
    """Returns uint32 places of entries before, along (in the global batch) and after the rows' dim.

    They have the shape of the array but for joined dimensions. The last is how many are after.
    """
    dim, per_row = rows or (0, 0)
    shape = shape or (1,)
    joined = (math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :]))
    before, row, after = (jax.lax.broadcasted_iota(jnp.uint32, joined, i) for i in range(3))
    row = row + key[2] * per_row if rows else row
    return before, row, after, joined[2]


def _split(row_dims: Any, key: jax.Array, shape: Shape) -> jax.Array:
    """Returns keys as JAX's own partitionable threefry does, but by row of the global batch."""
    rows = row_dims("random_split", shape)
    before, row, after, num_after = _counters(key, shape, rows)
    counts = (before, row * num_after + after)
    words = _jax.threefry2x32_p.bind(*_alike(key[0], key[1], *counts))
    keys = jnp.stack(words, axis=-1).reshape(*shape, 2)
    # The key of one row is the same wherever the row is.
    first_row = jnp.zeros_like(key[2:]) if rows else key[2:]
    return jnp.concatenate(_alike(keys, jnp.broadcast_to(first_row, (*shape, 1))), axis=-1)


def _random_bits(row_dims: Any, key: jax.Array, bit_width: int, shape: Shape) -> jax.Array:
    """Returns random bits from the counters (row of the global batch, position in the row)."""
    before, row, after, num_after = _counters(key, shape, row_dims("random_bits", shape))
    counts = (row, before * num_after + after)
    # Widths as in JAX's own partitionable threefry: both words for 64 bits, their exclusive or
    # below.
    high, low = _jax.threefry2x32_p.bind(*_alike(key[0], key[1], *counts))
    if bit_width == 64:
        bits = (high.astype(jnp.uint64) << jnp.uint64(32)) | low.astype(jnp.uint64)
    else:
        bits = (high ^ low).astype(f"uint{bit_width}")
    return bits.reshape(shape)


def _define(name: str, row_dims: Callable[[str, Shape], RowDim | None]) -> Any:
    return _jax.define_prng_impl(
        key_shape=(_KEY_WORDS,),
        seed=_seed,
        split=partial(_split, row_dims),
        random_bits=partial(_random_bits, row_dims),
        fold_in=_fold_in,
        name=name,
        tag=name,
    )


# What keys of the implementations that were made draw by row, by their dtype.
_known_draws: dict[Any, dict[Drawn, RowDim | None]] = {}


@cache
def _impl(known: frozenset[tuple[Drawn, RowDim | None]]) -> Any:
    row_dims = dict(known)

    def row_dim(name: str, shape: Shape) -> RowDim | None:
        if (name, shape) not in row_dims:
            raise DrawError(
                f"Whether random numbers of the shape {list(shape)} are drawn per row cannot be "
                "told: the traced function does not show them. jax.random.gamma and what uses it "
                "(beta, dirichlet, t) are not supported, nor are numbers that are drawn in a rule "
                "for derivatives (jax.custom_vjp, jax.custom_jvp) alone."
            )
        return row_dims[name, shape]

    impl = _define("tnt_rows", row_dim)
    words = jnp.zeros(_KEY_WORDS, jnp.uint32)
    dtype = jax.eval_shape(lambda: jax.random.wrap_key_data(words, impl=impl)).dtype
    _known_draws[dtype] = row_dims
    return impl


def _refuse(name: str, shape: Shape) -> None:
    raise DrawError(f"Nothing says which dimension of the shape {list(shape)} holds the rows.")


# Keys before it is known what is drawn from them: of some rows, and of the whole batch.
_ROWS = _define("tnt_some_rows", _refuse)
_WHOLE = _define("tnt_all_rows", lambda name, shape: None)
