"""Losses with Keras's names, arguments and numbers, for JAX arrays; `losses.get` finds one by name.

```python
model.compile(loss=tnt_jax.losses.SparseCategoricalCrossentropy(from_logits=True))
value = tnt_jax.losses.get("mse")(y_true, y_pred)
```

A training step calls `Loss.terms`, whose sums add up over ranks. Functions in lower case give values [batch, ...].
"""

from tnt_jax.keras_compat.losses.base import Loss, LossFunctionWrapper, divide_no_nan
from tnt_jax.keras_compat.losses.checks import check_labels, check_outputs
from tnt_jax.keras_compat.losses.classes import (
    BinaryCrossentropy,
    CategoricalCrossentropy,
    MeanAbsoluteError,
    MeanSquaredError,
    SparseCategoricalCrossentropy,
)
from tnt_jax.keras_compat.losses.crossentropy import (
    binary_crossentropy,
    binary_focal_crossentropy,
    categorical_crossentropy,
    categorical_focal_crossentropy,
    sparse_categorical_crossentropy,
)
from tnt_jax.keras_compat.losses.lookup import get
from tnt_jax.keras_compat.losses.regression import mean_absolute_error, mean_squared_error

__all__ = [
    "BinaryCrossentropy",
    "CategoricalCrossentropy",
    "Loss",
    "LossFunctionWrapper",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "SparseCategoricalCrossentropy",
    "binary_crossentropy",
    "binary_focal_crossentropy",
    "categorical_crossentropy",
    "categorical_focal_crossentropy",
    "check_labels",
    "check_outputs",
    "divide_no_nan",
    "get",
    "mean_absolute_error",
    "mean_squared_error",
    "sparse_categorical_crossentropy",
]
