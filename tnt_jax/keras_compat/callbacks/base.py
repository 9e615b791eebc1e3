"""The base class of callbacks, and their hooks."""

from collections.abc import Mapping
from typing import Any

from tnt_jax.distributed.runtime import is_master_rank
from tnt_jax.keras_compat.callbacks.scope import Scope


class Callback:
    """Base class of callbacks: override the hooks you need.

    Names, arguments and order of the hooks are Keras's.

    Every process calls every hook with the same global numbers; only the master shows what a hook
    prints. A hook that writes files should check `self.writes` first. See `OnMaster` and
    `OnAllRanks` for other arrangements.

    Logs of a batch are averages over the epoch so far. Reading them waits for the devices; a hook
    that does not read them costs nothing.

    Attributes:
        model: The running `tnt_jax.Model`; set before the first hook. It offers `stop_training`,
            `optimizer.learning_rate`, `optimizer.iterations`, `get_weights`, `set_weights`, `save`,
            `save_weights` and `load_weights`.
        params: `epochs`, `steps`, `verbose`.
        siblings: All callbacks of the run, including this one.
        scope: The processes that take part in the actions of this callback.
    """

    # Whether it acts after all others, whatever its position in the list.
    runs_last = False

    def __init__(self) -> None:
        self.model: Any = None
        self.params: dict[str, Any] = {}
        self.siblings: list[Any] = []
        self.scope: Scope = "all_processes"

    @property
    def writes(self) -> bool:
        """Whether this process may write the files of this callback.

        Only the master may, or in `OnAllRanks` each process.
        """
        return self.scope == "per_process" or is_master_rank()

    def set_model(self, model: Any) -> None:
        """Receives the model before the first hook."""
        self.model = model

    def set_params(self, params: dict[str, Any]) -> None:
        """Receives `epochs`, `steps` and `verbose` before the first hook."""
        self.params = params

    def state(self) -> dict[str, Any]:
        """Returns the state that an interrupted run needs to resume.

        It consists of JSON values and lists of NumPy arrays by name.
        """
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Receives the result of `state`, after `on_train_begin` of the resumed run."""

    def on_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs before a training step; an older name of `on_train_batch_begin`."""

    def on_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs after a training step; an older name of `on_train_batch_end`."""

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Runs once before training."""

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Runs once after training, with the logs of the last epoch; not after an exception."""

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs before epoch `epoch`, counted from 0."""

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs after an epoch and its validation, with training logs and `val_` logs.

        All callbacks share these logs: later ones, and finally the `History`, see what earlier ones
        add.
        """

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs before step `batch` of the epoch."""
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs after step `batch` was started.

        `logs` are averages of the epoch so far; reading them waits for the devices.
        """
        self.on_batch_end(batch, logs)

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
