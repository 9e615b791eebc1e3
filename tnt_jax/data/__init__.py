"""The global batch: which rows each process reads, and where they come from.

The public names are listed in `__init__.pyi`; each is imported on first use, because some need
optional packages.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
