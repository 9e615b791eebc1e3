"""Learning-rate schedules: Keras's, and the warm-up and scaling rules of large batches.

```python
rate = tnt_jax.schedules.CosineDecay(0.0, 10_000, warmup_target=0.1, warmup_steps=500)
optimizer = tnt_jax.optimizers.SGD(rate)
```
A step counts updates, from 0; it may be a traced int32 scalar. Rates are float32 scalars.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
