"""The decoder-only Transformer against NumPy in float64, and its published numbers of parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tnt_jax import models
from tnt_jax.models.decoder import rotate

TOKENS = np.array([[3, 4, 5, 7, 1], [6, 8, 1, 0, 2]], np.int32)
SMALL = {
    "vocab_size": 11, "width": 16, "num_layers": 3, "num_heads": 4, "num_key_heads": 2,
    "filter_dim": 12, "max_wavelength": 100.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def params():
    """Parameters with every scale away from its initial value, and larger matrices."""
    fresh = jax.jit(models.Decoder(**SMALL).init)(jax.random.key(0), TOKENS)["params"]
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(np.asarray(x) * 5 + rng.normal(0, 0.2, x.shape), jnp.float32),
        fresh,
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    # The sizes of the published weights: TinyLlama/TinyLlama-1.1B, meta-llama/Llama-2-7b and
    # meta-llama/Meta-Llama-3-8B.
    [("1.1b", 1_100_048_384), ("7b", 6_738_415_616), ("8b", 8_030_261_248)],
)
def test_parameter_counts(name, expected):
    module = models.Decoder(**models.DECODER_SIZES[name])
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), TOKENS))
    assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == expected


def norm(x, scale):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale


def turned(x, position):
    """Pairs as complex numbers, turned by their angles."""
    half = x.shape[-1] // 2
    pairs = x[..., :half] + 1j * x[..., half:]
    pairs = pairs * np.exp(1j * position * 100.0 ** (-np.arange(half) / half))
    return np.concatenate([pairs.real, pairs.imag], -1)


def attend(x, p):
    """One sentence [T, D], head by head and query by query."""
    query, key, value = (
        np.einsum("td,dnh->tnh", x, p[name]["kernel"]) for name in ("query", "key", "value")
    )
    query, key = (np.stack([turned(row, t) for t, row in enumerate(a)]) for a in (query, key))
    out = np.zeros_like(query)
    for t in range(len(x)):
        for head in range(4):
            logits = key[: t + 1, head // 2] @ query[t, head] / np.sqrt(4)
            weights = np.exp(logits - logits.max())
            out[t, head] = weights / weights.sum() @ value[: t + 1, head // 2]
    return np.einsum("tnh,nhd->td", out, p["output"]["kernel"])


def forward(params, tokens):
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    x = p["embedding"]["embedding"][tokens]
    for layer in range(3):
        q = jax.tree.map(lambda stacked, layer=layer: stacked[layer], p["layers"])
        x = x + attend(norm(x, q["attention_norm"]["scale"]), q["attention"])
        y = norm(x, q["feed_forward_norm"]["scale"])
        gate, up = (y @ q["feed_forward"][name]["kernel"] for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ q["feed_forward"]["down"]["kernel"]
    return norm(x, p["norm"]["scale"]) @ p["head"]


def test_logits_equal_numpy(params):
    logits = jax.jit(models.Decoder(**SMALL).apply)({"params": params}, TOKENS)
    expected = np.stack([forward(params, row) for row in TOKENS])
    np.testing.assert_allclose(logits, expected, rtol=2e-4, atol=2e-4)


def test_logits_depend_on_no_later_token(params):
    apply = jax.jit(models.Decoder(**SMALL).apply)
    changed = TOKENS.copy()
    changed[:, 3:] = 9
    before, after = (apply({"params": params}, tokens) for tokens in (TOKENS, changed))
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert np.abs(before[:, 3] - after[:, 3]).max() > 0.1


def test_products_of_turned_vectors_depend_on_their_distance_alone():
    query, key = np.random.default_rng(1).normal(size=(2, 1, 1, 1, 8)).astype(np.float32)

    def product(i, j):
        a, b = (
            rotate(jnp.asarray(x), jnp.array([t]), max_wavelength=1e4)
            for x, t in ((query, i), (key, j))
        )
        return float(jnp.sum(a * b))

    assert product(7, 3) == pytest.approx(product(104, 100), rel=1e-4)
    assert product(7, 3) != pytest.approx(product(3, 7), rel=1e-2)


def test_bfloat16_computes_float32_logits_from_float32_parameters():
    module = models.Decoder(**SMALL, dtype=jnp.bfloat16)
    logits, variables = jax.eval_shape(lambda: module.init_with_output(jax.random.key(0), TOKENS))
    assert logits.dtype == jnp.float32
    assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, r"the width \(16\) must be a multiple of num_heads \(3\)"),
        ({"num_heads": 16}, "even quotient"),
        ({"num_key_heads": 3}, r"num_heads \(4\) must be a multiple of num_key_heads \(3\)"),
    ],
)
def test_heads_that_do_not_divide_are_refused(changes, message):
    module = models.Decoder(**{**SMALL, **changes})
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: module.init(jax.random.key(0), TOKENS))
