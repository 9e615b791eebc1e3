"""A callback made from functions."""

from collections.abc import Callable
from typing import Any

from tnt_jax.keras_compat.callbacks.base import Callback


class LambdaCallback(Callback):
    """Calls a function for each given hook, on every process.

    Args:
        on_epoch_begin: `f(epoch, logs)`.
        on_epoch_end: `f(epoch, logs)`.
        on_train_begin: `f(logs)`.
        on_train_end: `f(logs)`.
        on_train_batch_begin: `f(batch, logs)`.
        on_train_batch_end: `f(batch, logs)`.
        hooks: Functions by the name of another hook, with the hook's arguments: `on_test_end=lambda
            logs: ...`.

    Raises:
        TypeError: If a hook is unknown; the message lists the hooks.
    """

    def __init__(
        self,
        on_epoch_begin: Callable[..., Any] | None = None,
        on_epoch_end: Callable[..., Any] | None = None,
        on_train_begin: Callable[..., Any] | None = None,
        on_train_end: Callable[..., Any] | None = None,
        on_train_batch_begin: Callable[..., Any] | None = None,
        on_train_batch_end: Callable[..., Any] | None = None,
        **hooks: Callable[..., Any] | None,
    ) -> None:
        super().__init__()
        hooks |= {
            "on_epoch_begin": on_epoch_begin, "on_epoch_end": on_epoch_end,
            "on_train_begin": on_train_begin,
            "on_train_end": on_train_end, "on_train_batch_begin": on_train_batch_begin,
            "on_train_batch_end": on_train_batch_end,
        }  # fmt: skip
        known = sorted(name for name in dir(Callback) if name.startswith("on_"))
        unknown = sorted(name for name in hooks if name.startswith("on_") and name not in known)
        if unknown:
            raise TypeError(
                f"LambdaCallback has no hook {', '.join(unknown)}. The hooks are: "
                f"{', '.join(known)}."
            )
        for name, function in hooks.items():
            if function is not None:
                setattr(self, name, function)
