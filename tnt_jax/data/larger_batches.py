"""The same data in larger global batches, for measurements of weak scaling."""

from dataclasses import replace
from fractions import Fraction
from typing import Any

from tnt_jax.data.dispatch import DEFAULT_BATCH_SIZE, gives_examples
from tnt_jax.data.kinds import is_tf_dataset, takes_batch_size
from tnt_jax.data.random_access import RandomAccess
from tnt_jax.data.ray.spec import RayData
from tnt_jax.data.tf.tfdata import TfData
from tnt_jax.data.token_batches import TokenBatches


def with_larger_batches(x: Any, batch_size: int | None, factor: Fraction) -> tuple[Any, int | None]:
    """Returns data, and the batch size of a call, with `factor` times the rows in each batch.

    Batches of a `tf.data` pipeline are put together and cut anew at its end.

    Args:
        x: Data without `tnt_micro_batch_size`, as of `fit`.
        batch_size: Rows of a global batch, as of `fit`.
        factor: By how much to multiply them.

    Raises:
        ValueError: If the product is no whole number, or the data makes batches by itself.
    """
    if batch_size is not None:
        return x, multiplied(batch_size, factor)
    if isinstance(x, RandomAccess | RayData) and x.batch_size is not None:
        return replace(x, batch_size=multiplied(x.batch_size, factor)), None
    if isinstance(x, TokenBatches):
        return replace(x, tokens_per_batch=multiplied(x.tokens_per_batch, factor)), None
    if isinstance(x, TfData):
        named = None if x.named is None else _rebatched(x.named, factor)
        return replace(x, dataset=_rebatched(x.dataset, factor), named=named), None
    if is_tf_dataset(x):
        return _rebatched(x, factor), None
    if takes_batch_size(x) or gives_examples(x):
        return x, multiplied(DEFAULT_BATCH_SIZE, factor)
    raise ValueError(
        f"The batches of a {type(x).__name__} are made by the script, so that tnt-jax scale --weak "
        "cannot make them larger. Measure with --strong, or pass arrays, a tf.data.Dataset or a "
        "RandomAccess."
    )


def multiplied(size: int, factor: Fraction) -> int:
    """Returns a batch size times a factor.

    Raises:
        ValueError: If that is no whole number.
    """
    product = size * factor
    if product.denominator != 1:
        raise ValueError(
            f"With --weak a global batch of {size} becomes {factor} times as large, which is no "
            "whole number. Choose numbers of ranks that are multiples of the lowest."
        )
    return int(product)


def _rebatched(dataset: Any, factor: Fraction) -> Any:
    from tnt_jax.data.tf.inspection import batching_of

    batching = batching_of(dataset)
    if batching is None:
        return dataset  # It is refused as in training.
    if batching.size is None:
        raise ValueError(
            "The batches of the tf.data.Dataset differ in size, or do not tell it, so that tnt-jax "
            "scale --weak cannot make them larger. Measure with --strong."
        )
    return dataset.rebatch(
        multiplied(batching.size, factor), drop_remainder=batching.drop_remainder
    )
