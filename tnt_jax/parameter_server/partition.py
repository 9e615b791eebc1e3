"""Which rows of which array each server holds: partitioners, and a plan that balances bytes.

The three partitioners divide arrays as those of `tf.distribute.experimental.partitioners` do: along
the first dimension, into parts that differ by one row at most.

An interpreter runs a traced update on a part of the variables, and tells what it needs of the
others. Each value in the program of an Optax transformation is one of three kinds. It is the *same*
everywhere (a count, a learning rate); it belongs to the *rows* of one variable, element by element;
or it mixes the elements of some variables, as a *whole*. Elementwise transformations know the first
two alone, and need no other server. A scalar that is summed over all rows of variables, such as the
square of a global norm, is a *point* where servers exchange: each has the sum over its rows, and
the rest of the program needs the total.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from tnt_jax import _jax
from tnt_jax.train.steps.row_dependence import ELEMENTWISE

_REDUCTIONS = {
    "reduce_sum": "sum",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_and": "min",
    "reduce_or": "max",
}
_RESHAPING = ("broadcast_in_dim", "squeeze", "reshape", "expand_dims")
_ORDERED = ("dot_general", "sort", "cumsum")
# Stands for "the shapes of the variables" among the variables that a value depends on.
_SHAPES = -1


@dataclass(frozen=True)
class Kind:
    """Dependence of a value of the program on rows and variables."""

    name: str  # "same", and then all elements are equal, "rows" or "whole".
    variables: frozenset[int] = frozenset()
    depth: int = 0  # Rounds of exchange that it needs.
    because: str = ""  # The operation that made it a whole.


SAME = Kind("same")


def rows_of(index: int) -> Kind:
    """Returns the kind of what lies along the rows of a variable."""
    return Kind("rows", frozenset([index]))


def whole_of(*indices: int) -> Kind:
    """Returns the kind of what mixes elements of variables."""
    return Kind("whole", frozenset(indices), because="its state")


class Point(NamedTuple):
    """A scalar that servers exchange by sum, max or min; known in round `depth`, from 1 on."""

    operation: str
    depth: int


@dataclass
class Interpreter:
    """Evaluates a traced program for one server's rows, with totals of other servers put in.

    If it `exchanges`, reductions of rows to scalars are `points`, of which `partials` are this
    server's own values. These are taken where no total is known.
    """

    exchanges: bool
    totals: Sequence[Any] = ()
    points: list[Point] = field(default_factory=list)
    partials: list[Any] = field(default_factory=list)

    def run(
        self, program: Any, operands: Sequence[Any], kinds: Sequence[Kind]
    ) -> tuple[list[Any], list[Kind]]:
        """Returns the results of a `ClosedJaxpr` and their kinds."""
        jaxpr = program.jaxpr
        values: dict[Any, tuple[Any, Kind]] = {}
        for variable, constant in zip(jaxpr.constvars, program.consts, strict=True):
            values[variable] = (constant, SAME if jnp.ndim(constant) == 0 else whole_of())
        values |= dict(zip(jaxpr.invars, zip(operands, kinds, strict=True), strict=True))

        def read(variable: Any) -> tuple[Any, Kind]:
            return (variable.val, SAME) if isinstance(variable, _jax.Literal) else values[variable]

        for equation in jaxpr.eqns:
            read_all = [read(variable) for variable in equation.invars]
            inputs, known = [value for value, _ in read_all], [kind for _, kind in read_all]
            if (called := _jax.called_program(equation)) is not None:
                results, found = self.run(called, inputs, known)
            else:
                results, found = self._step(equation, inputs, known)
            values |= zip(equation.outvars, zip(results, found, strict=True), strict=True)
        outputs = [read(variable) for variable in jaxpr.outvars]
        return [value for value, _ in outputs], [kind for _, kind in outputs]

    def _step(
        self, equation: Any, inputs: list[Any], kinds: list[Kind]
    ) -> tuple[list[Any], list[Kind]]:
        results = _jax.run_equation(equation, inputs)
        operation = _scalar_reduction(equation, kinds)
        if operation is None or not self.exchanges:
            return results, [_kind_of(equation, out, kinds) for out in equation.outvars]
        partial, depth = results[0], kinds[0].depth + 1
        total = self.totals[len(self.points)] if self.totals else None
        self.points.append(Point(operation, depth))
        self.partials.append(partial)
        known = partial if total is None else jnp.asarray(total).astype(partial.dtype)
        return [known], [Kind("same", depth=depth)]


def _scalar_reduction(equation: Any, kinds: list[Kind]) -> str | None:
    """Returns over what a scalar is made of all rows of one variable, or None."""
    if equation.outvars[0].aval.shape != () or any(kind.name != "rows" for kind in kinds):
        return None
    if equation.primitive.name == "dot_general":
        return "sum" if len(frozenset.union(*(kind.variables for kind in kinds))) == 1 else None
    return _REDUCTIONS.get(equation.primitive.name)


def _kind_of(equation: Any, out: Any, kinds: list[Kind]) -> Kind:
    """Returns the kind of a result of an equation that is no point of exchange."""
    name, shape = equation.primitive.name, out.aval.shape
    depth = max((kind.depth for kind in kinds), default=0)
    variables = frozenset().union(*(kind.variables for kind in kinds))
    whole = next((kind for kind in kinds if kind.name == "whole"), None)
    if whole is None and variables:
        keeps_shape = name in _RESHAPING and equation.invars[0].aval.shape == shape
        if keeps_shape or (name in ELEMENTWISE and len(variables) == 1):
            return Kind("rows", variables, depth)
    elif whole is None:
        is_scalar = shape == () and name not in _REDUCTIONS
        if is_scalar or name in _RESHAPING or name in ELEMENTWISE:
            return Kind("same", depth=depth)
    # The sum of no elements is the same everywhere.
    has_elements = any(variable.aval.size for variable in equation.invars)
    if not variables and has_elements and (name in _REDUCTIONS or name in _ORDERED):
        variables = frozenset([_SHAPES])
    because = whole.because if whole is not None and len(whole.variables) > 1 else name
    return Kind("whole", variables, depth, because)


Rows = tuple[int, int]
"""A range of rows: the first, and the one after the last."""


Partitioner = Callable[[tuple[int, ...], Any], int]
"""Maps shape and dtype of an array to the number of parts along its first dimension."""


@dataclass(frozen=True)
class FixedShardsPartitioner:
    """Divides every array into the same number of parts, or as many as it has rows.

    Attributes:
        num_shards: Number of parts, at least 1.
    """

    num_shards: int

    def __post_init__(self) -> None:
        check_at_least(1, num_shards=self.num_shards)

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> int:
        """Returns the number of parts of an array."""
        return _at_most_rows(self.num_shards, shape)


@dataclass(frozen=True)
class MinSizePartitioner:
    """Divides arrays into as many parts as possible that have about a least size.

    Attributes:
        min_shard_bytes: Least size of a part, in bytes.
        max_shards: Largest number of parts.
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1

    def __post_init__(self) -> None:
        check_at_least(1, min_shard_bytes=self.min_shard_bytes, max_shards=self.max_shards)

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> int:
        """Returns the number of parts of an array."""
        # Rounded up, as in TensorFlow: parts may be somewhat smaller.
        parts = -(-_num_bytes(shape, dtype) // self.min_shard_bytes)
        return _at_most_rows(min(parts, self.max_shards), shape)


@dataclass(frozen=True)
class MaxSizePartitioner:
    """Divides arrays into parts of at most a given size.

    A row is never divided: one that is larger is a part of its own.

    Attributes:
        max_shard_bytes: Largest size of a part, in bytes.
        max_shards: Largest number of parts, which counts more than their size; None for any.
    """

    max_shard_bytes: int
    max_shards: int | None = None

    def __post_init__(self) -> None:
        check_at_least(1, max_shard_bytes=self.max_shard_bytes, max_shards=self.max_shards or 1)

    def __call__(self, shape: tuple[int, ...], dtype: Any) -> int:
        """Returns the number of parts of an array."""
        if not shape or not shape[0]:
            return 1
        row_bytes = max(1, _num_bytes(shape[1:], dtype))
        parts = -(-shape[0] // max(1, self.max_shard_bytes // row_bytes))
        return _at_most_rows(min(parts, self.max_shards or parts), shape)


@dataclass(frozen=True)
class ShardPlan:
    """Which ranges of rows, in order, of each array of a model lie on which server.

    On a server every array has its place: those of which it has no row have a first dimension of
    0, so that functions of the whole tree of arrays work on each server.
    """

    shapes: tuple[tuple[int, ...], ...]
    rows: tuple[tuple[tuple[Rows, ...], ...], ...]

    @property
    def num_servers(self) -> int:
        """Number of servers."""
        return len(self.rows)

    def held(self, server: int) -> list[int]:
        """Returns the numbers of the arrays of which a server holds rows."""
        return [index for index, ranges in enumerate(self.rows[server]) if ranges]

    def is_divided(self, index: int) -> bool:
        """Returns whether several servers hold rows of an array."""
        return sum(bool(of_server[index]) for of_server in self.rows) > 1

    def shape_on(self, server: int, index: int) -> tuple[int, ...]:
        """Returns the shape of an array on a server, `(0, ...)` if it holds no row."""
        shape, ranges = self.shapes[index], self.rows[server][index]
        if not shape:
            return () if ranges else (0,)
        return (sum(stop - start for start, stop in ranges), *shape[1:])

    def part(self, server: int, index: int, array: np.ndarray) -> np.ndarray:
        """Returns a server's rows of an array `[rows, ...]`, divided like that of the index."""
        ranges = self.rows[server][index]
        if not self.shapes[index]:
            return array if ranges else np.zeros((0,), array.dtype)
        if not ranges:
            return array[:0]
        if len(ranges) == 1:
            return array[slice(*ranges[0])]
        return np.concatenate([array[slice(*each)] for each in ranges])

    def whole(self, index: int, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Returns an array from the parts of all servers, in their order."""
        owners = [server for server, of_server in enumerate(self.rows) if of_server[index]]
        if len(owners) == 1 and len(self.rows[owners[0]][index]) == 1:
            return parts[owners[0]]
        first = parts[owners[0]]
        result = np.empty((self.shapes[index][0], *first.shape[1:]), first.dtype)
        for server in owners:
            begin = 0
            for start, stop in self.rows[server][index]:
                result[start:stop] = parts[server][begin : begin + stop - start]
                begin += stop - start
        return result

    def packed(self, server: int, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns what is sent to a server of whole arrays: its rows of those that it holds."""
        return [self.part(server, index, arrays[index]) for index in self.held(server)]

    def unpacked(self, pieces: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
        """Returns whole arrays from what `packed` gave for each server."""
        by_array: list[list[Any]] = [[None] * self.num_servers for _ in self.shapes]
        for server, sent in enumerate(pieces):
            for index, array in zip(self.held(server), sent, strict=True):
                by_array[index][server] = array
        return [self.whole(index, parts) for index, parts in enumerate(by_array)]


def plan_shards(
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[Any],
    *,
    num_servers: int,
    partitioner: Partitioner | None = None,
    num_divided: int | None = None,
) -> ShardPlan:
    """Returns which rows of each array each server holds.

    The parts of all arrays are placed from the largest to the smallest, each on the server that has
    the fewest bytes so far. Only the first `num_divided` arrays are divided, if that is given. A
    ValueError says that the partitioner returns no positive number.
    """
    parts: list[tuple[int, int, Rows]] = []
    for index, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True)):
        num_parts = 1
        if partitioner is not None and (num_divided is None or index < num_divided):
            num_parts = partitioner(tuple(shape), dtype)
        if not isinstance(num_parts, int) or num_parts < 1:
            raise ValueError(
                f"A partitioner returns the number of parts of an array, at least 1, but "
                f"{partitioner!r} returned {num_parts!r} for the shape {tuple(shape)}."
            )
        for rows in _divided(shape[0] if shape else 1, num_parts):
            part_shape = (rows[1] - rows[0], *shape[1:])
            parts.append((_num_bytes(part_shape, dtype), index, rows))
    loads = [0] * num_servers
    placed: list[list[list[Rows]]] = [[[] for _ in shapes] for _ in range(num_servers)]
    for num_bytes, index, rows in sorted(parts, key=lambda part: (-part[0], part[1], part[2])):
        server = loads.index(min(loads))
        # An empty array costs nothing, and would come to rest on the first server always.
        loads[server] += max(num_bytes, 1)
        placed[server][index].append(rows)
    ranges = tuple(tuple(tuple(sorted(each)) for each in of_server) for of_server in placed)
    return ShardPlan(tuple(tuple(shape) for shape in shapes), ranges)


def _divided(num_rows: int, num_parts: int) -> list[Rows]:
    """Returns ranges of rows, of which the first ones have one row more if need be."""
    num_parts = max(1, min(num_parts, num_rows))
    size, longer = divmod(num_rows, num_parts)
    starts = [part * size + min(part, longer) for part in range(num_parts + 1)]
    return list(itertools.pairwise(starts))


def _at_most_rows(num_parts: int, shape: tuple[int, ...]) -> int:
    return max(1, min(num_parts, shape[0] if shape else 1))


def _num_bytes(shape: Sequence[int], dtype: Any) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def check_at_least(least: int, **values: Any) -> None:
    """Raises a ValueError if an argument is no integer, or a smaller one."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, but is {value!r}.")
