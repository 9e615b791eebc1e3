"""Support for Flax modules that users call themselves on the rows of a rank."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
from flax import linen, nnx

from tnt_jax.adapters.forward_passes import replaced
from tnt_jax.adapters.linen import by_moving_statistics, statistics_without_padding
from tnt_jax.adapters.nnx import batch_norm_of


@contextmanager
def _batch_norms(of_linen: Callable, of_nnx: Callable) -> Iterator[None]:
    with linen.intercept_methods(of_linen), replaced(nnx.BatchNorm, {"__call__": of_nnx}):
        yield


def padding_left_out(mask: jax.Array | None) -> AbstractContextManager[None]:
    """Keeps rows with a 0 in the mask, if any, out of the statistics of all `BatchNorm`s."""
    if mask is None:
        return nullcontext()
    return _batch_norms(statistics_without_padding(mask), batch_norm_of(mask))


def flax_batch_norm_off() -> AbstractContextManager[None]:
    """Lets all `BatchNorm`s use their moving statistics in the `with` block."""
    original = nnx.BatchNorm.__call__

    def of_nnx(layer: nnx.BatchNorm, x: jax.Array, *_: Any, **__: Any) -> jax.Array:
        return original(layer, x, use_running_average=True)

    return _batch_norms(by_moving_statistics, of_nnx)
