"""Rematerialized blocks: the numbers stay, and what is kept is what the name says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from tnt_jax import models
from tnt_jax.sharded.blocks.remat import check_remat, rematerialized

TOKENS = np.arange(24).reshape(2, 12) % 11
DECODER = models.Decoder(**{**models.DECODER_SIZES["tiny"], "vocab_size": 11})
TRANSFORMER = models.Transformer(**models.PARAM_SETS["tiny"], vocab_size=11, num_layers=2)


class Blocks(nnx.Module):
    """Eleven blocks: their names do not sort in the order of their use."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(11)])
        self.head = nnx.Linear(8, 11, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + nnx.silu(block(x))
        return self.head(x)


def decoder(params):
    return DECODER.apply({"params": params}, TOKENS)


def transformer(params):
    # As where all are cast before the first is used, in the order of their names.
    copied = jax.tree.map(jnp.copy, params)
    rngs = {"dropout": jax.random.key(3)}
    return TRANSFORMER.apply({"params": copied}, TOKENS, TOKENS, train=True, rngs=rngs)


def blocks(params):
    graph, _ = nnx.split(Blocks())
    return nnx.merge(graph, nnx.State(params))(TOKENS)


def params_of(function):
    if function is blocks:
        return nnx.to_pure_dict(nnx.split(Blocks())[1])
    module, args = {decoder: (DECODER, (TOKENS,)), transformer: (TRANSFORMER, (TOKENS, TOKENS))}[
        function
    ]
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    options = {} if function is decoder else {"train": False}
    return jax.jit(lambda: module.init(rngs, *args, **options))()["params"]


def loss_of(function, remat):
    def loss(params):
        result = rematerialized(
            lambda p: {"logits": function(p), "count": 2.0}, params, remat=remat
        )
        assert result["count"] == 2.0
        return jnp.mean(result["logits"] ** 2)

    return loss


@pytest.mark.parametrize(
    ("function", "num_blocks", "remat"),
    [
        pytest.param(decoder, 1, "dots", marks=pytest.mark.long),
        pytest.param(transformer, 4, "full", marks=pytest.mark.long),
        (blocks, 11, "full"),
    ],
)
def test_gradients_are_those_without_remat(function, num_blocks, remat):
    params = params_of(function)
    expected = jax.jit(jax.value_and_grad(loss_of(function, "none")))(params)
    step = jax.jit(jax.value_and_grad(loss_of(function, remat)))
    program = str(jax.make_jaxpr(loss_of(function, remat))(params))
    assert program.count(" = remat2[") + program.count(" = checkpoint[") == num_blocks
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
        step(params),
        expected,
    )


def kept_bytes(function, remat):
    """Returns the bytes that the backward pass gets from the forward pass."""
    params = params_of(function)
    _, pull = jax.eval_shape(lambda p: jax.vjp(loss_of(function, remat), p), params)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pull))


@pytest.mark.parametrize("function", [decoder, blocks])
def test_full_keeps_less_than_dots_and_dots_less_than_none(function):
    none, dots, full = (kept_bytes(function, name) for name in ("none", "dots", "full"))
    assert full < dots < none


def test_a_pattern_chooses_blocks():
    remat = {"encoder_*": "full", "decoder_1": "dots"}
    program = str(jax.make_jaxpr(loss_of(transformer, remat))(params_of(transformer)))
    assert program.count(" = remat2[") + program.count(" = checkpoint[") == 2 + 1


def test_a_pattern_without_a_block_is_refused():
    with pytest.raises(ValueError, match=r"'layer_\*' of remat fits no block. Blocks are layers\."):
        rematerialized(decoder, params_of(decoder), remat={"layer_*": "full"})


def test_a_model_without_blocks_is_refused():
    module = nn.Dense(3)
    params = module.init(jax.random.key(0), jnp.ones((2, 4)))["params"]
    with pytest.raises(ValueError, match="needs a model that repeats blocks"):
        rematerialized(
            lambda p: module.apply({"params": p}, jnp.ones((2, 4))), params, remat="full"
        )


@pytest.mark.parametrize("remat", ["half", None, {"layers": True}])
def test_unknown_names_are_refused(remat):
    with pytest.raises(ValueError, match="must be 'none', 'dots' or 'full'"):
        check_remat(remat)
