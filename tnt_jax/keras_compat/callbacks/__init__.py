"""Callbacks with Keras's names, hooks and order of calls."""

from tnt_jax.keras_compat.callbacks.base import Callback, CallbackList, LazyLogs
from tnt_jax.keras_compat.callbacks.history import History
from tnt_jax.keras_compat.callbacks.progbar import ProgbarLogger

__all__ = ["Callback", "CallbackList", "History", "LazyLogs", "ProgbarLogger"]
