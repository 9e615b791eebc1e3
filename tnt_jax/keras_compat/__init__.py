"""The Keras-style API: a thin layer over the trainer, which works without it."""

import lazy_loader

_ROOMS = ["callbacks", "losses", "metrics", "optimizers", "schedules"]

__getattr__, __dir__, __all__ = lazy_loader.attach(__name__, _ROOMS)
