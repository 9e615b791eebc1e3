"""The hooks of a callback, and the list that calls them in Keras's order."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

_PHASES = ("train", "test", "predict")


class Callback:
    """Base class of callbacks: override the hooks you need; names, arguments and order are Keras's.

    Every process calls every hook with the same global numbers. Hooks that print or write files should do so on the master only
    (`tnt_jax.is_master_rank()`).

    Attributes:
        model: The `tnt_jax.Model` that runs; set before the first hook.
        params: `epochs`, `steps`, `verbose`.
    """

    def __init__(self) -> None:
        self.model: Any = None
        self.params: dict[str, Any] = {}

    def set_model(self, model: Any) -> None:
        """Receives the model before the first hook."""
        self.model = model

    def set_params(self, params: dict[str, Any]) -> None:
        """Receives `epochs`, `steps` and `verbose` before the first hook."""
        self.params = params

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Runs once before training."""

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Runs once after training, with the logs of the last epoch."""

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs before epoch `epoch`, counted from 0."""

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs after an epoch and its validation, with training logs and `val_` logs."""

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs before step `batch` of the epoch."""

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs after step `batch` was started; reading `logs` (averages of the epoch so far) waits for the devices."""

    def on_test_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Runs before an evaluation."""

    def on_test_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Runs after an evaluation, with its logs."""

    def on_test_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs before a step of an evaluation."""

    def on_test_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs after a step of an evaluation was started."""

    def on_predict_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Runs before a prediction."""

    def on_predict_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Runs after a prediction."""

    def on_predict_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs before a step of a prediction."""

    def on_predict_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs after a step of a prediction."""


class LazyLogs(MutableMapping[str, float]):
    """Logs of a step that wait for the devices only when they are read.

    Args:
        read: Computes the logs.
    """

    def __init__(self, read: Callable[[], dict[str, float]]) -> None:
        self._read = read
        self._values: dict[str, float] | None = None

    def _dict(self) -> dict[str, float]:
        if self._values is None:
            self._values = self._read()
        return self._values

    def __getitem__(self, key: str) -> float:
        return self._dict()[key]

    def __setitem__(self, key: str, value: float) -> None:
        self._dict()[key] = value

    def __delitem__(self, key: str) -> None:
        del self._dict()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._dict())

    def __len__(self) -> int:
        return len(self._dict())

    def __bool__(self) -> bool:
        # Every step has a loss: asking whether there are logs (`logs or {}`) need not wait.
        return True

    def __repr__(self) -> str:
        return repr(self._dict())


class CallbackList:
    """Calls the hooks of several callbacks in order.

    Args:
        callbacks: Callbacks to call.
        model: Model they see.
        params: Parameters they see.
    """

    def __init__(self, callbacks: Sequence[Any], *, model: Any, params: dict[str, Any]) -> None:
        self.callbacks = list(callbacks)
        for callback in self.callbacks:
            callback.set_params(params)
            callback.set_model(model)
        # A batch hook that nobody overrides costs nothing: the loop runs ahead of the devices.
        hooks = [f"on_{phase}_batch_{moment}" for phase in _PHASES for moment in ("begin", "end")]
        self._batch_hooks = {name: [getattr(c, name) for c in self.callbacks if _overrides(c, name)] for name in hooks}

    def call(self, hook: str, *args: Any) -> None:
        """Calls one hook, such as `on_epoch_end`, of every callback."""
        for callback in self.callbacks:
            getattr(callback, hook)(*args)

    def call_batch(self, hook: str, batch: int, logs: Mapping[str, float] | None) -> None:
        """Calls one hook of a batch, such as `on_train_batch_end`, of the callbacks that have it."""
        for function in self._batch_hooks[hook]:
            function(batch, logs)

    def has_batch_hook(self, hook: str) -> bool:
        """Tells whether any callback has this hook of a batch."""
        return bool(self._batch_hooks[hook])


def _overrides(callback: Any, hook: str) -> bool:
    """Tells whether a callback's own class, or one between it and its library's base class, defines a hook."""
    function = getattr(type(callback), hook, None)
    is_inherited = any(function is cls.__dict__.get(hook) for cls in type(callback).__mro__ if cls.__name__ == "Callback")
    return hook in vars(callback) or (function is not None and not is_inherited)
