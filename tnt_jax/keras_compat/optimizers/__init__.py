"""Optimizers with Keras's names, arguments and numbers, as Optax transformations.

`optimizers.get` finds one by name.

```python
optimizer = tnt_jax.optimizers.AdamW(1e-3, weight_decay=0.01, global_clipnorm=1.0)
optimizer.exclude_from_weight_decay(["bias", "scale"])
transformation = optimizer.transformation()
opt_state = transformation.init(params)
opt_state = write_learning_rate(opt_state, 1e-4)
```
"""

from tnt_jax.keras_compat.optimizers.averaging import Ftrl, ScheduleFreeAdamW
from tnt_jax.keras_compat.optimizers.base import LearningRate, Optimizer, OptimizerState
from tnt_jax.keras_compat.optimizers.elementwise import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Lion,
    Nadam,
    RMSprop,
)
from tnt_jax.keras_compat.optimizers.layerwise import Adafactor, Lamb, Muon
from tnt_jax.keras_compat.optimizers.lookup import (
    OptaxOptimizer,
    deserialize,
    get,
    read_learning_rate,
    serialize,
    write_learning_rate,
)
from tnt_jax.keras_compat.optimizers.loss_scaling import LossScaleOptimizer

__all__ = [
    "SGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "Lamb",
    "LearningRate",
    "Lion",
    "LossScaleOptimizer",
    "Muon",
    "Nadam",
    "OptaxOptimizer",
    "Optimizer",
    "OptimizerState",
    "RMSprop",
    "ScheduleFreeAdamW",
    "deserialize",
    "get",
    "read_learning_rate",
    "serialize",
    "write_learning_rate",
]
