"""What a function that is traced in `shard_map` or `pmap` can ask about its axes and values."""

from typing import Any

import jax

from tnt_jax._jax.arrays import is_varying, mapped_sizes
from tnt_jax._jax.programs import PLAIN

# Operations that keep a value what it is the sum of, but for a factor.
_SCALING = (*PLAIN, "mul", "div", "neg")


def tracks_varying(axis_name: str) -> bool:
    """Returns whether arrays know if they differ between ranks: in `shard_map` with `check_vma`."""
    return is_varying(jax.lax.axis_index(axis_name), axis_name)


def mapped_axes() -> list[str]:
    """Returns the names of the axes that the traced function is mapped over."""
    return [name for name in mapped_sizes() if isinstance(name, str)]


def was_summed(x: Any, axis_name: str) -> bool:
    """Returns whether a traced value is a sum over an axis, perhaps scaled or reshaped since.

    It finds sums in the function that is traced, outside of `jit` within it.
    """
    # Private. Checked with JAX 0.10.2. Tracers of older versions do not know what made them.
    equation = getattr(x, "parent", None)
    if equation is None:
        return False
    if equation.primitive.name.startswith("psum"):
        return axis_name in equation.params.get("axes", ())
    if equation.primitive.name not in _SCALING:
        return False
    return any(
        was_summed(operand, axis_name)
        for operand in equation.in_tracers
        if getattr(operand, "size", 0) == x.size
    )
