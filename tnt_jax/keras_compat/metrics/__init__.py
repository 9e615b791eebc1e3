"""Metrics with Keras's names, arguments and numbers, exact over ranks.

`metrics.get` finds one by name.

```python
metric = tnt_jax.metrics.SparseTopKCategoricalAccuracy(k=3)
metric.update_state(y_true, y_pred)
float(metric.result())
```
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
