"""The rows of each global batch that one process feeds, selected inside a pipeline."""

from typing import Any

import tensorflow as tf

from tnt_jax.data.layout import RankSlice


def select_own(dataset: Any, size: int, rank_slice: RankSlice, *, drop_remainder: bool) -> Any:
    """Selects the elements that one process feeds from each window of `size`.

    The result has elements `(number of rows, element)`, with the number of rows of the window.

    Args:
        dataset: Elements in the global order.
        size: Rows of a global batch.
        rank_slice: The process's part of the data axis.
        drop_remainder: Whether an incomplete last window is dropped.
    """

    def own(*window: Any) -> Any:
        parts = window if type(dataset.element_spec) is tuple else window[0]
        rows: Any = tf.data.Dataset.zip(parts) if tf.nest.is_nested(parts) else parts
        count = rows.cardinality()
        micro = -(-count // rank_slice.num_ranks)
        first, local = rank_slice.first_rank * micro, rank_slice.local_ranks * micro
        real = tf.minimum(tf.maximum(count - first, 0), local)
        padding = rows.skip(count - 1).repeat(local - real)
        return (
            rows.skip(first)
            .take(real)
            .concatenate(padding)
            .map(lambda *element: (count, _joined(element, dataset)))
        )

    return dataset.window(size, drop_remainder=drop_remainder).flat_map(own)


def take_own(batches: Any, rank_slice: RankSlice) -> Any:
    """Selects the rows that one process feeds from each global batch, as `select_own` does.

    The result has elements `(number of rows, own rows)`, with the number of rows of the batch.
    """

    def own(*batch: Any) -> Any:
        parts = batch if type(batches.element_spec) is tuple else batch[0]
        leaf = tf.nest.flatten(parts)[0]
        count: Any = leaf.shape[0] or tf.shape(leaf)[0]
        micro = -(-count // rank_slice.num_ranks)
        indices = rank_slice.first_rank * micro + tf.range(rank_slice.local_ranks * micro)
        chosen = tf.minimum(indices, count - 1)
        return tf.cast(count, tf.int64), tf.nest.map_structure(
            lambda x: tf.gather(x, chosen), parts
        )

    return batches.map(own)


def _joined(element: tuple[Any, ...], dataset: Any) -> Any:
    return element if type(dataset.element_spec) is tuple else element[0]
