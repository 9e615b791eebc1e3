"""Calls from compiled CPU programs into Python, with NumPy arrays and without JAX in between.

`jax.experimental.io_callback` makes device arrays of the arguments. If that copies, it needs a
thread of the pool in which the program waits for the callback: with few threads and large arrays
both wait forever.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

# Private: the effect and the sharding of callbacks. Checked, as all names here, with JAX 0.10.0 and
# 0.10.2. An io_callback that passes NumPy arrays would replace this file.
from jax._src import callback as _callback
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import mlir

_primitive = core.Primitive("tnt_jax_host_call")
_primitive.multiple_results = True


def host_call(
    function: Callable[..., Sequence[np.ndarray]], results: Sequence[Any], *args: jax.Array
) -> list[jax.Array]:
    """Returns the result of `function`, called once a compiled program has its arguments.

    Inside `shard_map` each device makes the call. The results count as the same on every rank,
    whatever the arguments. The call is made even if its results are not used.

    Args:
        function: Maps NumPy arrays, valid during the call, to as many arrays as there are
            `results`.
        results: Shapes and dtypes.
        args: Arrays.
    """
    return _primitive.bind(
        *args, function=function, results=tuple(ShapedArray(x.shape, x.dtype) for x in results)
    )


def called_function(equation: Any) -> str:
    """Returns the name of the function that an equation of a trace calls, `""` for others."""
    is_call = equation.primitive is _primitive
    return equation.params["function"].__name__ if is_call else ""


@_primitive.def_effectful_abstract_eval
def _describe(*args: Any, function: Callable, results: Sequence[Any]) -> Any:
    return results, {_callback._IOEffect}


def _lower(ctx: Any, *args: Any, function: Callable, results: Sequence[Any]) -> Any:
    def call(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(function(*arrays))

    sharding = _callback._callback_op_sharding(ctx.module_context.axis_context, None, ctx.avals_out)
    return mlir.emit_python_callback(
        ctx,
        call,
        None,
        list(args),
        ctx.avals_in,
        ctx.avals_out,
        has_side_effect=True,
        returns_token=False,
        sharding=sharding,
    )[0]


mlir.register_lowering(_primitive, _lower, cacheable=False)
