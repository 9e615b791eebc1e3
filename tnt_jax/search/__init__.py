"""Hyperparameter search with Optuna, in which all processes train each trial together.

Optuna is an optional package (`pip install "tnt-jax[optuna]"`), imported on first use. The public
names are listed in `__init__.pyi`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
