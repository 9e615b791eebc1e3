"""Private names of JAX that are missing for tnt_jax alone, while JAX itself has them, and what is
trained without them.
"""

import builtins
from contextlib import contextmanager
from types import ModuleType

import flax.linen as nn
import numpy as np
import optax


class Without(ModuleType):
    """A view of a module that lacks names."""

    def __init__(self, module, names):
        self.__dict__.update(module=module, names=names)

    def __getattr__(self, name):
        module, names = self.__dict__["module"], self.__dict__["names"]
        if f"{module.__name__}.{name}" in names:
            raise AttributeError(f"{module.__name__} lacks {name}")
        value = getattr(module, name)
        return Without(value, names) if isinstance(value, ModuleType) else value

    def __setattr__(self, name, value):
        setattr(self.__dict__["module"], name, value)


@contextmanager
def missing(names):
    """Hides names from the files of `_jax`."""
    before = builtins.__import__

    def import_without(name, globals=None, locals=None, fromlist=(), level=0):
        module = before(name, globals, locals, fromlist, level)
        is_ours = (globals or {}).get("__name__", "").startswith("tnt_jax._jax")
        is_jax = fromlist and name.partition(".")[0] in ("jax", "jaxlib")
        return Without(module, names) if is_ours and is_jax else module

    builtins.__import__ = import_without
    try:
        yield
    finally:
        builtins.__import__ = before


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.relu(nn.Dense(4)(x)))


class Drops(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=not train)(x))


def train(tnt, module, **options):
    """Returns the losses of a module, in training and in evaluation; the last batch is padded."""
    generator = np.random.default_rng(0)
    x, y = (generator.normal(size=(30, size)).astype(np.float32) for size in (4, 2))
    model = tnt.Model(module, seed=1, **options)
    model.compile(optax.sgd(0.1, momentum=0.9), loss="mse")
    losses = model.fit(x, y, batch_size=8, epochs=2, verbose=0).history["loss"]
    return [*losses, model.evaluate(x, y, batch_size=8, verbose=0)]
