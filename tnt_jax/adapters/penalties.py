"""Losses that a model adds itself, as parts of the loss of the global batch."""

import functools
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax import _jax
from tnt_jax.distributed.sums.fused_psum import psum
from tnt_jax.distributed.sums.random_rows import DrawError, key_of_part, keys_of_parts
from tnt_jax.log import logger

Kind = Literal["mean", "sum"]


def with_penalty_of_real_rows(apply: Callable) -> Callable:
    """Decorates an adapter's `apply`: a loss that is a mean over rows leaves out padded rows.

    It is computed again for each row by itself, unless that would change it: then it warns.
    """

    @functools.wraps(apply)
    def wrapped(
        self: Any, params: Any, model_state: Any, inputs: Any, *, key: Any, train: bool, mask: Any
    ) -> Any:
        forward = functools.partial(apply, self, params, model_state, train=train)
        applied = forward(inputs, key=key, mask=mask)
        if not train or mask is None or not isinstance(applied.penalty, jax.Array):
            return applied

        def added(inputs: Any, params: Any, model_state: Any, key: Any, mask: Any) -> Any:
            applied = apply(self, params, model_state, inputs, key=key, train=train, mask=mask)
            return {"penalty": applied.penalty, "state": applied.model_state}

        # Values that a traced function is closed over would be operands, too.
        traced = jax.jit(added).trace(inputs, params, model_state, key, mask)
        flags = jax.tree.map(lambda _: False, traced.out_info)
        if not _depends(traced, {**flags, "penalty": True}):
            return applied
        rows_differ = jax.tree.leaves(inputs)[0].shape[0] != mask.shape[0]
        state_flags = {**flags, "state": jax.tree.map(lambda _: True, flags["state"])}
        if not (rows_differ or _jax.communicates(traced) or _depends(traced, state_flags)):
            with suppress(DrawError):
                return applied._replace(penalty=_penalty_of_rows(forward, inputs, key, mask))
        warn_of_repeated_rows(self)
        return applied

    return wrapped


def _depends(traced: Any, results: Any) -> bool:
    inputs, *_ = _jax.needed_operands(traced, results)
    return any(jax.tree.leaves(inputs))


def _penalty_of_rows(forward: Callable, inputs: Any, key: Any, mask: jax.Array) -> jax.Array:
    """Returns a rank's part of the mean over the real rows of all ranks."""

    def of_row(words: jax.Array, row: Any) -> jax.Array:
        alone = jax.tree.map(lambda x: x[None], row)
        return forward(alone, key=key_of_part(words), mask=None).penalty

    by_row = jax.vmap(of_row)(keys_of_parts(key, len(mask), 1), inputs)
    real = psum(jnp.sum(mask))
    share = jnp.sum(by_row * mask) / jnp.maximum(real, 1) * jax.lax.axis_size(_jax.rank_axes())
    # Where each rank's rows are computed by themselves, all of them may be padded.
    return jnp.where(real == 0, jnp.mean(by_row), share)


def warn_of_repeated_rows(adapter: Any, advice: str = "") -> None:
    """Warns once for each adapter that padded rows count in scalar losses of its model."""
    if not adapter.has_warned:
        adapter.has_warned = True
        logger.warning(
            "The model %r adds a scalar loss. In batches whose rows do not divide evenly among the "
            "ranks, often the last one, it includes repeated rows, so it depends on the number of "
            "devices. %sChoose a batch size that avoids them, or leave out the last batch.",
            adapter.name,
            advice,
        )


def kinds_of_losses(once: list[Any], twice: list[Any]) -> tuple[Kind, ...]:
    """Returns for each added loss of some rows, and of these twice, if it is a mean or a sum."""
    pairs = enumerate(zip(once, twice, strict=True))
    return tuple(_kind(index, float(np.sum(a)), float(np.sum(b))) for index, (a, b) in pairs)


def penalty_of(
    losses: list[jax.Array], kinds: tuple[Kind, ...], mask: jax.Array | None, num_rows: int
) -> jax.Array | float:
    """Returns the added losses of one rank; their mean over ranks is that of the global batch.

    Padded rows of losses `[rows, ...]`, which Keras sums, are left out. A scalar is weighted by its
    rank's share of the real rows, which is exact for regularizers, and without padding.
    """
    num_ranks = jax.lax.axis_size(_jax.rank_axes())
    penalty = 0.0
    for loss, kind in zip(losses, kinds, strict=True):
        factor: jax.Array | float = 1.0
        if mask is not None and loss.shape[:1] == (num_rows,):
            loss = jnp.where(mask.reshape(-1, *(1,) * (loss.ndim - 1)) != 0, loss, 0)
        elif mask is not None:
            real = jnp.sum(mask)
            total = psum(real)
            # Where each rank's rows are computed by themselves, all of them may be padded.
            share = jnp.where(total == 0, 1.0, real / jnp.maximum(total, 1) * num_ranks)
            factor = real / num_rows if kind == "sum" else share
        penalty += jnp.sum(loss.astype(jnp.float32)) * factor * (num_ranks if kind == "sum" else 1)
    return penalty


def _kind(index: int, once: float, twice: float) -> Kind:
    # A mean, like a weight regularizer, does not change if each row is repeated; a sum doubles. The
    # ranges are wide, because noise is drawn anew for each row.
    ratio = twice / once if once else np.inf
    if once == twice or 0.7 < ratio < 1.4:
        return "mean"
    if 1.4 <= ratio < 2.8:
        return "sum"
    raise ValueError(
        f"The loss number {index} that the model adds (add_loss) is neither a mean nor a sum over "
        f"the rows of a batch: it was {once:.6g} for some rows and {twice:.6g} when each was "
        "repeated. Training on parts of a batch needs one of the two."
    )
