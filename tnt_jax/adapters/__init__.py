"""The only rooms that know a model library: each turns one kind of model into pure functions of arrays."""

import sys
from collections.abc import Mapping
from typing import Any

from tnt_jax.adapters.base import Adapter


def adapter_for(module: Any, *, variables: Mapping[str, Any] | None = None) -> Adapter:
    """Returns the adapter for a model of any known kind.

    Args:
        module: A Flax Linen module.
        variables: Variables to start from, for modules that hold none themselves.

    Raises:
        TypeError: If the kind of `module` is unknown, or if its class was passed instead of an object.
    """
    if isinstance(module, type):
        raise TypeError(f"tnt_jax.Model needs a module, but got the class {module.__name__}. Create one: {module.__name__}(...).")
    linen = sys.modules.get("flax.linen")
    if linen is not None and isinstance(module, linen.Module):
        from tnt_jax.adapters.linen import LinenAdapter

        return LinenAdapter(module, variables=variables)
    raise TypeError(f"tnt_jax.Model needs a flax.linen.Module, but got {type(module).__module__}.{type(module).__qualname__}.")
