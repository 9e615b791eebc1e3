"""Callbacks with Keras's names, hooks and order of calls; Keras's own callbacks work, too.

```python
callbacks = [
    tnt.callbacks.EarlyStopping(patience=3),
    tnt.callbacks.ModelCheckpoint("runs/a"),
    keras.callbacks.CSVLogger("log.csv"),
]
model.fit(dataset, epochs=90, callbacks=callbacks)
```
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
