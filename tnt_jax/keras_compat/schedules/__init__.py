"""Learning-rate schedules: Keras's, and the warm-up and scaling rules of large batches.

```python
rate = tnt_jax.schedules.CosineDecay(0.0, 10_000, warmup_target=0.1, warmup_steps=500)
optimizer = tnt_jax.optimizers.SGD(rate)
```
A step counts updates, from 0; it may be a traced int32 scalar. Rates are float32 scalars.
"""

from tnt_jax.keras_compat.schedules.keras_schedules import (
    Constant,
    CosineDecay,
    CosineDecayRestarts,
    ExponentialDecay,
    InverseTimeDecay,
    LearningRateSchedule,
    PiecewiseConstantDecay,
    PolynomialDecay,
    deserialize,
    serialize,
)
from tnt_jax.keras_compat.schedules.large_batches import (
    GradualWarmup,
    InverseSquareRoot,
    WarmupSteps,
    scale_by_square_root,
    scale_linearly,
)

__all__ = [
    "Constant",
    "CosineDecay",
    "CosineDecayRestarts",
    "ExponentialDecay",
    "GradualWarmup",
    "InverseSquareRoot",
    "InverseTimeDecay",
    "LearningRateSchedule",
    "PiecewiseConstantDecay",
    "PolynomialDecay",
    "WarmupSteps",
    "deserialize",
    "scale_by_square_root",
    "scale_linearly",
    "serialize",
]
