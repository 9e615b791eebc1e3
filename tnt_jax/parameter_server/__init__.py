"""Parameter servers on Ray: asynchronous training, bounded staleness, or backup workers.

```python
with tnt.ParameterServer(model, num_servers=2, num_workers=4) as server:
    server.fit(x, y, batch_size=64, epochs=3)
```
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
