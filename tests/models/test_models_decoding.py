"""Greedy and beam search against enumeration and against plain Python."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from tnt_jax import models
from tnt_jax.models.decoding import EOS_ID

LONG = pytest.mark.long
VOCAB, NUM_STATES = 4, 97
ROWS = np.array([11, 5, 60], np.int32)


def next_state(state, token):
    return (state * 7 + token * 13 + 3) % NUM_STATES


@pytest.fixture(scope="module")
def table():
    """Logits of a small language model that remembers its whole history in one number: [state,
    token].
    """
    return np.random.default_rng(0).normal(0, 1.5, (NUM_STATES, VOCAB)).astype(np.float32)


def table_step(table, tokens_BK, position, states_BK):
    del position
    states_BK = next_state(states_BK, tokens_BK)
    return jnp.asarray(table)[states_BK], states_BK


def states(rows, num_beams):
    return jnp.broadcast_to(jnp.asarray(rows)[:, None], (len(rows), num_beams))


def log_prob(table, row, tokens):
    """log P of `tokens`, by Python."""
    state, previous, total = row, 0, 0.0
    for token in tokens:
        state = next_state(state, previous)
        logits = table[state].astype(np.float64)
        total += logits[token] - np.log(np.exp(logits).sum())
        previous = token
    return total


def penalty(length, alpha):
    return ((5 + length) / 6) ** alpha


def every_ended_sequence(table, row, length, alpha):
    """All sequences of at most `length` tokens that end, best first: [(score, tokens)]."""
    others = [token for token in range(VOCAB) if token != EOS_ID]
    found = []
    for inner in range(length):
        for start in itertools.product(others, repeat=inner):
            tokens = (*start, EOS_ID)
            found.append((log_prob(table, row, tokens) / penalty(len(tokens), alpha), tokens))
    return sorted(found, reverse=True)


def cut(tokens_L):
    tokens = tokens_L.tolist()
    return tuple(tokens[: tokens.index(EOS_ID) + 1]) if EOS_ID in tokens else tuple(tokens)


@partial(jax.jit, static_argnames=("num_beams", "length", "alpha"))
def beam_search(table, rows, *, num_beams, **settings):
    return models.beam_search(
        partial(table_step, table),
        states(rows, num_beams),
        rows_B=rows,
        num_beams=num_beams,
        **settings,
    )


def search(table, rows, **settings):
    return jax.tree.map(np.asarray, beam_search(table, rows, **settings))


@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
def test_beam_search_with_room_for_all_equals_enumeration(table, alpha):
    found = search(table, ROWS, num_beams=81, length=4, alpha=alpha)
    for row, tokens_KL, scores_K in zip(ROWS, *found, strict=True):
        expected = every_ended_sequence(table, row, 4, alpha)[:1]
        assert [cut(tokens_KL[0])] == [tokens for _, tokens in expected]
        np.testing.assert_allclose(scores_K[0], expected[0][0], rtol=1e-5)


def test_every_returned_sequence_has_the_score_of_its_tokens(table):
    found = search(table, ROWS, num_beams=3, length=6, alpha=0.6)
    for row, tokens_KL, scores_K in zip(ROWS, *found, strict=True):
        assert np.all(np.diff(scores_K) <= 0)
        for tokens_L, score in zip(tokens_KL, scores_K, strict=True):
            if np.isfinite(score):
                tokens = cut(tokens_L)
                np.testing.assert_allclose(
                    score, log_prob(table, row, tokens) / penalty(len(tokens), 0.6), rtol=1e-5
                )
                assert not np.any(tokens_L[len(tokens) :])


def python_beam_search(table, row, num_beams, length, alpha):
    """The best ended sequence of a beam search without any early stop; open ones if nothing
    ends.
    """
    alive, finished = [((), 0.0)], []
    for position in range(length):
        candidates = [
            ((*tokens, t), log_prob(table, row, (*tokens, t)))
            for tokens, _ in alive
            for t in range(VOCAB)
        ]
        candidates = sorted(candidates, key=lambda c: -c[1])[: 2 * num_beams]
        finished += [
            (lp / penalty(position + 1, alpha), tokens)
            for tokens, lp in candidates
            if tokens[-1] == EOS_ID and lp > -np.inf
        ]
        alive = [c for c in candidates if c[0][-1] != EOS_ID][:num_beams]
    return max(finished) if finished else (alive[0][1] / penalty(length, alpha), alive[0][0])


# Each value in the default run; `pytest -m long` tries them all together.
PRUNING = [
    case if case in {(4, 0.0), (1, 0.6), (2, 0.6), (2, 3.0)} else pytest.param(*case, marks=LONG)
    for case in itertools.product((1, 2, 4), (0.0, 0.6, 3.0))
]


@pytest.mark.parametrize(("num_beams", "alpha"), PRUNING)
def test_beam_search_that_prunes_equals_plain_python(table, num_beams, alpha):
    rows = np.arange(0, 96, 8, dtype=np.int32)
    found = search(table, rows, num_beams=num_beams, length=7, alpha=alpha)
    for row, tokens_KL, scores_K in zip(rows, *found, strict=True):
        score, tokens = python_beam_search(table, row, num_beams, 7, alpha)
        assert cut(tokens_KL[0]) == tokens
        np.testing.assert_allclose(scores_K[0], score, rtol=1e-5)


def test_rows_do_not_influence_each_other(table):
    together = search(table, ROWS, num_beams=3, length=9, alpha=0.6)
    for index in range(len(ROWS)):
        alone = search(table, ROWS[index : index + 1], num_beams=3, length=9, alpha=0.6)
        np.testing.assert_array_equal(together.tokens_BKL[index], alone.tokens_BKL[0])
        np.testing.assert_array_equal(together.scores_BK[index], alone.scores_BK[0])


def test_open_sequences_come_back_when_nothing_ends(table):
    endless = table.copy()
    endless[:, EOS_ID] = -np.inf
    found = search(endless, ROWS, num_beams=2, length=5, alpha=0.6)
    for row, tokens_KL, scores_K in zip(ROWS, *found, strict=True):
        assert EOS_ID not in tokens_KL
        score, tokens = python_beam_search(endless, row, 2, 5, 0.6)
        assert tuple(tokens_KL[0]) == tokens
        np.testing.assert_allclose(scores_K[0], score, rtol=1e-5)


def test_the_worked_length_penalty():
    # Wu et al. 2016, eq. 14.
    np.testing.assert_allclose(models.length_penalty(7, 0.6), 2**0.6, rtol=1e-6)
    assert models.length_penalty(7, 0.0) == 1


def greedy(table, rows, length):
    def run(rows):
        step = partial(table_step, table)
        return models.greedy_search(step, states(rows, 1), rows_B=rows, length=length)

    return jax.tree.map(np.asarray, jax.jit(run)(rows))


def test_greedy_search_equals_plain_python(table):
    found = greedy(table, ROWS, 6)
    for index, row in enumerate(ROWS):
        tokens = ()
        while len(tokens) < 6 and EOS_ID not in tokens:
            tokens += (max(range(VOCAB), key=lambda t: log_prob(table, row, (*tokens, t))),)
        assert cut(found.tokens_BKL[index, 0]) == tokens
        assert not np.any(found.tokens_BKL[index, 0, len(tokens) :])
        np.testing.assert_allclose(
            found.scores_BK[index, 0], log_prob(table, row, tokens), rtol=1e-5
        )


def test_greedy_search_equals_one_beam_where_the_end_is_certain(table):
    # One beam also keeps sequences whose end token was the second choice; a sure end token leaves
    # no second choice.
    certain = table.copy()
    certain[:, EOS_ID] = np.where(np.arange(NUM_STATES) % 3 == 0, 60.0, -60.0)
    rows = np.arange(0, 96, 5, dtype=np.int32)
    one_beam = search(certain, rows, num_beams=1, length=12, alpha=0.6)
    found = greedy(certain, rows, 12)
    ended = np.any(np.asarray(found.tokens_BKL) == EOS_ID, axis=-1)
    assert ended.any()
    np.testing.assert_array_equal(found.tokens_BKL, one_beam.tokens_BKL)


def translator(**changes):
    settings = {
        "vocab_size": 9,
        "width": 8,
        "num_heads": 2,
        "filter_dim": 12,
        "num_layers": 1,
        "extra_length": 3,
        **changes,
    }
    return models.Translator(**settings)


SOURCES = np.array([[3, 4, 5, 1], [6, 8, 1, 0], [7, 1, 0, 0], [2, 2, 2, 1]], np.int32)


@pytest.fixture(scope="module")
def trained_like():
    """Variables of a Translator with sharper logits than fresh ones."""
    variables = jax.jit(translator().init)(jax.random.key(3), SOURCES)
    return {"params": {**variables["params"], "embedding": 2 * variables["params"]["embedding"]}}


@pytest.mark.long
def test_translator_and_transformer_share_their_variables():
    module = translator()
    variables = module.init(jax.random.key(0), SOURCES)
    fresh = module.as_transformer().init(jax.random.key(0), SOURCES, SOURCES, train=False)
    jax.tree.map(np.testing.assert_array_equal, variables, fresh)


@pytest.mark.long
def test_translations_have_the_probability_of_the_full_pass(trained_like):
    module = translator(num_beams=3)
    found = jax.jit(
        partial(models.translate, module.as_transformer(), num_beams=3, extra_length=3)
    )(trained_like, SOURCES)
    transformer = module.as_transformer()
    for beam in range(3):
        tokens = found.tokens_BKL[:, beam]
        log_probs = jax.nn.log_softmax(
            transformer.apply(trained_like, SOURCES, tokens, train=False)
        )
        chosen = np.take_along_axis(np.asarray(log_probs), np.asarray(tokens)[..., None], axis=-1)[
            ..., 0
        ]
        for row in range(4):
            length = len(cut(tokens[row]))
            expected = chosen[row, :length].sum() / penalty(length, 0.6)
            if np.isfinite(found.scores_BK[row, beam]):
                np.testing.assert_allclose(found.scores_BK[row, beam], expected, rtol=1e-4)
    assert np.isfinite(found.scores_BK).sum() > 4


@pytest.mark.long  # A beam search of one is tested beside.
def test_greedy_translation_takes_the_argmax_of_the_full_pass(trained_like):
    transformer = translator().as_transformer()
    found = jax.jit(partial(models.translate_greedily, transformer, extra_length=3))(
        trained_like, SOURCES
    )
    tokens = np.asarray(found.tokens_BKL[:, 0])
    best = np.argmax(transformer.apply(trained_like, SOURCES, tokens, train=False), axis=-1)
    for row in range(4):
        length = len(cut(tokens[row]))
        np.testing.assert_array_equal(tokens[row, :length], best[row, :length])


@pytest.mark.parametrize("num_devices", [pytest.param(2, marks=pytest.mark.long), 4])
def test_translator_inside_shard_map_equals_one_device(trained_like, num_devices):
    module = translator()
    mesh = jax.make_mesh(
        (num_devices,),
        ("data",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:num_devices],
    )
    sharded = jax.shard_map(
        partial(module.apply, trained_like), mesh=mesh, in_specs=P("data"), out_specs=P("data")
    )
    found, expected = jax.jit(sharded)(SOURCES), jax.jit(module.apply)(trained_like, SOURCES)
    np.testing.assert_array_equal(found["outputs"], expected["outputs"])
    np.testing.assert_allclose(found["scores"], expected["scores"], rtol=1e-5)


def test_translator_refuses_to_train():
    with pytest.raises(ValueError, match="only decodes"):
        translator().init(jax.random.key(0), SOURCES, train=True)
