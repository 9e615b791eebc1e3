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

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
