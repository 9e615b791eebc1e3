"""Losses with Keras's names, arguments and numbers, for JAX arrays; `losses.get` finds one by name.

```python
model.compile(loss=tnt_jax.losses.SparseCategoricalCrossentropy(from_logits=True))
value = tnt_jax.losses.get("mse")(y_true, y_pred)
```

A training step calls `Loss.terms`, whose sums add up over ranks. Functions in lower case return
values [batch, ...].
"""

from tnt_jax.keras_compat.losses.alignment import CTC, Circle, circle, ctc
from tnt_jax.keras_compat.losses.arrays import divide_no_nan
from tnt_jax.keras_compat.losses.base import Loss, LossFunctionWrapper
from tnt_jax.keras_compat.losses.checks import check_labels, check_outputs, check_rows
from tnt_jax.keras_compat.losses.crossentropy import (
    binary_crossentropy,
    binary_focal_crossentropy,
    categorical_crossentropy,
    categorical_focal_crossentropy,
    categorical_generalized_cross_entropy,
    kl_divergence,
    sparse_categorical_crossentropy,
)
from tnt_jax.keras_compat.losses.crossentropy_classes import (
    BinaryCrossentropy,
    BinaryFocalCrossentropy,
    CategoricalCrossentropy,
    CategoricalFocalCrossentropy,
    CategoricalGeneralizedCrossEntropy,
    KLDivergence,
    SparseCategoricalCrossentropy,
)
from tnt_jax.keras_compat.losses.lookup import deserialize, get, serialize
from tnt_jax.keras_compat.losses.margin import (
    CategoricalHinge,
    Hinge,
    SquaredHinge,
    categorical_hinge,
    hinge,
    squared_hinge,
)
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
from tnt_jax.keras_compat.losses.segmentation import Dice, Tversky, dice, tversky

__all__ = [
    "CTC",
    "BinaryCrossentropy",
    "BinaryFocalCrossentropy",
    "CategoricalCrossentropy",
    "CategoricalFocalCrossentropy",
    "CategoricalGeneralizedCrossEntropy",
    "CategoricalHinge",
    "Circle",
    "CosineSimilarity",
    "Dice",
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
    "Tversky",
    "binary_crossentropy",
    "binary_focal_crossentropy",
    "categorical_crossentropy",
    "categorical_focal_crossentropy",
    "categorical_generalized_cross_entropy",
    "categorical_hinge",
    "check_labels",
    "check_outputs",
    "check_rows",
    "circle",
    "cosine_similarity",
    "ctc",
    "deserialize",
    "dice",
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
    "serialize",
    "sparse_categorical_crossentropy",
    "squared_hinge",
    "tversky",
]
