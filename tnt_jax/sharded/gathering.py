"""Gathers parameters where a program uses them.

A function of whole parameters is traced, and its program is rewritten for parameters of which each
device holds a part: an all-gather stands before the first equation that needs an array, inside the
body of a loop or of a rematerialized function if that is where it is. So a device holds the arrays
of one layer at a time, whatever library the model is written in. The transpose of an all-gather is
a reduce-scatter, which sums the gradients and leaves each device its part (Rajbhandari et al. 2020,
arXiv:1910.02054, section 5.3).

It stands beside the compiler's step (`ShardedGlobalSteps`) for two reasons. It sums gradients in
float32 where a layer computes in bfloat16; XLA sums them in the dtype of the product. And of the
table of larger models in benchmarks/README.md, the compiler's step, with rows held, takes 1.4 times
as long in the row "decoder, 64 GPUs, data x fsdp" if both sum in bfloat16.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from tnt_jax import _jax
from tnt_jax.sharded.blocks.tracing import trace

# Equations that call a program with their own operands, by the name of its parameter.
_CALLS = {
    "pjit": "jaxpr",
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
}


_ADVICE = (
    "Results would depend on the mesh. Name all of these axes in the model, or leave the "
    "communication out: tnt_jax computes losses and metrics over the whole global batch itself."
)


@dataclass(frozen=True)
class Cut:
    """How an array is cut over the axis `fsdp`."""

    dim: int
    dtype: Any = None  # That of the whole array, if another.
    others: tuple[str | None, ...] | None = None  # Other mesh axes that cut it, by dimension.

    def gather(self, part: jax.Array) -> jax.Array:
        """Returns the whole array, inside `shard_map`."""
        whole: Any = _gathered(part, self.dim, jnp.dtype(self.dtype or part.dtype).name)
        if self.others is None:
            return whole
        # The compiler would otherwise be free to gather over these axes, too.
        return jax.lax.with_sharding_constraint(whole, PartitionSpec(*self.others))

    def inside_loop(self) -> "Cut":
        """Returns the cut of one item of an array that a loop runs over."""
        others = None if self.others is None else self.others[1:]
        return replace(self, dim=self.dim - 1, others=others)


def gather_where_used(
    function: Callable[[Any], Any], parts: Any, cuts: Sequence[Cut | None], *, has_remat: bool
) -> Any:
    """Returns `function(params)`, a function of whole arrays, for the `parts` of this device.

    It is called inside `shard_map`; a cut is None for a leaf that every device holds whole. With
    `has_remat` the blocks of the function gather again what they need, and nothing else is computed
    again; otherwise all is kept for backpropagation but gathered arrays. Numbers remain numbers.
    """
    leaves, structure = jax.tree.flatten(parts)
    if _jax.FSDP_AXIS not in _jax.mapped_axes():
        return function(parts)
    whole, inside = list(leaves), dict[int, tuple[Any, Cut]]()
    for index, (part, cut) in enumerate(zip(tuple(leaves), cuts, strict=True)):
        if cut is not None:
            # As gathered arrays: their types say so, although all ranks hold the same.
            leaves[index] = part = _jax.make_varying(part)
            whole[index], inside[index] = _like_whole(part, cut), (jax.typeof(part), cut)
    traced = trace(function, structure.unflatten(whole))
    _jax.check_axes(traced.program.jaxpr, advice=_ADVICE)
    jaxpr = _rewritten(traced.program.jaxpr, inside)
    run = _jax.jaxpr_as_fun(_jax.ClosedJaxpr(jaxpr, traced.program.consts))
    # A policy around blocks that have one would override theirs.
    run = run if has_remat else _jax.keep_all_but_gathered(run)
    return traced.rebuild(run(*leaves))


def _like_whole(part: jax.Array, cut: Cut) -> jax.Array:
    """Returns what stands for a whole array while a function is traced."""
    shape = list(part.shape)
    shape[cut.dim] *= jax.lax.axis_size(_jax.FSDP_AXIS)
    whole = _jax.make_varying(jnp.zeros(shape, part.dtype))
    return _jax.vary(whole, sorted(_jax.varying_axes(part)))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gathered(part: jax.Array, dim: int, dtype: str) -> jax.Array:
    return jax.lax.all_gather(part.astype(dtype), _jax.FSDP_AXIS, axis=dim, tiled=True)


def _gathered_forward(part: jax.Array, dim: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    # Residuals must be arrays; this one tells the dtype of the parts.
    return _gathered(part, dim, dtype), jnp.zeros((), part.dtype)


def _gathered_backward(dim: int, dtype: str, like: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    # Sums over ranks are made in the dtype of the parameters: bfloat16 would round each of them.
    return (
        jax.lax.psum_scatter(
            grad.astype(like.dtype), _jax.FSDP_AXIS, scatter_dimension=dim, tiled=True
        ),
    )


_gathered.defvjp(_gathered_forward, _gathered_backward)


def _rewritten(jaxpr: Any, cuts: dict[int, tuple[Any, Cut]]) -> Any:
    """Returns a program some of whose arguments are parts, which it gathers where it needs them."""
    rewriter = _Rewriter()
    invars = [
        rewriter.cut(variable, *cuts[index]) if index in cuts else variable
        for index, variable in enumerate(jaxpr.invars)
    ]
    for equation in jaxpr.eqns:
        rewriter.add(equation)
    outvars = [rewriter.whole(variable) for variable in jaxpr.outvars]
    return jaxpr.replace(invars=invars, outvars=outvars, eqns=rewriter.equations)


class _Rewriter:
    def __init__(self) -> None:
        self.equations: list[Any] = []
        # Variables of whole arrays: the variable of the part and its cut, until it is gathered, and
        # then the variable of the gathered array.
        self._parts: dict[Any, tuple[Any, Cut]] = {}
        self._gathered: dict[Any, Any] = {}

    def cut(self, variable: Any, aval: Any, cut: Cut) -> Any:
        """Returns a variable of type `aval` for the part of an argument."""
        part = _jax.new_variable(aval)
        self._parts[variable] = part, cut
        return part

    def whole(self, variable: Any) -> Any:
        """Returns the variable of a whole array, which is gathered if it is not yet."""
        if isinstance(variable, _jax.Literal) or variable not in self._parts:
            return variable
        if variable not in self._gathered:
            part, cut = self._parts[variable]
            gathering, self._gathered[variable] = _jax.equations_on(cut.gather, part)
            self.equations += gathering
        return self._gathered[variable]

    def add(self, equation: Any) -> None:
        """Adds an equation with what it needs; in called programs arrays are gathered inside."""
        name = equation.primitive.name
        cuts = {
            index: self._parts[variable]
            for index, variable in enumerate(equation.invars)
            if not isinstance(variable, _jax.Literal) and variable in self._parts
        }
        if cuts and name == "convert_element_type":
            part, cut = cuts[0]
            dtype = equation.params["new_dtype"]
            if cut.dtype is None and jnp.issubdtype(dtype, jnp.floating):
                self._parts[equation.outvars[0]] = part, replace(cut, dtype=dtype)
                return
        if cuts and name in _CALLS:
            inside = {index: (part.aval, cut) for index, (part, cut) in cuts.items()}
            equation = self._calling(equation, _CALLS[name], inside)
        elif cuts and name == "scan":
            equation = self._calling(equation, "jaxpr", _inside_scan(equation, cuts))
        self.equations.append(
            equation.replace(invars=[self.whole(variable) for variable in equation.invars])
        )

    def _calling(self, equation: Any, name: str, inside: dict[int, tuple[Any, Cut]]) -> Any:
        """Returns an equation whose program takes parts of some operands."""
        called = equation.params[name]
        if isinstance(called, _jax.ClosedJaxpr):
            rewritten = called.replace(jaxpr=_rewritten(called.jaxpr, inside))
        else:
            rewritten = _rewritten(called, inside)
        invars = [
            self._parts[variable][0] if index in inside else variable
            for index, variable in enumerate(equation.invars)
        ]
        return equation.replace(params=equation.params | {name: rewritten}, invars=invars)


def _inside_scan(equation: Any, cuts: dict[int, tuple[Any, Cut]]) -> dict[int, tuple[Any, Cut]]:
    """Returns types and cuts of those operands of a loop that its body can gather."""
    num_consts, num_carried = _jax.loop_sizes(equation)
    inside = {index: (part.aval, cut) for index, (part, cut) in cuts.items() if index < num_consts}
    for index, (part, cut) in cuts.items():
        if index >= num_consts + num_carried and cut.dim > 0:
            item = jax.make_jaxpr(lambda x: x[0])(part.aval).jaxpr.outvars[0].aval
            inside[index] = item, cut.inside_loop()
    return inside
