"""The hooks of a callback."""

from collections.abc import Mapping
from typing import Any

from tnt_jax.keras_compat.callbacks.placement import Company
from tnt_jax.runtime import is_master_rank


class Callback:
    """Base class of callbacks: override the hooks you need; names, arguments and order are Keras's.

    Every process calls every hook with the same global numbers; what it prints is shown by the master only. A hook that writes files
    should look at `self.writes` first. See `OnMaster` and `OnAllRanks` for other arrangements.

    Logs of a batch are averages over the epoch so far. Reading them waits for the devices; a hook that does not read them costs
    nothing.

    Attributes:
        model: The `tnt_jax.Model` that runs; set before the first hook. It offers `stop_training`, `optimizer.learning_rate`,
            `optimizer.iterations`, `get_weights`, `set_weights`, `save`, `save_weights` and `load_weights`.
        params: `epochs`, `steps`, `verbose`.
        siblings: All callbacks of the run, this one among them.
        company: Which processes run this callback together.
    """

    # Whether it acts after all others, wherever it stands in the list.
    runs_last = False

    def __init__(self) -> None:
        self.model: Any = None
        self.params: dict[str, Any] = {}
        self.siblings: list[Any] = []
        self.company: Company = "together"

    @property
    def writes(self) -> bool:
        """Whether this process may write the files of this callback: the master, or each process in `OnAllRanks`."""
        return self.company == "each" or is_master_rank()

    def set_model(self, model: Any) -> None:
        """Receives the model before the first hook."""
        self.model = model

    def set_params(self, params: dict[str, Any]) -> None:
        """Receives `epochs`, `steps` and `verbose` before the first hook."""
        self.params = params

    def state(self) -> dict[str, Any]:
        """Returns what an interrupted run needs to go on: JSON values and lists of NumPy arrays by name."""
        return {}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Receives what `state` returned, after `on_train_begin` of the run that goes on."""

    def on_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs before a training step, an older name of `on_train_batch_begin`."""

    def on_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs after a training step, an older name of `on_train_batch_end`."""

    def on_train_begin(self, logs: Mapping[str, float] | None = None) -> None:
        """Runs once before training."""

    def on_train_end(self, logs: Mapping[str, float] | None = None) -> None:
        """Runs once after training, with the logs of the last epoch; not after an exception."""

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs before epoch `epoch`, counted from 0."""

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs after an epoch and its validation, with training logs and `val_` logs.

        All callbacks share these logs: what one adds, those after it see, the `History` last.
        """

    def on_train_batch_begin(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs before step `batch` of the epoch."""
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Mapping[str, float] | None = None) -> None:
        """Runs after step `batch` was started; reading `logs` (averages of the epoch so far) waits for the devices."""
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
