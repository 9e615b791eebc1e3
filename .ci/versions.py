"""Prints the versions that tests are run with, in one line."""

import importlib.metadata
import platform

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "keras", "tensorflow-cpu", "optax")

print(
    f"Python {platform.python_version()}",
    *(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES),
    sep=", ",
)
