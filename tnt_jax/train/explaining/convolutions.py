"""Finds convolutions whose channels come first, and times them with the channels last."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tnt_jax import _jax


def channels_first(jaxpr: Any) -> list[Any]:
    """Returns the convolutions of a program whose channels come before the dimensions of space.

    They are those of a model, and of the gradients by its inputs.
    """
    found = []
    for equation in _jax.convolutions_in(jaxpr):
        numbers = equation.params["dimension_numbers"]
        is_first = all(spec[:2] == (0, 1) for spec in (numbers.lhs_spec, numbers.out_spec))
        if is_first and len(numbers.lhs_spec) > 2:
            found.append(equation)
    return found


def run_alone(equations: Sequence[Any], mesh: Mesh, *, last: bool) -> Callable[[int], None]:
    """Returns what computes convolutions with channels first, or last, so many times."""
    programs = [with_channels_last(x) if last else _as_is(x) for x in equations]
    operands = [
        [jnp.ones(shape, x.aval.dtype) for shape, x in zip(shapes, equation.invars, strict=True)]
        for (_, shapes), equation in zip(programs, equations, strict=True)
    ]

    def compute(operands: Any) -> list[jax.Array]:
        return [
            jax.lax.conv_general_dilated(*pair, **params)
            for pair, (params, _) in zip(operands, programs, strict=True)
        ]

    jitted = jax.jit(compute, compiler_options=_jax.convolution_options(mesh))

    def run(times: int) -> None:
        for _ in range(times):
            jax.block_until_ready(jitted(operands))

    return run


_Form = tuple[dict[str, Any], list[tuple[int, ...]]]


def _as_is(equation: Any) -> _Form:
    return equation.params, [x.aval.shape for x in equation.invars]


def with_channels_last(equation: Any) -> _Form:
    """Returns parameters and shapes of operands of a convolution with its channels last.

    Kernels then have the dimensions of space, inputs, outputs, as in Flax and Keras.
    """
    (batch, channels, *space), kernel = (x.aval.shape for x in equation.invars)
    outputs, inputs, *window = equation.params["dimension_numbers"].rhs_spec
    of_kernel = [*(kernel[dim] for dim in window), kernel[inputs], kernel[outputs]]
    num_dims = len(kernel)
    of_rows = (0, num_dims - 1, *range(1, num_dims - 1))
    numbers = jax.lax.ConvDimensionNumbers(
        of_rows, (num_dims - 1, num_dims - 2, *range(num_dims - 2)), of_rows
    )
    return equation.params | {"dimension_numbers": numbers}, [
        (batch, *space, channels),
        tuple(of_kernel),
    ]
