"""Keras layers inside a step: random numbers per row, statistics and sums without padding."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import keras

from tnt_jax import _jax
from tnt_jax.adapters.batch_statistics import real_row_moments
from tnt_jax.adapters.replacing import replaced

_moments = keras.layers.BatchNormalization._moments


@contextmanager
def layers_of_a_rank(
    layers: list[keras.Layer],
    *,
    key: jax.Array,
    mask: jax.Array | None,
    num_rows: int,
    synchronized: bool,
) -> Iterator[list[Any]]:
    """Traces layers over one rank's rows, as part of the global batch, in the `with` block.

    Yields a list that gets one entry for each activity regularizer loss that leaves out padded
    rows.

    Args:
        layers: All layers of the model, nested ones included.
        key: Key that draws per row of the global batch. It replaces the states of all seed
            generators.
        mask: float32 `[rows]`, 0 for padded rows; None when there are none.
        num_rows: Rows of this rank, padding included.
        synchronized: Whether the statistics of batch normalisation are those of all ranks together.
    """
    draws = count()

    def next_key(generator: keras.random.SeedGenerator, ordered: bool = True) -> jax.Array:
        return jax.random.fold_in(key, next(draws))

    def moments(layer: keras.layers.BatchNormalization, inputs: jax.Array, given: Any) -> Any:
        is_of_rows = inputs.shape[0] == num_rows and layer.axis % inputs.ndim != 0
        if given is not None or not is_of_rows or (mask is None and not synchronized):
            return _moments(layer, inputs, given)
        rows = jnp.ones(num_rows, jnp.float32) if mask is None else mask
        axes = _jax.rank_axes() if synchronized else None
        return real_row_moments(inputs, rows, feature_dim=layer.axis, axis_name=axes)

    with ExitStack() as stack:
        stack.enter_context(replaced(keras.random.SeedGenerator, {"next": next_key}))
        stack.enter_context(replaced(keras.layers.BatchNormalization, {"_moments": moments}))
        yield [] if mask is None else stack.enter_context(_regularising_real_rows(layers, mask))


@contextmanager
def keras_batch_norm_off() -> Iterator[None]:
    """Lets all batch normalisation use its moving statistics in the `with` block."""
    original = keras.layers.BatchNormalization.call

    def call(layer: Any, inputs: jax.Array, training: Any = None, mask: Any = None) -> Any:
        return original(layer, inputs, training=False, mask=mask)

    with replaced(keras.layers.BatchNormalization, {"call": call}):
        yield


@contextmanager
def _regularising_real_rows(layers: list[keras.Layer], mask: jax.Array) -> Iterator[list[Any]]:
    """Makes activity regularizers, which Keras averages over rows, average over real rows."""
    regularized = [layer for layer in layers if layer.activity_regularizer is not None]
    originals = [layer.activity_regularizer for layer in regularized]
    real_rows = jnp.maximum(jnp.sum(mask), 1)
    regularized_outputs: list[Any] = []

    def of_real_rows(regularizer: Any) -> Callable:
        def regularize(outputs: jax.Array) -> jax.Array:
            if outputs.shape[:1] != mask.shape:
                return regularizer(outputs)
            regularized_outputs.append(outputs)
            shaped = mask.reshape(-1, *(1,) * (outputs.ndim - 1))
            return regularizer(jnp.where(shaped != 0, outputs, 0)) * (mask.shape[0] / real_rows)

        return regularize

    try:
        for layer, regularizer in zip(regularized, originals, strict=True):
            layer.activity_regularizer = of_real_rows(regularizer)
        yield regularized_outputs
    finally:
        for layer, regularizer in zip(regularized, originals, strict=True):
            layer.activity_regularizer = regularizer
