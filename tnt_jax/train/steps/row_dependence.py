"""Finds out from a traced program whether values of a row depend on other rows of the batch.

Nothing runs: for every array of the program it is known which dimension holds the rows. An
operation that combines rows, such as a sum over that dimension, is found in every branch and loop,
whatever the values are. What cannot be told stays unknown; a run with other rows may tell it
(`keras_compat.compiling.row_checks`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from tnt_jax import _jax
from tnt_jax.distributed.sums.random_rows import row_dim_of

_MARK = "tnt_jax values of rows"


@dataclass(frozen=True)
class Free:
    """An array that does not depend on the batch; along some dimensions its values may differ."""

    varying: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Rows:
    """An array whose entries at index `i` of a dimension depend on row `i // inner` alone."""

    dim: int
    inner: int = 1


@dataclass(frozen=True)
class Unknown:
    """An array of which it cannot be told how it depends on rows."""


@dataclass(frozen=True)
class Mixed:
    """An array whose values depend on several rows, which an operation combined, in some line."""

    operation: str
    line: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.operation} ({self.line})" if self.line else self.operation


@dataclass(frozen=True)
class Exchanged:
    """An array that is made of what ranks have exchanged, by the user's own call."""


Dependence = Free | Rows | Unknown | Mixed | Exchanged


def marked(values: jax.Array) -> jax.Array:
    """Returns values of rows with a mark that `dependences` finds in a program."""
    return checkpoint_name(values, _MARK)


def dependences(
    jaxpr: Any, holds_rows: Sequence[bool]
) -> tuple[list[Dependence], list[Dependence]]:
    """Returns how results of a program, and what it marks, depend on operands that hold rows."""
    marks: list[Dependence] = []
    given = [
        Rows(0) if is_batch else _free(v.aval)
        for v, is_batch in zip(jaxpr.invars, holds_rows, strict=True)
    ]
    return _of_program(jaxpr, given, marks), marks


def is_by_row(found: Dependence) -> bool:
    """Returns whether it is known that an array `[rows, ...]` depends on each row by itself."""
    is_alike = isinstance(found, Free) and 0 not in found.varying
    return is_alike or found in (Rows(0), Exchanged())


def _of_program(
    jaxpr: Any, operands: Sequence[Dependence], marks: list[Dependence]
) -> list[Dependence]:
    known: dict[Any, Dependence] = {v: _free(v.aval) for v in jaxpr.constvars}
    known |= dict(zip(jaxpr.invars, operands, strict=True))

    def of(variable: Any) -> Dependence:
        return _free(variable.aval) if isinstance(variable, _jax.Literal) else known[variable]

    for equation in jaxpr.eqns:
        found = _of_equation(equation, [of(v) for v in equation.invars], marks)
        known.update(zip(equation.outvars, found, strict=True))
    return [of(v) for v in jaxpr.outvars]


def _free(aval: Any) -> Free:
    shape = getattr(aval, "shape", ())
    return Free(frozenset(dim for dim, size in enumerate(shape) if size != 1))


def _of_equation(
    equation: Any, found: list[Dependence], marks: list[Dependence]
) -> list[Dependence]:
    name = equation.primitive.name
    inner = _CONTROL.get(name)
    if inner is not None:
        return inner(equation, found, marks)
    called = _jax.called_program(equation) or equation.params.get("jaxpr")
    if called is not None and name in (*_jax.CALLS, "shard_map", "remat2"):
        return _of_program(getattr(called, "jaxpr", called), found, marks)
    if name in ("random_bits", "random_split") and isinstance(found[0], Free):
        drawn = name, equation.params["shape"]
        rows = row_dim_of(equation.invars[0].aval.dtype, drawn)
        return [_spread(equation, found) if rows is None else Rows(*rows)]
    if _jax.is_collective(equation) and not all(isinstance(x, Free) for x in found):
        return [Exchanged()] * len(equation.outvars)
    if any(isinstance(x, (Exchanged, Mixed, Unknown)) for x in found):
        return [joined(*found)] * len(equation.outvars)
    rule = _RULES.get(name)
    if rule is None:
        return [_spread(equation, found, out) for out in equation.outvars]
    made = rule(equation, found)
    if isinstance(made, Mixed):
        made = replace(made, line=_jax.line_of(equation))
    return [made] * len(equation.outvars)


def _spread(equation: Any, found: list[Dependence], out: Any = None) -> Dependence:
    """Returns what an unknown operation makes."""
    aval = (equation.outvars[0] if out is None else out).aval
    return _free(aval) if all(isinstance(x, Free) for x in found) else Unknown()


def joined(*found: Dependence) -> Dependence:
    """Returns how arrays of one shape, combined element by element, depend on rows."""
    for kind in (Exchanged, Mixed):
        if (worst := next((x for x in found if isinstance(x, kind)), None)) is not None:
            return worst
    if any(isinstance(x, Unknown) for x in found):
        return Unknown()
    rows = {x for x in found if isinstance(x, Rows)}
    if len({x.dim for x in rows}) > 1:
        return Mixed("a combination of each row with each")
    if len(rows) > 1:
        return Unknown()
    varying = frozenset[int]().union(*(x.varying for x in found if isinstance(x, Free)))
    if not rows:
        return Free(varying)
    (only,) = rows
    # What differs by the position of a row is no function of the row.
    return Unknown() if only.dim in varying else only


def _cast(equation: Any, found: list[Dependence]) -> Dependence:
    (x,), (result,) = equation.invars, equation.outvars
    return found[0] if x.aval.shape == result.aval.shape else _spread(equation, found)


def _moved(position: Callable[[Any, int], int | None], *, mixes: bool = True) -> Callable:
    """Returns the rule of an operation that works along some dimensions of its operands."""

    def rule(equation: Any, found: list[Dependence]) -> Dependence:
        lost = Mixed(equation.primitive.name) if mixes else Unknown()
        return joined(*(_placed(x, partial(position, equation), lost) for x in found))

    return rule


def _placed(x: Dependence, place: Callable[[int], int | None], lost: Dependence) -> Dependence:
    """Returns `x` with its dimensions at other places; `lost` if there is none for the rows."""
    if isinstance(x, Rows):
        dim = place(x.dim)
        return lost if dim is None else Rows(dim, x.inner)
    if isinstance(x, Free):
        return Free(frozenset(dim for dim in map(place, x.varying) if dim is not None))
    return x


def _without(name: str) -> Callable[[Any, int], int | None]:
    """Returns the position of a dimension once those that a parameter names are gone."""

    def position(equation: Any, dim: int) -> int | None:
        axes = equation.params[name]
        return None if dim in axes else dim - sum(axis < dim for axis in axes)

    return position


def _unless(name: str) -> Callable[[Any, int], int | None]:
    """Returns the position of a dimension along which an operation does not work."""

    def position(equation: Any, dim: int) -> int | None:
        axes = equation.params[name]
        return None if dim in (axes if isinstance(axes, tuple) else (axes,)) else dim

    return position


def _whole(equation: Any, dim: int) -> int | None:
    """Returns the position of a dimension of which everything is kept, as by a slice."""
    sizes = [v.aval.shape[dim] for v in (equation.invars[0], *equation.outvars)]
    return dim if len(set(sizes)) == 1 else None


def _of_window(equation: Any, dim: int) -> int | None:
    params = equation.params
    is_alone = params["window_dimensions"][dim] == 1 and params["padding"][dim] == (0, 0)
    return dim if is_alone and params["window_strides"][dim] == 1 else None


def _broadcast(equation: Any, found: list[Dependence]) -> Dependence:
    return _placed(found[0], equation.params["broadcast_dimensions"].__getitem__, Unknown())


def _reshaped(equation: Any, found: list[Dependence]) -> Dependence:
    old, new = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    x = found[0]
    if isinstance(x, Rows):
        before, after = math.prod(old[: x.dim]), math.prod(old[x.dim + 1 :])
        row_size, rows = x.inner * after, old[x.dim] // x.inner
        for dim, size in enumerate(new):
            rest = math.prod(new[dim + 1 :])
            is_same_place = math.prod(new[:dim]) == before and rest and row_size % rest == 0
            if is_same_place and size == rows * (row_size // rest):
                return Rows(dim, row_size // rest)
        return Unknown()
    assert isinstance(x, Free)
    spans = [(math.prod(old[:dim]), math.prod(old[: dim + 1])) for dim in x.varying]

    def overlaps(dim: int) -> bool:
        first, last = math.prod(new[:dim]), math.prod(new[: dim + 1])
        return any(low < last and first < high for low, high in spans)

    return Free(frozenset(dim for dim, size in enumerate(new) if size != 1 and overlaps(dim)))


def _dot(equation: Any, found: list[Dependence]) -> Dependence:
    contracted, batched = equation.params["dimension_numbers"]
    ranks = [v.aval.ndim for v in equation.invars]
    kept = [
        [dim for dim in range(rank) if dim not in (*over, *batch)]
        for rank, over, batch in zip(ranks, contracted, batched, strict=True)
    ]
    firsts = (len(batched[0]), len(batched[0]) + len(kept[0]))
    moved: list[Dependence] = []
    for x, batch, own, first in zip(found, batched, kept, firsts, strict=True):
        places = {dim: place for place, dim in enumerate(batch)}
        places |= {dim: first + place for place, dim in enumerate(own)}
        moved.append(_placed(x, places.get, Mixed("dot_general")))
    return joined(*moved)


def _convolved(equation: Any, found: list[Dependence]) -> Dependence:
    x, kernel = found
    numbers = equation.params["dimension_numbers"]
    is_plain = equation.params["batch_group_count"] == 1 and isinstance(kernel, Free)
    if isinstance(x, Rows) and is_plain and x.dim == numbers.lhs_spec[0]:
        return Rows(numbers.out_spec[0], x.inner)
    return _spread(equation, found)


def _gathered(equation: Any, found: list[Dependence]) -> Dependence:
    x, indices = found
    numbers = equation.params["dimension_numbers"]
    shape = equation.invars[0].aval.shape
    num_batch = equation.invars[1].aval.ndim - 1
    out_rank = equation.outvars[0].aval.ndim
    batch_out = [dim for dim in range(out_rank) if dim not in numbers.offset_dims]
    over, with_ = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    moved: list[Dependence] = []
    if isinstance(indices, Rows):
        if indices.dim == num_batch:
            return Unknown()
        moved.append(Rows(batch_out[indices.dim], indices.inner))
    if isinstance(x, Rows):
        windows = [d for d in range(len(shape)) if d not in (*numbers.collapsed_slice_dims, *over)]
        if x.dim in over:
            moved.append(Rows(batch_out[with_[over.index(x.dim)]], x.inner))
        elif x.dim in windows and equation.params["slice_sizes"][x.dim] == shape[x.dim]:
            moved.append(Rows(numbers.offset_dims[windows.index(x.dim)], x.inner))
        else:
            return Unknown()
    return joined(*moved) if moved else _free(equation.outvars[0].aval)


def _updated(equation: Any, found: list[Dependence]) -> Dependence:
    """The rule of `dynamic_update_slice`: the part has all rows, or none is known."""
    whole, part = (v.aval.shape for v in equation.invars[:2])
    rows = next((x for x in found[:2] if isinstance(x, Rows)), None)
    if rows is not None and whole[rows.dim] != part[rows.dim]:
        return Unknown()
    return joined(*found[:2])


def _padded(equation: Any, found: list[Dependence]) -> Dependence:
    x = found[0]
    if isinstance(x, Rows) and any(equation.params["padding_config"][x.dim]):
        return Unknown()
    return joined(x, found[1]) if isinstance(x, Rows) else _spread(equation, found)


def _concatenated(equation: Any, found: list[Dependence]) -> Dependence:
    dim = equation.params["dimension"]
    result = joined(*found)
    if isinstance(result, Free):
        return Free(result.varying | {dim})
    return Unknown() if isinstance(result, Rows) and result.dim == dim else result


def _cond(equation: Any, found: list[Dependence], marks: list[Dependence]) -> list[Dependence]:
    index, *operands = found
    results = [_of_program(branch.jaxpr, operands, marks) for branch in equation.params["branches"]]
    both = [joined(*found) for found in zip(*results, strict=True)]
    return both if isinstance(index, Free) else [joined(index, x) for x in both]


def _while(equation: Any, found: list[Dependence], marks: list[Dependence]) -> list[Dependence]:
    params = equation.params
    first, second = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    body = params["body_jaxpr"].jaxpr
    carry = _fixed_point(
        lambda carry: _of_program(body, [*found[first:second], *carry], marks), found[second:]
    )
    (goes_on,) = _of_program(params["cond_jaxpr"].jaxpr, [*found[:first], *carry], marks)
    return carry if isinstance(goes_on, Free) else [joined(x, Unknown()) for x in carry]


def _scan(equation: Any, found: list[Dependence], marks: list[Dependence]) -> list[Dependence]:
    first, num_carry = _jax.loop_sizes(equation)
    second = first + num_carry
    body = equation.params["jaxpr"]
    body = getattr(body, "jaxpr", body)
    # Of an array that a loop runs over, slices lack the first dimension.
    slices = [_placed(x, lambda dim: dim - 1 if dim else None, Unknown()) for x in found[second:]]
    outputs: list[Dependence] = []

    def run(carry: list[Dependence]) -> list[Dependence]:
        results = _of_program(body, [*found[:first], *carry, *slices], marks)
        outputs[:] = [_around(x, 0) for x in results[num_carry:]]
        return results[:num_carry]

    return _fixed_point(run, found[first:second]) + outputs


def _around(x: Dependence, axis: int) -> Dependence:
    """Returns how slices that are stacked along a new dimension depend on rows."""
    x = _placed(x, lambda dim: dim + (dim >= axis), Unknown())
    return Free(x.varying | {axis}) if isinstance(x, Free) else x


def _fixed_point(run: Callable, carry: list[Dependence]) -> list[Dependence]:
    while True:
        after = [joined(old, new) for old, new in zip(carry, run(carry), strict=True)]
        if after == carry:
            return carry
        carry = after


def _named(equation: Any, found: list[Dependence], marks: list[Dependence]) -> list[Dependence]:
    if equation.params["name"] == _MARK:
        marks.extend(found)
    return found


_CONTROL = {
    "cond": _cond,
    "while": _while,
    "scan": _scan,
    "name": _named,
    "optimization_barrier": lambda equation, found, marks: found,
}
ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp
    clz complex conj convert_element_type copy copy_p cos cosh digamma div eq erf erf_inv erfc exp
    exp2 expm1 floor ge gt igamma imag integer_pow is_finite le lgamma log log1p logistic lt max min
    mul ne neg nextafter not one_minus_square or pcast population_count pow pvary real
    reduce_precision rem reshard round rsqrt select_n sharding_constraint shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh
    xor
""".split()
_RULES: dict[str, Callable[[Any, list[Dependence]], Dependence]] = {
    **dict.fromkeys(ELEMENTWISE, lambda equation, found: joined(*found)),
    **{
        f"reduce_{name}": _moved(_without("axes"))
        for name in ("sum", "max", "min", "prod", "and", "or", "xor")
    },
    **dict.fromkeys(("argmax", "argmin"), _moved(_without("axes"))),
    **{
        f"cum{name}": _moved(_unless("axis")) for name in ("sum", "prod", "max", "min", "logsumexp")
    },
    **{f"reduce_window{name}": _moved(_of_window) for name in ("", "_sum", "_max", "_min")},
    "sort": _moved(_unless("dimension")),
    "top_k": _moved(lambda e, dim: None if dim == e.invars[0].aval.ndim - 1 else dim),
    "rev": _moved(_unless("dimensions")),
    **dict.fromkeys(("slice", "dynamic_slice", "split"), _moved(_whole, mixes=False)),
    "squeeze": _moved(_without("dimensions"), mixes=False),
    "transpose": _moved(lambda equation, dim: equation.params["permutation"].index(dim)),
    "dynamic_update_slice": _updated,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshaped,
    "dot_general": _dot,
    "conv_general_dilated": _convolved,
    "gather": _gathered,
    "pad": _padded,
    "concatenate": _concatenated,
    "stack": lambda equation, found: _around(joined(*found), equation.params["axis"]),
    "bitcast_convert_type": _cast,
    "iota": lambda equation, found: Free(frozenset([equation.params["dimension"]])),
    # The dimensions of an array of keys are the first ones of what they draw.
    **dict.fromkeys(
        ("random_bits", "random_split", "random_fold_in", "random_unwrap"),
        lambda equation, found: joined(*found),
    ),
}
