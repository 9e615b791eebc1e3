"""Calls from compiled programs for CPUs into Python, with NumPy arrays and nothing of JAX in between.

`jax.experimental.io_callback` makes device arrays of the arguments. Where that copies, it waits for a thread of the pool which runs the
program that waits for the callback: with few threads and large arrays both wait for ever.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import callback as _callback  # The effect and the sharding of callbacks have no public name.
from jax.core import ShapedArray
from jax.extend import core
from jax.interpreters import mlir

_primitive = core.Primitive("tnt_jax_host_call")
_primitive.multiple_results = True


def host_call(function: Callable[..., Sequence[np.ndarray]], results: Sequence[Any], *args: jax.Array) -> list[jax.Array]:
    """Returns what `function` returns, called when a compiled program has its arguments; inside `shard_map` on each device.

    The results count as the same on every rank, whatever the arguments are. The call is made also if nobody uses its results.

    Args:
        function: From NumPy arrays, valid during the call, to as many arrays as there are `results`.
        results: Shapes and dtypes.
        args: Arrays.
    """
    return _primitive.bind(*args, function=function, results=tuple(ShapedArray(x.shape, x.dtype) for x in results))


@_primitive.def_effectful_abstract_eval
def _describe(*args: Any, function: Callable, results: Sequence[Any]) -> Any:
    return results, {_callback._IOEffect}


def _lower(ctx: Any, *args: Any, function: Callable, results: Sequence[Any]) -> Any:
    def call(*arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(function(*arrays))

    sharding = _callback._callback_op_sharding(ctx.module_context.axis_context, None, ctx.avals_out)
    return mlir.emit_python_callback(
        ctx, call, None, list(args), ctx.avals_in, ctx.avals_out, has_side_effect=True, returns_token=False, sharding=sharding
    )[0]


mlir.register_lowering(_primitive, _lower, cacheable=False)
