"""Calls from compiled CPU programs into Python, with NumPy arrays and without JAX in between.

`jax.experimental.io_callback` makes device arrays of the arguments. If that copies, it needs a
thread of the pool in which the program waits for the callback: with few threads and large arrays
both wait forever.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray

from tnt_jax._jax.fallbacks import or_plain

_NAME = "tnt_jax_host_call"


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
    described = tuple(ShapedArray(x.shape, x.dtype) for x in results)
    return _primitive().bind(*args, function=function, results=described)


@cache
@or_plain(lambda: False, lost="CPU processes sum gradients by XLA's collectives, without the ring.")
def calls_python() -> bool:
    """Returns whether `host_call` works in this version of JAX."""
    number = jax.ShapeDtypeStruct((), np.float32)
    jax.jit(lambda x: host_call(lambda x: [x], [number], x)).trace(number).lower(
        lowering_platforms=("cpu",)
    )
    return True


def called_function(equation: Any) -> str:
    """Returns the name of the function that an equation of a trace calls, `""` for others."""
    is_call = equation.primitive.name == _NAME
    return equation.params["function"].__name__ if is_call else ""


@cache
def _primitive() -> Any:
    # Private: the effect and the sharding of callbacks. Checked, as all names here, with JAX
    # 0.10.0, 0.10.2 and 0.12.0. An io_callback that passes NumPy arrays would replace this file.
    from jax._src import callback
    from jax.extend import core
    from jax.interpreters import mlir

    primitive = core.Primitive(_NAME)
    primitive.multiple_results = True

    @primitive.def_effectful_abstract_eval
    def describe(*args: Any, function: Callable, results: Sequence[Any]) -> Any:
        return results, {callback._IOEffect}

    def lower(ctx: Any, *args: Any, function: Callable, results: Sequence[Any]) -> Any:
        def call(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
            return tuple(function(*arrays))

        sharding = callback._callback_op_sharding(
            ctx.module_context.axis_context, None, ctx.avals_out
        )
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

    mlir.register_lowering(primitive, lower, cacheable=False)
    return primitive
