"""Losses with Keras's names, arguments and numbers, for JAX arrays; `losses.get` finds one by name.

```python
model.compile(loss=tnt_jax.losses.SparseCategoricalCrossentropy(from_logits=True))
value = tnt_jax.losses.get("mse")(y_true, y_pred)
```

A training step calls `Loss.terms`, whose sums add up over ranks. Functions in lower case give values [batch, ...].
"""

from tnt_jax.keras_compat.losses.base import Loss, LossFunctionWrapper, divide_no_nan
from tnt_jax.keras_compat.losses.checks import check_labels, check_outputs, check_rows
from tnt_jax.keras_compat.losses.crossentropy import (
    binary_crossentropy,
    binary_focal_crossentropy,
    categorical_crossentropy,
    categorical_focal_crossentropy,
    kl_divergence,
    sparse_categorical_crossentropy,
)
from tnt_jax.keras_compat.losses.crossentropy_classes import (
    BinaryCrossentropy,
    BinaryFocalCrossentropy,
    CategoricalCrossentropy,
    CategoricalFocalCrossentropy,
    KLDivergence,
    SparseCategoricalCrossentropy,
)
from tnt_jax.keras_compat.losses.lookup import get
from tnt_jax.keras_compat.losses.margin import CategoricalHinge, Hinge, SquaredHinge, categorical_hinge, hinge, squared_hinge
from tnt_jax.keras_compat.losses.regression import (
    CosineSimilarity,
    Huber,
    LogCosh,
    MeanAbsoluteError,
    MeanAbsolutePercentageError,
    MeanSquaredError,
    MeanSquaredLogarithmicError,
    Poisson,
    cosine_similarity,
    huber,
    log_cosh,
    mean_absolute_error,
    mean_absolute_percentage_error,
    mean_squared_error,
    mean_squared_logarithmic_error,
    poisson,
)

__all__ = [
    "BinaryCrossentropy",
    "BinaryFocalCrossentropy",
    "CategoricalCrossentropy",
    "CategoricalFocalCrossentropy",
    "CategoricalHinge",
    "CosineSimilarity",
    "Hinge",
    "Huber",
    "KLDivergence",
    "LogCosh",
    "Loss",
    "LossFunctionWrapper",
    "MeanAbsoluteError",
    "MeanAbsolutePercentageError",
    "MeanSquaredError",
    "MeanSquaredLogarithmicError",
    "Poisson",
    "SparseCategoricalCrossentropy",
    "SquaredHinge",
    "binary_crossentropy",
    "binary_focal_crossentropy",
    "categorical_crossentropy",
    "categorical_focal_crossentropy",
    "categorical_hinge",
    "check_labels",
    "check_outputs",
    "check_rows",
    "cosine_similarity",
    "divide_no_nan",
    "get",
    "hinge",
    "huber",
    "kl_divergence",
    "log_cosh",
    "mean_absolute_error",
    "mean_absolute_percentage_error",
    "mean_squared_error",
    "mean_squared_logarithmic_error",
    "poisson",
    "sparse_categorical_crossentropy",
    "squared_hinge",
]
