"""Greedy search and beam search for models that score one token at a time.

Both searches are one `while_loop` on the device; the model is a function

    step(tokens_BK, position, cache) -> (logits_BKV, cache)

of the token before `position` in each of K beams of B rows. Leaves of the cache are [B, K, ...].

Shape legend: B batch, K beams, L length of the result, V vocabulary.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

START_ID = 0
EOS_ID = 1

Step = Callable[[jax.Array, jax.Array, Any], tuple[jax.Array, Any]]


class Sequences(NamedTuple):
    """The sequences found, best first.

    Attributes:
        tokens_BKL: Token ids, int32: each sequence ends with the end token (or at L) and is padded
            with 0.
        scores_BK: log P(sequence) / length penalty; -inf where no sequence was found.
    """

    tokens_BKL: jax.Array
    scores_BK: jax.Array


class _Beams(NamedTuple):
    position: jax.Array
    alive: Sequences  # Scores are plain log P.
    finished: Sequences
    cache: Any


def length_penalty(length: jax.Array | int, alpha: float) -> jax.Array:
    """Returns ((5 + length) / 6) ** alpha (Wu et al. 2016, arXiv:1609.08144, eq. 14)."""
    return ((5.0 + jnp.asarray(length, jnp.float32)) / 6.0) ** alpha


def greedy_search(
    step: Step, cache: Any, *, rows_B: jax.Array, length: int, eos_id: int = EOS_ID
) -> Sequences:
    """Takes the most probable token at every position until each row has ended.

    Args:
        step: Model; called with one beam.
        cache: Its state before the first position, leaves [B, 1, ...].
        rows_B: Any array with one value per row, from which B is read.
        length: Largest number of tokens L, the end token included.
        eos_id: End token.

    Returns:
        One sequence per row; its score is log P without a penalty.
    """
    scores_B1 = jnp.zeros_like(rows_B, jnp.float32)[:, None] + _zero(rows_B)
    first = _no_sequences(rows_B, 1, length)._replace(scores_BK=scores_B1)

    def is_open(tokens_B1L: jax.Array) -> jax.Array:
        return jnp.all(tokens_B1L != eos_id, axis=-1)

    def more(state: tuple[jax.Array, Sequences, Any]) -> jax.Array:
        return (state[0] < length) & jnp.any(is_open(state[1].tokens_BKL))

    def extend(state: tuple[jax.Array, Sequences, Any]) -> tuple[jax.Array, Sequences, Any]:
        position, found, cache = state
        logits_B1V, cache = step(_previous(found.tokens_BKL, position), position, cache)
        log_probs_B1V = jax.nn.log_softmax(logits_B1V.astype(jnp.float32))
        token_B1 = jnp.argmax(log_probs_B1V, axis=-1).astype(jnp.int32)
        open_B1 = is_open(found.tokens_BKL)
        tokens_BKL = _write(found.tokens_BKL, jnp.where(open_B1, token_B1, 0), position)
        scores_BK = found.scores_BK + jnp.where(open_B1, jnp.max(log_probs_B1V, axis=-1), 0.0)
        return position + 1, Sequences(tokens_BKL, scores_BK), cache

    return jax.lax.while_loop(more, extend, (_zero(rows_B)[0, 0], first, cache))[1]


def beam_search(
    step: Step,
    cache: Any,
    *,
    rows_B: jax.Array,
    num_beams: int,
    length: int,
    alpha: float = 0.6,
    eos_id: int = EOS_ID,
) -> Sequences:
    """Keeps the `num_beams` best open and the `num_beams` best ended sequences at each position.

    A row is done when no open sequence can reach the score of its worst ended one, or at `length`.
    Its result does not change while other rows continue, so it does not depend on them. With enough
    beams for all sequences the search is exact. A row without an ended sequence returns its open
    sequences, scored as if they ended at `length`.

    Args:
        step: Model.
        cache: Its state before the first position, leaves [B, K, ...].
        rows_B: Any array with one value per row, from which B is read.
        num_beams: Beams K.
        length: Largest number of tokens L, the end token included.
        alpha: Exponent of the length penalty; 0 compares plain log P, which favours short
            sequences.
        eos_id: End token.
    """
    alive = _no_sequences(rows_B, num_beams, length)
    # Only one beam is open at the start: otherwise all beams would remain the same sequence.
    alive = alive._replace(scores_BK=alive.scores_BK.at[:, 0].set(0.0) + _zero(rows_B))
    start = _Beams(_zero(rows_B)[0, 0], alive, _no_sequences(rows_B, num_beams, length), cache)

    def is_done(beams: _Beams) -> jax.Array:
        best_possible_B = beams.alive.scores_BK[:, 0] / length_penalty(length, alpha)
        found_BK = beams.finished.scores_BK > -jnp.inf
        worst_B = jnp.min(jnp.where(found_BK, beams.finished.scores_BK, jnp.inf), axis=1)
        return jnp.any(found_BK, axis=1) & (worst_B >= best_possible_B)

    def more(beams: _Beams) -> jax.Array:
        return (beams.position < length) & ~jnp.all(is_done(beams))

    def extend(beams: _Beams) -> _Beams:
        open_B, ended_B, parents_B, cache = _candidates(step, beams, num_beams, eos_id)
        penalty = length_penalty(beams.position + 1, alpha)
        ended_B = ended_B._replace(scores_BK=ended_B.scores_BK / penalty)
        both = jax.tree.map(partial(jnp.append, axis=1), beams.finished, ended_B)
        finished, _ = _top(both, num_beams)
        keep_done = partial(jax.vmap(jnp.where), is_done(beams))
        finished = jax.tree.map(keep_done, beams.finished, finished)
        alive, order_BK = _top(open_B, num_beams)
        parents_BK = jnp.take_along_axis(parents_B, order_BK, axis=1)
        cache = jax.tree.map(lambda leaf: _gather(leaf, parents_BK), cache)
        return _Beams(beams.position + 1, alive, finished, cache)

    beams = jax.lax.while_loop(more, extend, start)
    nothing_B1 = jnp.all(beams.finished.scores_BK == -jnp.inf, axis=1, keepdims=True)
    open_scores_BK = beams.alive.scores_BK / length_penalty(length, alpha)
    return Sequences(
        jnp.where(nothing_B1[..., None], beams.alive.tokens_BKL, beams.finished.tokens_BKL),
        jnp.where(nothing_B1, open_scores_BK, beams.finished.scores_BK),
    )


def _candidates(
    step: Step, beams: _Beams, num_beams: int, eos_id: int
) -> tuple[Sequences, Sequences, jax.Array, Any]:
    """Returns the 2K best continuations as open and as ended sequences, parents, and the cache."""
    # At most K of them end, one for each beam, so at least K stay open.
    alive, position = beams.alive, beams.position
    logits_BKV, cache = step(_previous(alive.tokens_BKL, position), position, beams.cache)
    log_probs_BKV = jax.nn.log_softmax(logits_BKV.astype(jnp.float32)) + alive.scores_BK[..., None]
    flat_BX = log_probs_BKV.reshape(log_probs_BKV.shape[0], -1)
    scores_BC, index_BC = jax.lax.top_k(flat_BX, 2 * num_beams)
    parents_BC, token_BC = jnp.divmod(index_BC, logits_BKV.shape[-1])
    tokens_BCL = _write(_gather(alive.tokens_BKL, parents_BC), token_BC, position)
    ends_BC = token_BC == eos_id
    still_open = Sequences(tokens_BCL, jnp.where(ends_BC, -jnp.inf, scores_BC))
    ended = Sequences(tokens_BCL, jnp.where(ends_BC, scores_BC, -jnp.inf))
    return still_open, ended, parents_BC, cache


def _top(sequences: Sequences, count: int) -> tuple[Sequences, jax.Array]:
    scores_BK, order_BK = jax.lax.top_k(sequences.scores_BK, count)
    return Sequences(_gather(sequences.tokens_BKL, order_BK), scores_BK), order_BK


def _gather(leaf: jax.Array, index_BK: jax.Array) -> jax.Array:
    """Returns leaf[b, index[b, k]] for a leaf [B, J, ...]."""
    index = index_BK.reshape(*index_BK.shape, *(1,) * (leaf.ndim - 2))
    return jnp.take_along_axis(leaf, index, axis=1)


def _previous(tokens_BKL: jax.Array, position: jax.Array) -> jax.Array:
    before = jnp.maximum(position - 1, 0)
    last_BK = jax.lax.dynamic_index_in_dim(tokens_BKL, before, axis=2, keepdims=False)
    return jnp.where(position > 0, last_BK, START_ID)


def _write(tokens_BKL: jax.Array, token_BK: jax.Array, position: jax.Array) -> jax.Array:
    token_BK1 = token_BK[..., None].astype(jnp.int32)
    return jax.lax.dynamic_update_slice_in_dim(tokens_BKL, token_BK1, position, axis=2)


def _no_sequences(rows_B: jax.Array, count: int, length: int) -> Sequences:
    tokens_BKL = jnp.zeros((rows_B.shape[0], count, length), jnp.int32) + _zero(rows_B)[..., None]
    return Sequences(tokens_BKL, jnp.full(tokens_BKL.shape[:2], -jnp.inf) + _zero(rows_B))


def _zero(rows_B: jax.Array) -> jax.Array:
    # Zeros [B, 1] made from the rows vary over the ranks of a `shard_map` as the rows do; the
    # initial carry of a loop must vary as the loop's results do.
    return jnp.zeros_like(rows_B, jnp.int32)[:, None] + (rows_B * 0).astype(jnp.int32)[:, None]
