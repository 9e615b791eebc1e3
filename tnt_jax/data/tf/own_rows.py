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


def _joined(element: tuple[Any, ...], dataset: Any) -> Any:
    return element if type(dataset.element_spec) is tuple else element[0]
