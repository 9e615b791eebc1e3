"""A callback made of functions."""

from collections.abc import Callable
from typing import Any

from tnt_jax.keras_compat.callbacks.base import Callback


class LambdaCallback(Callback):
    """Calls a function for each hook that is given, on every process.

    Args:
        hooks: Functions by the name of a hook, with the hook's arguments: `on_epoch_end=lambda epoch, logs: ...`.

    Raises:
        TypeError: If there is no hook of a name; the message lists the hooks.
    """

    def __init__(self, **hooks: Callable[..., Any] | None) -> None:
        super().__init__()
        known = sorted(name for name in dir(Callback) if name.startswith("on_"))
        unknown = sorted(set(hooks) - set(known))
        if unknown:
            raise TypeError(f"LambdaCallback knows no hook {', '.join(unknown)}. The hooks are: {', '.join(known)}.")
        for name, function in hooks.items():
            if function is not None:
                setattr(self, name, function)
