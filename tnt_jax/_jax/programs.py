"""Analysis of traced programs, `shard_map`, and what functions that are traced in it can ask."""

import math
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import compress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from tnt_jax._jax.arrays import (
    DATA_AXIS,
    RANK_AXES,
    STAGE_AXIS,
    is_varying,
    num_ranks,
    rank_axes,
)
from tnt_jax._jax.fallbacks import or_plain


@or_plain(
    lambda: ((lambda **_: None), None, None),
    lost="On several devices, models that draw random numbers take the compiler's step.",
)
def _parts() -> tuple[Any, Any, Any]:
    # Outside JAX's promise of compatibility. Checked with JAX 0.10.0, 0.10.2 and 0.12.0. Without
    # them, dropout by row of the global batch would need a generator of its own in every layer.
    from jax.extend import random

    return random.define_prng_impl, random.threefry2x32_p, random.threefry_prng_impl


# `define_prng_impl` makes None where JAX lacks a part.
define_prng_impl, threefry2x32_p, threefry_prng_impl = _parts()


# The types of a traced program and its parts. From JAX 0.12 on, the first two are one.
_traced: Any = jax.make_jaxpr(lambda x: (x, 1.0))(jax.ShapeDtypeStruct((), jnp.float32))
ClosedJaxpr, Jaxpr = type(_traced), type(_traced.jaxpr)
Var, Literal = map(type, _traced.jaxpr.outvars)

# What names axes without communication.
_SILENT = ("pvary", "pcast", "axis_index")


def check_local(function: Callable, *args: Any, advice: str) -> None:
    """Raises a ValueError, ending with `advice`, if `function` communicates over the data axis."""
    primitive = _communication(jax.make_jaxpr(refusing_draws(function))(*args).jaxpr)
    if primitive is not None:
        raise ValueError(
            f"The model communicates over the axis {DATA_AXIS!r} ({primitive}). {advice}"
        )


def refusing_draws(function: Callable) -> Callable:
    """Returns a function that refuses random numbers if they cannot be drawn per global row."""
    if threefry2x32_p is not None:
        return function

    def checked(*args: Any) -> Any:
        equations = _equations(jax.make_jaxpr(function)(*args).jaxpr)
        if any(equation.primitive.name == "random_bits" for equation in equations):
            raise ValueError(
                "The model draws random numbers, as for dropout. In JAX "
                f"{jax.__version__}, tnt_jax cannot draw them per row of the global batch, so that "
                "results would depend on the number of devices. Install a version of JAX that "
                "tnt_jax knows, use one device, or leave dropout out."
            )
        return function(*args)

    return checked


def check_axes(jaxpr: Any, *, advice: str) -> None:
    """Raises a ValueError, ending with `advice`, if a program communicates over some axes alone."""
    expected = {*jax.tree.leaves(rank_axes())}
    for equation in _equations(jaxpr):
        named = _communicated_axes(equation)
        if named and not expected <= named:
            raise ValueError(
                f"The model communicates over {sorted(named)} ({equation.primitive.name}), but the "
                f"rows of a batch are split over {sorted(expected)}. {advice}"
            )


def is_collective(equation: Any) -> bool:
    """Returns whether an equation, or a program that it calls, exchanges data over the ranks."""
    inner = jaxprs_in_params(equation.params)
    return bool(_communicated_axes(equation)) or any(map(_communication, inner))


def jaxprs_in_params(params: Any) -> Iterator[Any]:
    """Yields the programs among the parameters of an equation."""
    for value in params.values():
        for x in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(x, (ClosedJaxpr, Jaxpr)):
                yield x.jaxpr if isinstance(x, ClosedJaxpr) else x


def without_dead_code(jaxpr: Any) -> Any:
    """Returns a program without the equations that its results and effects do not need."""
    return _eliminated(jaxpr, [True] * len(jaxpr.outvars))[0]


def needed_operands(traced: Any, results: Any) -> Any:
    """Returns flags: which positional arguments the results that are flagged are computed from."""
    _, needed = _eliminated(traced.jaxpr.jaxpr, jax.tree.leaves(results))
    positional, _ = jax.tree.unflatten(jax.tree.structure(traced.in_avals), needed)
    return positional


def _eliminated_here(jaxpr: Any, results: list[bool]) -> tuple[Any, list[bool]]:
    """As `_eliminated`, but programs that equations call are taken whole."""
    outvars = list(compress(jaxpr.outvars, results))
    needed = {var for var in outvars if isinstance(var, Var)}
    kept = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or not needed.isdisjoint(equation.outvars):
            kept.append(equation)
            needed.update(var for var in equation.invars if isinstance(var, Var))
    used = [var in needed for var in jaxpr.invars]
    invars = [var for var in jaxpr.invars if var in needed]
    return SimpleNamespace(eqns=kept[::-1], invars=invars, outvars=outvars), used


_LARGER = "Some results that do not depend on an input count as if they did."


@or_plain(_eliminated_here, lost=_LARGER)
def _eliminated(jaxpr: Any, results: list[bool]) -> tuple[Any, list[bool]]:
    """Returns a program for some of its results alone, and which operands it needs for them."""
    # Private. Checked with JAX 0.10.0, 0.10.2 and 0.12.0. No public function leaves equations out.
    from jax._src.interpreters import partial_eval

    return partial_eval.dce_jaxpr(jaxpr, results)


# Equations that run another program once, on their operands.
CALLS = tuple("jit pjit closed_call core_call custom_jvp_call custom_vjp_call checkpoint".split())


def called_program(equation: Any) -> Any:
    """Returns the `ClosedJaxpr` that an equation runs once on its operands, or None."""
    if equation.primitive.name not in CALLS:
        return None
    programs = [x for x in equation.params.values() if isinstance(x, ClosedJaxpr)]
    return programs[0] if len(programs) == 1 else None


def loop_sizes(equation: Any) -> tuple[int, int]:
    """Returns how many constants and how many carried values a `jax.lax.scan` equation has."""
    # Differs by version: JAX 0.12 groups the operands in a tree, JAX 0.10 states the two numbers.
    params = equation.params
    if "ft_in" not in params:
        return params["num_consts"], params["num_carry"]
    consts, carried, _ = params["ft_in"].unpack()
    return len(consts), len(carried)


def function_of(jaxpr: Any) -> str | None:
    """Returns name and place of the function that was traced to a program, if it is known."""
    # Private. Checked with JAX 0.10.2 and 0.12.0. Nothing public tells functions with equal
    # programs apart.
    known = getattr(jaxpr.debug_info, "func_src_info", None)
    return None if known is None else str(known)


# Folders whose lines are not the user's.
LIBRARIES = (
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "purelib", "platlib")),
    *(str(Path(path).parents[1]) + os.sep for path in (jax.__file__, __file__)),
    "<frozen",
)


@or_plain(lambda equation: "", lost="Messages do not name the line that compares rows.")
def line_of(equation: Any) -> str:
    """Returns file and line of the innermost call that no library has; empty if none is known."""
    # Private. Checked with JAX 0.10.0 and 0.12.0.
    traceback = equation.source_info.traceback
    for frame in () if traceback is None else traceback.frames:
        if not frame.file_name.startswith(LIBRARIES):
            return f"{os.path.basename(frame.file_name)}:{frame.line_num}"
    return ""


def run_equation(equation: Any, operands: list[Any]) -> list[Any]:
    """Returns the results of an equation of a traced program for other operands."""
    results = equation.primitive.bind(*operands, **_bind_params(equation))
    return list(results) if equation.primitive.multiple_results else [results]


def draws_in(jaxpr: Any, key_dtype: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Returns what a program draws by keys of a dtype, such as `random_bits`, and the shapes."""
    drawing = ("random_bits", "random_split")
    return [
        (x.primitive.name, tuple(x.params["shape"]))
        for x in _equations(jaxpr)
        if x.primitive.name in drawing and x.invars[0].aval.dtype == key_dtype
    ]


@or_plain(
    lambda equation: equation.params,
    lost="Functions with a derivative of their own cannot be run again.",
)
def _bind_params(equation: Any) -> Mapping[str, Any]:
    # Undocumented. Checked with JAX 0.10.0, 0.10.2 and 0.12.0.
    return equation.primitive.get_bind_params(equation.params)


class Values:
    """The values of the variables of a program, while its equations run."""

    def __init__(self, variables: Iterable[Any], values: Iterable[Any]) -> None:
        self._known = dict(zip(variables, values, strict=True))

    @classmethod
    def of(cls, program: Any, args: Iterable[Any]) -> "Values":
        """Returns the values of a program's constants and arguments."""
        jaxpr = program.jaxpr
        return cls([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *args])

    def read(self, variables: Iterable[Any]) -> list[Any]:
        """Returns the values of variables and literals."""
        return [v.val if isinstance(v, Literal) else self._known[v] for v in variables]

    def write(self, variables: Iterable[Any], values: Iterable[Any]) -> None:
        """Stores values of variables."""
        self._known.update(zip(variables, values, strict=True))

    def run(self, equations: Iterable[Any]) -> None:
        """Computes what equations compute."""
        for equation in equations:
            self.write(equation.outvars, run_equation(equation, self.read(equation.invars)))


def new_variable(aval: Any) -> Any:
    """Returns a variable of a type that no program has."""
    return jax.make_jaxpr(lambda x: x)(aval).jaxpr.invars[0]


def equations_on(function: Callable, *variables: Any) -> tuple[list[Any], Any]:
    """Returns the equations of a function of a program's variables, and that of its result."""
    # JAX returns the same variables again for a function that it has traced before.
    fresh = lambda *args: function(*args)  # noqa: E731
    traced: Any = jax.make_jaxpr(fresh)(*(variable.aval for variable in variables)).jaxpr
    known = dict(zip(traced.invars, variables, strict=True))

    def renamed(v: Any) -> Any:
        return v if isinstance(v, Literal) else known.get(v, v)

    equations = [e.replace(invars=list(map(renamed, e.invars))) for e in traced.eqns]
    return equations, renamed(traced.outvars[0])


def _as_function(program: Any) -> Callable:
    def run(*args: Any) -> list[Any]:
        values = Values.of(program, args)
        values.run(program.jaxpr.eqns)
        return values.read(program.jaxpr.outvars)

    return run


@or_plain(_as_function, lost="Errors in programs name no lines of your own.")
def jaxpr_as_fun(program: Any) -> Callable:
    """Returns a function that runs a `ClosedJaxpr`."""
    # Outside JAX's promise of compatibility. Checked with JAX 0.10.0, 0.10.2 and 0.12.0.
    from jax.extend import core

    return core.jaxpr_as_fun(program)


def _communication(jaxpr: Any) -> str | None:
    found = (x.primitive.name for x in _equations(jaxpr) if _communicated_axes(x))
    return next(found, None)


def _communicated_axes(equation: Any) -> set[str]:
    """Returns those axes of the ranks over which an equation, by itself, exchanges data."""
    if equation.primitive.name in _SILENT:
        return set()
    names = (equation.params.get("axes", ()), equation.params.get("axis_name", ()))
    named = {axis for name in names for axis in (name if isinstance(name, tuple) else (name,))}
    return named.intersection(RANK_AXES)


def _equations(jaxpr: Any) -> Iterator[Any]:
    return (equation for equation, _ in _with_times(jaxpr))


def communicates(traced: Any) -> bool:
    """Returns whether the results of `jitted.trace(...)` need communication over the data axis."""
    return _communication(without_dead_code(traced.jaxpr.jaxpr)) is not None


# Primitives whose result holds the values of their operand.
_SAME_VALUES = ("convert_element_type", "reshape", "broadcast_in_dim", "transpose", "squeeze")


def looked_up(jaxpr: Any, labels: Mapping[Any, Any]) -> Iterator[tuple[Any, int]]:
    """Yields label and size of the tables that `jnp.take` reads by labelled indices, NaN beyond."""
    labels = dict(labels)
    for equation in jaxpr.eqns:
        given = [labels.get(x) if isinstance(x, Var) else None for x in equation.invars]
        if equation.primitive.name in _SAME_VALUES:
            labels[equation.outvars[0]] = given[0]
        for inner in jaxprs_in_params(equation.params):
            if equation.params.get("name") == "_take" and given[1:] not in ([], [None]):
                yield from ((given[1], size) for size in _filled_sizes(inner))
            elif len(inner.invars) == len(given):
                yield from looked_up(inner, dict(zip(inner.invars, given, strict=True)))


def _filled_sizes(jaxpr: Any) -> Iterator[int]:
    for equation in _equations(jaxpr):
        if equation.primitive.name == "gather" and "FILL" in str(equation.params["mode"]):
            [dim, *_] = equation.params["dimension_numbers"].start_index_map
            yield equation.invars[0].aval.shape[dim]


def _with_times(jaxpr: Any, times: int = 1) -> Iterator[tuple[Any, int]]:
    """Yields the equations of a program, and how often each runs."""
    for equation in jaxpr.eqns:
        yield equation, times
        trips = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in jaxprs_in_params(equation.params):
            yield from _with_times(inner, times * trips)


def bytes_of_products(jaxpr: Any) -> int:
    """Returns the bytes of products, convolutions and looked-up rows; loops count each time."""
    return sum(
        times * x.aval.size * x.aval.dtype.itemsize
        for equation, times in _with_times(jaxpr)
        if equation.primitive.name in ("dot_general", "conv_general_dilated", "gather")
        for x in equation.outvars
    )


def operations_of_products(jaxpr: Any) -> int:
    """Returns the multiplications of products and convolutions; loops count each time."""
    total = 0
    for equation, times in _with_times(jaxpr):
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            products = math.prod(shape[dim] for dim in contracted)
            total += times * equation.outvars[0].aval.size * products
        elif equation.primitive.name == "conv_general_dilated":
            kernel = equation.invars[1].aval
            outputs = kernel.shape[equation.params["dimension_numbers"].rhs_spec[0]]
            total += times * (equation.outvars[0].aval.size * kernel.size // outputs)
    return total


def computes_in_half(traced: Any) -> bool:
    """Returns whether a traced function computes with floating numbers of fewer than 32 bits."""
    values = (out.aval for equation in _equations(traced.jaxpr.jaxpr) for out in equation.outvars)
    dtypes = [value.dtype for value in values if hasattr(value, "dtype")]
    return any(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 for dtype in dtypes)


def last_activations(traced: Any) -> list[str | None]:
    """Returns what made each leaf of a function's results: `sigmoid`, `softmax` or None."""
    jaxpr = traced.jaxpr.jaxpr
    return [_activation(jaxpr, var) for var in jaxpr.outvars]


# Operations that leave an array what it is but for its dtype and the type of its axes.
CASTS = ("convert_element_type", "pvary", "pcast", "copy")
# Operations that leave the values of an array what they are.
PLAIN = (*CASTS, "reshape", "squeeze", "broadcast_in_dim", "transpose", "expand_dims")


def _activation(jaxpr: Any, var: Any) -> str | None:
    """Returns the activation that gives `var`, an output of `jaxpr` or a value in it."""
    name, equation, made = _maker_of(jaxpr, var)
    if name == "logistic":
        return "sigmoid"
    if name == "div":
        made_by = [_maker_of(jaxpr, part)[0] for part in equation.invars]
        return "softmax" if made_by == ["exp", "reduce_sum"] else None
    inner = list(jaxprs_in_params(equation.params)) if name else []
    if len(inner) != 1 or len(inner[0].outvars) != len(equation.outvars):
        return None
    return _activation(inner[0], inner[0].outvars[list(equation.outvars).index(made)])


def _maker_of(jaxpr: Any, var: Any) -> tuple[str, Any, Any]:
    """Returns the operation in `jaxpr` that gives the values of `var`: name, equation, result."""
    for equation in reversed(jaxpr.eqns):
        if any(out is var for out in equation.outvars):
            if equation.primitive.name not in PLAIN:
                return equation.primitive.name, equation, var
            var = equation.invars[0]
    return "", None, var


def convolves_slowly_in_loops(jitted: Any, *args: Any) -> bool:
    """Returns whether a jitted function, which is traced, convolves with features not last."""
    return any(
        x.params["dimension_numbers"] != features_last(x.outvars[0].aval.ndim)
        for x in convolutions_in(jitted.trace(*args).jaxpr.jaxpr)
    )


def convolutions_in(jaxpr: Any) -> list[Any]:
    """Returns the equations of convolutions in a program, and in those that it calls."""
    return [x for x in _equations(jaxpr) if x.primitive.name == "conv_general_dilated"]


def with_features_last(program: Any) -> Any:
    """Returns a program with the same results, whose convolutions have their features last.

    XLA's CPU compiler transposes operands likewise, but outside loops alone.
    """
    return ClosedJaxpr(_with_features_last(program.jaxpr), program.consts)


def _with_features_last(jaxpr: Any) -> Any:
    equations = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "conv_general_dilated":
            own, result = equations_on(partial(_convolve_features_last, equation), *equation.invars)
            assert own[-1].outvars == [result]
            own[-1] = own[-1].replace(outvars=equation.outvars)
            # Errors and profiles name the user's line.
            equations += [each.replace(source_info=equation.source_info) for each in own]
        elif any(map(convolutions_in, jaxprs_in_params(equation.params))):
            params = {name: _of_programs(value) for name, value in equation.params.items()}
            equations.append(equation.replace(params=params))
        else:
            equations.append(equation)
    return jaxpr.replace(eqns=equations)


def _of_programs(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(map(_of_programs, value))
    if isinstance(value, ClosedJaxpr):
        return with_features_last(value)
    return _with_features_last(value) if isinstance(value, Jaxpr) else value


def features_last(ndim: int) -> lax.ConvDimensionNumbers:
    """Returns the layout of a convolution whose operands and result have their features last."""
    last = ndim - 1
    rows_first = (0, last, *range(1, last))
    return lax.ConvDimensionNumbers(rows_first, (last, last - 1, *range(last - 1)), rows_first)


def _convolve_features_last(equation: Any, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    params = equation.params
    of_lhs, of_rhs, of_out = params["dimension_numbers"]
    numbers = features_last(lhs.ndim)
    lhs = lax.transpose(lhs, (of_lhs[0], *of_lhs[2:], of_lhs[1]))
    rhs = lax.transpose(rhs, (*of_rhs[2:], of_rhs[1], of_rhs[0]))
    out = equation.primitive.bind(lhs, rhs, **{**params, "dimension_numbers": numbers})
    where = (of_out[0], *of_out[2:], of_out[1])
    return lax.transpose(out, tuple(where.index(dim) for dim in range(lhs.ndim)))


def unjitted(jitted: Any) -> Callable:
    """Returns the function behind `jax.jit`, as options keep it from being called in another."""
    # Undocumented, but the convention of functools.wraps. Checked with JAX 0.10.0 to 0.12.0.
    return jitted.__wrapped__


def keep_all_but_gathered(function: Callable) -> Callable:
    """Returns `function`, which gathers its parameters again for backpropagation, and no more."""
    # By default `jax.checkpoint` puts a barrier around it, so that activations are written as they
    # are kept, such as a normalization's in float32, where the compiler otherwise computes them
    # from half as many bytes as it reads them.
    return jax.checkpoint(function, policy=_is_kept, prevent_cse=False)


def _is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
    """Returns whether results are kept for backpropagation: none that may be a gathered array."""
    return not primitive.name.startswith("all_gather") and primitive.name not in PLAIN


# Operations that keep a value what it is the sum of, but for a factor.
_SCALING = (*PLAIN, "mul", "div", "neg")


def shard_map(function: Callable, *, mesh: Mesh, in_specs: Any, out_specs: Any) -> Callable:
    """Maps `function` over the ranks of `mesh`, with the check of replicated outputs on.

    It is mapped over the axis `stage`, too, if `in_specs` name it. The compiler divides the work
    over the other axes of the mesh. One rank alone is not checked: nothing can differ, and `psum`
    needs no collective to make that known. If the compiler divides its work, its axes are those of
    `vmap`, as XLA fails at a collective over one device of several axes.
    """
    ranks = [name for name in RANK_AXES if name in mesh.axis_names]
    if ranks and num_ranks(mesh) == 1 < mesh.size and STAGE_AXIS not in mesh.axis_names:
        for name in ranks:
            function = _named(function, name)
        return function
    specs = jax.tree.leaves(in_specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    has_stages = any(STAGE_AXIS in spec for spec in specs)
    manual = {*RANK_AXES, STAGE_AXIS} if has_stages else {*RANK_AXES}
    if num_ranks(mesh) > 1:
        function = refusing_draws(function)
    return jax.shard_map(
        function,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=manual.intersection(mesh.axis_names),
        check_vma=num_ranks(mesh) > 1 or has_stages,
    )


def _named(function: Callable, axis_name: str) -> Callable:
    """Returns a function in which an axis of size 1 has a name; nothing is mapped."""
    mapped = jax.vmap(function, None, 0, axis_name=axis_name, axis_size=1)

    def call(*args: Any) -> Any:
        return jax.tree.map(lambda x: x[0], mapped(*args))

    return call


def tracks_varying(axis_name: str) -> bool:
    """Returns whether arrays know if they differ between ranks: in `shard_map` with `check_vma`."""
    return is_varying(jax.lax.axis_index(axis_name), axis_name)


@or_plain(
    lambda x, axis_name: False,
    lost="Gradients that pmap or psum have summed before pass unnoticed.",
)
def was_summed(x: Any, axis_name: str) -> bool:
    """Returns whether a traced value is a sum over an axis, perhaps scaled or reshaped since."""
    # Private. Checked with JAX 0.10.2 and 0.12.0. Tracers of older versions lack it.
    equation = getattr(x, "parent", None)
    if equation is None:
        return False
    if equation.primitive.name.startswith("psum"):
        return axis_name in equation.params.get("axes", ())
    if equation.primitive.name not in _SCALING:
        return False
    alike = (y for y in equation.in_tracers if getattr(y, "size", 0) == x.size)
    return any(was_summed(operand, axis_name) for operand in alike)
