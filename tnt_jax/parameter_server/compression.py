"""Gradients as they are sent: in 32 bits, or in bfloat16 with what rounding leaves out sent later.

The error feedback is that of Karimireddy et al. 2019, arXiv:1901.09847: a worker adds what it has
not sent yet to its next gradient.
"""

from collections.abc import Sequence

import ml_dtypes
import numpy as np


class ErrorFeedback:
    """Rounds gradients to bfloat16, and keeps what rounding left out of those that were applied."""

    def __init__(self) -> None:
        self._kept: list[np.ndarray] | None = None
        self._tried: list[np.ndarray] | None = None

    def settle(self, *, was_applied: bool) -> None:
        """Notes what became of the gradients that were rounded last."""
        if self._tried is not None and was_applied:
            self._kept = self._tried
        self._tried = None

    def rounded(self, grads: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns what to send for gradients: float32 arrays in bfloat16, others as they are."""
        if self._kept is None:
            self._kept = [np.zeros_like(grad) for grad in grads]
        wanted = [grad + kept for grad, kept in zip(grads, self._kept, strict=True)]
        sent = [x.astype(ml_dtypes.bfloat16) if x.dtype == np.float32 else x for x in wanted]
        self._tried = [
            whole - part.astype(whole.dtype) for whole, part in zip(wanted, sent, strict=True)
        ]
        return sent


def to_wire(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns arrays that are sent without a copy: bfloat16 as its bits."""
    return [x.view(np.uint16) if x.dtype == ml_dtypes.bfloat16 else x for x in arrays]


def from_wire(arrays: Sequence[np.ndarray], dtypes: Sequence[np.dtype]) -> list[np.ndarray]:
    """Returns arrays of given dtypes from what `to_wire` made of them, rounded or not."""
    return [
        (x.view(ml_dtypes.bfloat16).astype(dtype) if x.dtype == np.uint16 != dtype else x)
        for x, dtype in zip(arrays, dtypes, strict=True)
    ]
