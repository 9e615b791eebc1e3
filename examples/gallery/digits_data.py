"""Handwritten digits for the programs of this folder: scikit-learn's 1,797 real images."""

import numpy as np
from sklearn.datasets import load_digits

_INK = np.array(list(" .:-=+*#%@"))


def load():
    """Returns training and test images `[n, 8, 8, 1]` in [0, 1] with labels; every fifth is for
    testing.
    """
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    is_test = np.arange(len(images)) % 5 == 0
    return (images[~is_test], digits.target[~is_test]), (images[is_test], digits.target[is_test])


def as_text(images):
    """Returns images `[n, height, width]` in [0, 1] side by side, two letters for each pixel."""
    letters = _INK[np.clip(np.asarray(images) * 10, 0, 9).astype(int)]
    rows = np.concatenate(list(letters), axis=1)
    return "\n".join("".join(np.repeat(row, 2)).rstrip() for row in rows)
