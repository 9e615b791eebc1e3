"""`shard_map`, and what a function traced in it or in `pmap` can ask about its axes and values."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from tnt_jax._jax.arrays import RANK_AXES, STAGE_AXIS, is_varying, mapped_sizes, num_ranks
from tnt_jax._jax.fallbacks import or_plain
from tnt_jax._jax.programs import PLAIN, refusing_draws


def keep_all_but_gathered(function: Callable) -> Callable:
    """Returns `function`, which gathers its parameters again for backpropagation.

    Everything else is kept. `jax.checkpoint` would put a barrier around it, so that activations
    were written as they are kept, such as a normalization's in float32, where the compiler
    otherwise computes them from half as many bytes as it reads them.
    """
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
    is_divided = ranks and num_ranks(mesh) == 1 < mesh.size
    if is_divided and STAGE_AXIS not in mesh.axis_names:
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


def mapped_axes() -> list[str]:
    """Returns the names of the axes that the traced function is mapped over."""
    return [name for name in mapped_sizes() if isinstance(name, str)]


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
    return any(
        was_summed(operand, axis_name)
        for operand in equation.in_tracers
        if getattr(operand, "size", 0) == x.size
    )
