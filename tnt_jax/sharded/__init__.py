"""Models larger than a device: sharded parameters, gathered where they are used.

A third implementation of `train.contracts.Steps`; it handles only where arrays lie. Its names are
imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
