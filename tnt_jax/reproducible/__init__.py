"""Steps with the same bits on any number of devices.

A second implementation of `train.contracts.Steps`; it handles only programs. Its names are imported
on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
