"""Metrics with Keras's names, arguments and numbers, exact over ranks; `metrics.get` finds one by name.

```python
metric = tnt_jax.metrics.SparseTopKCategoricalAccuracy(k=3)
metric.update_state(y_true, y_pred)
float(metric.result())
```
"""

from tnt_jax.keras_compat.metrics.accuracy import (
    Accuracy,
    BinaryAccuracy,
    CategoricalAccuracy,
    SparseCategoricalAccuracy,
    SparseTopKCategoricalAccuracy,
    TopKCategoricalAccuracy,
    binary_accuracy,
    categorical_accuracy,
    sparse_categorical_accuracy,
    sparse_top_k_categorical_accuracy,
    top_k_categorical_accuracy,
)
from tnt_jax.keras_compat.metrics.base import Mean, MeanMetricWrapper, Metric, Sum
from tnt_jax.keras_compat.metrics.lookup import check_outputs, get
from tnt_jax.keras_compat.metrics.of_losses import (
    BinaryCrossentropy,
    CategoricalCrossentropy,
    MeanAbsoluteError,
    MeanSquaredError,
    RootMeanSquaredError,
    SparseCategoricalCrossentropy,
)

__all__ = [
    "Accuracy",
    "BinaryAccuracy",
    "BinaryCrossentropy",
    "CategoricalAccuracy",
    "CategoricalCrossentropy",
    "Mean",
    "MeanAbsoluteError",
    "MeanMetricWrapper",
    "MeanSquaredError",
    "Metric",
    "RootMeanSquaredError",
    "SparseCategoricalAccuracy",
    "SparseCategoricalCrossentropy",
    "SparseTopKCategoricalAccuracy",
    "Sum",
    "TopKCategoricalAccuracy",
    "binary_accuracy",
    "categorical_accuracy",
    "check_outputs",
    "get",
    "sparse_categorical_accuracy",
    "sparse_top_k_categorical_accuracy",
    "top_k_categorical_accuracy",
]
