"""PyTorch tensors as NumPy arrays; PyTorch is imported only if a tensor exists."""

from typing import Any

import ml_dtypes
import numpy as np


def is_torch_tensor(x: Any) -> bool:
    """Returns whether `x` is a PyTorch tensor, without importing PyTorch."""
    return any(cls.__module__ == "torch" and cls.__name__ == "Tensor" for cls in type(x).__mro__)


def torch_to_numpy(tensor: Any) -> np.ndarray:
    """Returns a tensor on any device as a host array, without its gradient.

    bfloat16 is kept.
    """
    import torch  # pyright: ignore[reportMissingImports]

    own = tensor.detach().cpu()
    if own.dtype == torch.bfloat16:
        return own.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return own.resolve_conj().resolve_neg().numpy()
