"""Support for Flax modules that users call themselves on the rows of a rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
from flax import linen, nnx

from tnt_jax.adapters.linen import by_moving_statistics, statistics_without_padding
from tnt_jax.adapters.loops import replaced
from tnt_jax.adapters.nnx import batch_norm_of


@contextmanager
def padding_left_out(mask: jax.Array | None) -> Iterator[None]:
    """Keeps rows with a 0 in the mask, if any, out of the statistics of all `BatchNorm`s."""
    if mask is None:
        yield
        return
    with (
        linen.intercept_methods(statistics_without_padding(mask)),
        replaced(nnx.BatchNorm, {"__call__": batch_norm_of(mask)}),
    ):
        yield


@contextmanager
def flax_batch_norm_off() -> Iterator[None]:
    """Lets all `BatchNorm`s use their moving statistics in the `with` block."""
    original = nnx.BatchNorm.__call__

    def of_nnx(layer: nnx.BatchNorm, x: jax.Array, *_: Any, **__: Any) -> jax.Array:
        return original(layer, x, use_running_average=True)

    with (
        linen.intercept_methods(by_moving_statistics),
        replaced(nnx.BatchNorm, {"__call__": of_nnx}),
    ):
        yield
