"""Sums between CPU processes that overlap with computation.

Only `distributed.gradients` chooses this engine. It is imported on first use.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
