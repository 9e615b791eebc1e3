"""The shapes of what the initializers of a Linen module return, traced once for each initializer.

In every trace of a module, Flax compares the shape of each parameter with that of what its
initializer would return, for which it traces the initializer.
"""

from collections.abc import Callable
from types import CodeType
from typing import Any

import jax
from flax.core import Scope

_eval_shape = jax.eval_shape
# The functions that Flax passes to `jax.eval_shape`. Checked with Flax 0.12.8; where there are
# none, each trace takes longer.
_PARAM_CODES = [code for code in Scope.param.__code__.co_consts if isinstance(code, CodeType)]


class InitializerShapes:
    """Stands for `jax.eval_shape` while a module is traced, and remembers shapes of parameters."""

    def __init__(self) -> None:
        self._known: dict[Any, Any] = {}

    def eval_shape(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Returns what `jax.eval_shape` does."""
        call = _initializer_call(function)
        if call is None:
            return _eval_shape(function, *args, **kwargs)
        if call not in self._known:
            self._known[call] = _eval_shape(function, *args, **kwargs)
        return self._known[call]


def _initializer_call(function: Callable) -> Any:
    """Returns an initializer and its arguments if Flax calls it in `function`; None otherwise."""
    code = getattr(function, "__code__", None)
    if code not in _PARAM_CODES:
        return None
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    call = tuple((name, _hashable(cell.cell_contents)) for name, cell in cells)
    try:
        hash(call)
    except TypeError:  # An argument is an array, for example.
        return None
    return call


def _hashable(x: Any) -> Any:
    """Returns arguments, or a shape, without lists and dicts."""
    if isinstance(x, dict):
        return tuple((name, _hashable(value)) for name, value in x.items())
    return tuple(map(_hashable, x)) if isinstance(x, (tuple, list)) else x
