"""The weight penalty of the tutorials: L2 on kernels, not on biases, BatchNorm or embeddings."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn


def kernel_penalty(params: Any, *, l2: float) -> jax.Array:
    """Returns `l2` times the sum of the squares of all leaves named `kernel`, float32.

    This is a Keras `L2` regularizer on each.

    The gradient is `2 * l2 * kernel`: a weight decay of 1e-4 in the sense of Goyal et al. 2017 is
    `l2 = 5e-5`.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    kernels = [leaf for path, leaf in leaves if getattr(path[-1], "key", None) == "kernel"]
    return l2 * sum(
        (jnp.sum(jnp.square(kernel.astype(jnp.float32))) for kernel in kernels), start=jnp.zeros(())
    )


def sow_kernel_penalty(module: nn.Module, *, l2: float) -> None:
    """Adds the penalty of the kernels of `module` to its collection `losses`.

    Call it at the end of the module's `__call__`, in training.
    """
    if l2 > 0 and not module.is_initializing():
        module.sow("losses", "kernel_l2", kernel_penalty(module.variables["params"], l2=l2))
