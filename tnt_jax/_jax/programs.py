"""What traced programs compute."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

# Outside JAX's promise of compatibility. Checked with JAX 0.10.0 and 0.10.2. Nothing else finds the
# programs that an equation calls.
from jax.extend.core import ClosedJaxpr, jaxprs_in_params

from tnt_jax._jax.arrays import DATA_AXIS, FSDP_AXIS, rank_axes

# What names axes without communication.
_SILENT = ("pvary", "pcast", "axis_index")


def check_local(function: Callable, *args: Any, advice: str) -> None:
    """Raises a ValueError if `function`, inside `shard_map`, communicates over the data axis.

    The message ends with `advice`.
    """
    primitive = _communication(jax.make_jaxpr(function)(*args).jaxpr)
    if primitive is not None:
        raise ValueError(
            f"The model communicates over the axis {DATA_AXIS!r} ({primitive}). {advice}"
        )


def check_axes(jaxpr: Any, *, advice: str) -> None:
    """Raises a ValueError if a program communicates over some axes of the ranks, but not over all.

    The message ends with `advice`.
    """
    axes = rank_axes()
    expected = {axes} if isinstance(axes, str) else set(axes)
    for equation in _equations(jaxpr):
        named = _axes_of(equation) & {DATA_AXIS, FSDP_AXIS}
        if named and equation.primitive.name not in _SILENT and not expected <= named:
            raise ValueError(
                f"The model communicates over {sorted(named)} ({equation.primitive.name}), but the "
                f"rows of a batch are split over {sorted(expected)}. {advice}"
            )


def is_collective(equation: Any) -> bool:
    """Returns whether an equation, or a program that it calls, exchanges data over the ranks."""
    inner = jaxprs_in_params(equation.params)
    return _names_axis(equation) or any(_communication(jaxpr) for jaxpr in inner)


def without_dead_code(jaxpr: Any) -> Any:
    """Returns a program without the equations that its results and effects do not need."""
    return _eliminated(jaxpr, [True] * len(jaxpr.outvars))[0]


def needed_operands(traced: Any, results: Any) -> Any:
    """Returns which operands of a traced function some of its results are computed from.

    Args:
        traced: The value of `jitted.trace(...)`.
        results: For each leaf of the results, whether it is one of them.

    Returns:
        The positional arguments, with True or False in the place of each leaf.
    """
    _, needed = _eliminated(traced.jaxpr.jaxpr, jax.tree.leaves(results))
    positional, _ = jax.tree.unflatten(jax.tree.structure(traced.in_avals), needed)
    return positional


def needed_constants(program: Any, results: list[bool]) -> list[bool]:
    """Returns which of a `ClosedJaxpr`'s constants some of its results are computed from.

    Values of an outer trace that the traced function was closed over are such constants.

    Args:
        program: The value of `jax.make_jaxpr(...)(...)`.
        results: For each result, whether it is one of them.
    """
    # Private. Checked with JAX 0.10.0 and 0.10.2. No public function leaves equations out.
    from jax._src.interpreters import partial_eval

    return list(partial_eval.dce_jaxpr_consts(program.jaxpr, results)[1])


def _eliminated(jaxpr: Any, results: list[bool]) -> tuple[Any, list[bool]]:
    """Returns a program for some of its results alone, and which operands it needs for them."""
    # Private. Checked with JAX 0.10.0 and 0.10.2. No public function leaves equations out.
    from jax._src.interpreters import partial_eval

    return partial_eval.dce_jaxpr(jaxpr, results)


# Equations that run another program once, on their operands.
_CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "checkpoint",
)


def called_program(equation: Any) -> Any:
    """Returns the `ClosedJaxpr` that an equation runs once on its operands, or None."""
    if equation.primitive.name not in _CALLS:
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
    # Private. Checked with JAX 0.10.2. Nothing public tells functions with equal programs apart.
    known = getattr(jaxpr.debug_info, "func_src_info", None)
    return None if known is None else str(known)


def run_equation(equation: Any, operands: list[Any]) -> list[Any]:
    """Returns the results of an equation of a traced program for other operands."""
    # Differs by version: JAX's page on interpreters of programs has a pair of functions and
    # parameters, JAX 0.10.2 parameters alone.
    bound = equation.primitive.get_bind_params(equation.params)
    functions, params = bound if isinstance(bound, tuple) else ((), bound)
    results = equation.primitive.bind(*functions, *operands, **params)
    return list(results) if equation.primitive.multiple_results else [results]


def _communication(jaxpr: Any) -> str | None:
    found = (equation.primitive.name for equation in _equations(jaxpr) if _names_axis(equation))
    return next(found, None)


def _names_axis(equation: Any) -> bool:
    is_silent = equation.primitive.name in _SILENT
    return not is_silent and not _axes_of(equation).isdisjoint((DATA_AXIS, FSDP_AXIS))


def _axes_of(equation: Any) -> set[Any]:
    """Returns the names of the axes that an equation works over."""
    names = (equation.params.get("axes", ()), equation.params.get("axis_name", ()))
    return {axis for name in names for axis in (name if isinstance(name, tuple) else (name,))}


def _equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from _equations(inner)


def communicates(traced: Any) -> bool:
    """Returns whether the results of a traced function need communication over the data axis.

    `traced` is the value of `jitted.trace(...)`.
    """
    return _communication(without_dead_code(traced.jaxpr.jaxpr)) is not None


def computes_in_half(traced: Any) -> bool:
    """Returns whether a traced function computes with floating numbers of fewer than 32 bits."""
    values = (out.aval for equation in _equations(traced.jaxpr.jaxpr) for out in equation.outvars)
    dtypes = [value.dtype for value in values if hasattr(value, "dtype")]
    return any(jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 for dtype in dtypes)


def last_activations(traced: Any) -> list[str | None]:
    """Returns what last made each leaf of a traced function's results.

    It is `"sigmoid"`, `"softmax"` or None.
    """
    jaxpr = traced.jaxpr.jaxpr
    return [_activation(jaxpr, var) for var in jaxpr.outvars]


# Operations that leave the values of an array what they are.
PLAIN = (
    "convert_element_type",
    "reshape",
    "squeeze",
    "broadcast_in_dim",
    "pvary",
    "pcast",
    "copy",
    "transpose",
    "expand_dims",
)


# Operations that leave an array what it is but for its dtype and the type of its axes.
CASTS = ("convert_element_type", "pvary", "pcast", "copy")


def _activation(jaxpr: Any, var: Any) -> str | None:
    """Returns the activation that gives `var`, an output of `jaxpr` or a value in it."""
    while True:
        equation = next((e for e in jaxpr.eqns if any(out is var for out in e.outvars)), None)
        if equation is None:
            return None
        name = equation.primitive.name
        inner = list(jaxprs_in_params(equation.params))
        if name == "logistic":
            return "sigmoid"
        if name == "div":
            made_by = [_made_by(jaxpr, part) for part in equation.invars]
            return "softmax" if made_by == ["exp", "reduce_sum"] else None
        if name in PLAIN:
            var = equation.invars[0]
        elif len(inner) == 1 and len(inner[0].outvars) == len(equation.outvars):
            jaxpr, var = inner[0], inner[0].outvars[list(equation.outvars).index(var)]
        else:
            return None


def _made_by(jaxpr: Any, var: Any) -> str:
    """Returns the name of the operation in `jaxpr` that gives the values of `var`."""
    equation = next((e for e in jaxpr.eqns if any(out is var for out in e.outvars)), None)
    if equation is None:
        return ""
    return (
        _made_by(jaxpr, equation.invars[0])
        if equation.primitive.name in PLAIN
        else equation.primitive.name
    )


def convolves(jitted: Any, *args: Any) -> bool:
    """Returns whether a jitted function contains a convolution.

    A later call with such arguments is not traced again.
    """
    return any(
        equation.primitive.name == "conv_general_dilated"
        for equation in _equations(jitted.trace(*args).jaxpr.jaxpr)
    )


def unjitted(jitted: Any) -> Callable:
    """Returns the function behind `jax.jit`.

    A program with compiler options cannot be called within another.
    """
    # Undocumented, but the convention of functools.wraps. Checked with JAX 0.10.0 and 0.10.2.
    return jitted.__wrapped__
