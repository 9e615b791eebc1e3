"""Callbacks with Keras's names, hooks and order of calls; Keras's own callbacks work, too.

```python
callbacks = [
    tnt.callbacks.EarlyStopping(patience=3),
    tnt.callbacks.ModelCheckpoint("runs/a"),
    keras.callbacks.CSVLogger("log.csv"),
]
model.fit(dataset, epochs=90, callbacks=callbacks)
```
"""

from tnt_jax.keras_compat.callbacks.backup_and_restore import BackupAndRestore
from tnt_jax.keras_compat.callbacks.base import Callback
from tnt_jax.keras_compat.callbacks.callback_list import CallbackList
from tnt_jax.keras_compat.callbacks.csv_logger import CSVLogger
from tnt_jax.keras_compat.callbacks.early_stopping import EarlyStopping
from tnt_jax.keras_compat.callbacks.fingerprint import Fingerprint
from tnt_jax.keras_compat.callbacks.history import History
from tnt_jax.keras_compat.callbacks.lambda_callback import LambdaCallback
from tnt_jax.keras_compat.callbacks.learning_rate import (
    LearningRateScheduler,
    LearningRateWarmup,
    ReduceLROnPlateau,
)
from tnt_jax.keras_compat.callbacks.logs import LazyLogs
from tnt_jax.keras_compat.callbacks.model_checkpoint import ModelCheckpoint
from tnt_jax.keras_compat.callbacks.orbax_checkpoint import OrbaxCheckpoint
from tnt_jax.keras_compat.callbacks.plot_history import PlotHistory
from tnt_jax.keras_compat.callbacks.progbar import ProgbarLogger
from tnt_jax.keras_compat.callbacks.remote_monitor import RemoteMonitor
from tnt_jax.keras_compat.callbacks.runtime_profiler import RuntimeProfiler
from tnt_jax.keras_compat.callbacks.scope import OnAllRanks, OnMaster
from tnt_jax.keras_compat.callbacks.swap_ema_weights import SwapEMAWeights
from tnt_jax.keras_compat.callbacks.tensorboard import TensorBoard
from tnt_jax.keras_compat.callbacks.terminate_on_nan import TerminateOnNaN

__all__ = [
    "BackupAndRestore",
    "CSVLogger",
    "Callback",
    "CallbackList",
    "EarlyStopping",
    "Fingerprint",
    "History",
    "LambdaCallback",
    "LazyLogs",
    "LearningRateScheduler",
    "LearningRateWarmup",
    "ModelCheckpoint",
    "OnAllRanks",
    "OnMaster",
    "OrbaxCheckpoint",
    "PlotHistory",
    "ProgbarLogger",
    "ReduceLROnPlateau",
    "RemoteMonitor",
    "RuntimeProfiler",
    "SwapEMAWeights",
    "TensorBoard",
    "TerminateOnNaN",
]
