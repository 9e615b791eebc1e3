"""One seed for everything that draws random numbers: `tnt_jax.set_seed(seed)`."""

import os
import random
import sys

import numpy as np

from tnt_jax.log import logger

_seed: int | None = None


def set_seed(seed: int) -> None:
    """Seeds Python's `random`, NumPy, TensorFlow and Keras where they are imported, and models that are made afterwards.

    A `tnt_jax.Model` without a seed of its own takes this one for fresh variables, dropout, and the order of shuffled arrays. Shuffles
    and random operations of `tf.data` without a seed take it, too (42 if it is 0 or was not set). Call it on every process with the
    same number, before making models and datasets, and again after importing TensorFlow or Keras.

    `PYTHONHASHSEED`, on which the order of Python sets depends, counts at the start of the interpreter only; the log says so where it
    is not set.

    Args:
        seed: From 0 to 2**32 - 1, the range of NumPy's seeds.

    Raises:
        ValueError: If the seed is out of range.
    """
    global _seed
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be from 0 to 2**32 - 1, but is {seed}.")
    seeded = ["random", "numpy", "tnt_jax"]
    if "keras" in sys.modules:
        sys.modules["keras"].utils.set_random_seed(seed)
        seeded.append("keras")
    if "tensorflow" in sys.modules:
        sys.modules["tensorflow"].random.set_seed(seed)
        seeded.append("tensorflow")
    random.seed(seed)
    np.random.seed(seed)
    _seed = seed
    logger.info("Seeded %s with %d.", ", ".join(seeded), seed)
    if os.environ.get("PYTHONHASHSEED", "random") == "random":
        logger.info(
            "The order of Python sets differs between runs: set PYTHONHASHSEED before the start if your data depends on it."
        )


def seed_or_default(seed: int | None, *, default: int = 0) -> int:
    """Returns `seed`, or the one of the last `set_seed`, or `default`."""
    return seed if seed is not None else _seed if _seed is not None else default
