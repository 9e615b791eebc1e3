"""Losses with Keras's names, arguments and numbers, for JAX arrays; `losses.get` finds one by name.

```python
model.compile(loss=tnt_jax.losses.SparseCategoricalCrossentropy(from_logits=True))
value = tnt_jax.losses.get("mse")(y_true, y_pred)
```

A training step calls `Loss.terms`, whose sums add up over ranks. Functions in lower case return
values [batch, ...].
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
