"""One seed for everything that draws random numbers: `tnt_jax.set_seed(seed)`."""

import operator
import os
import random
import sys

import numpy as np

from tnt_jax.job import Slot
from tnt_jax.log import logger

# Of the last `set_seed` in this job, which may come before `init`.
_seed = Slot[int | None](lambda: None, lasts=True)


def set_seed(seed: int) -> None:
    """Seeds Python's `random`, NumPy and, if imported, TensorFlow and Keras, and all later models.

    A `tnt_jax.Model` without a seed of its own uses this seed for its initial variables, dropout
    and the order of shuffled arrays. So do unseeded shuffles and random operations of `tf.data` (42
    if the seed is 0 or was not set). Call this function with the same number on every process,
    before you create models and datasets, and again after importing TensorFlow or Keras.

    The order of Python sets depends on `PYTHONHASHSEED`, which takes effect only at the start of
    the interpreter; if it is not set, the log says so.

    Args:
        seed: A number from 0 to 2**32 - 1, the range of NumPy's seeds.

    Raises:
        TypeError: If the seed is no integer.
        ValueError: If the seed is out of range.
    """
    seed = operator.index(seed)  # An integer of NumPy is none to Python's `random`.
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
    _seed.set(seed)
    logger.info("Seeded %s with %d.", ", ".join(seeded), seed)
    if os.environ.get("PYTHONHASHSEED", "random") == "random":
        logger.info(
            "The order of Python sets differs between runs: set PYTHONHASHSEED before the start if "
            "your data depends on it."
        )


def seed_or_default(seed: int | None, *, default: int = 0) -> int:
    """Returns `seed`, or the one of the last `set_seed`, or `default`."""
    chosen = _seed.get() if seed is None else seed
    return default if chosen is None else operator.index(chosen)
