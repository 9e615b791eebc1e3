"""Data-parallel training for Flax and Keras models on any number of devices.

The global batch decides the mathematics, the number of devices only the speed.

```python
import tnt_jax as tnt

model = tnt.Model(module)
loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
model.fit(dataset, epochs=3)
```

The public names are listed in `__init__.pyi`; each is imported on first use, so importing the
package is cheap and the launcher never starts JAX.
"""

import lazy_loader

from tnt_jax import models

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = "0.1.0"

# Keras has these functions in `models`, too. Ours knows nothing of training: it is given them here.
_OF_MODELS = ["clone_model", "load_model", "model_from_config", "model_from_json", "save_model"]
_get_module = models.__getattr__
models.__all__.extend(_OF_MODELS)
models.__getattr__ = lambda name: __getattr__(name) if name in _OF_MODELS else _get_module(name)
