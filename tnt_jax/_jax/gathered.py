"""Gathered parameters are not kept for backpropagation, and all else is."""

from collections.abc import Callable
from typing import Any

import jax

from tnt_jax._jax.programs import PLAIN


def keep_all_but_gathered(function: Callable) -> Callable:
    """Returns `function`, which gathers its parameters again for backpropagation.

    Everything else is kept. `jax.checkpoint` would put a barrier around it, so that activations
    were written as they are kept, such as a normalization's in float32, where the compiler
    otherwise computes them from half as many bytes as it reads them.
    """
    return jax.checkpoint(function, policy=_is_kept, prevent_cse=False)


def _is_kept(primitive: Any, *_: Any, **__: Any) -> bool:
    """Returns whether results of a primitive are kept for backpropagation.

    Gathered arrays are not, and neither are reshaped ones, which may be gathered arrays.
    """
    return not primitive.name.startswith("all_gather") and primitive.name not in PLAIN
