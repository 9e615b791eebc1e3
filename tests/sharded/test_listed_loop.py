"""A function whose blocks form a list gives the same as a loop over stacked blocks."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tnt_jax import _jax
from tnt_jax.sharded.blocks.block_list import BlockList, Staged
from tnt_jax.sharded.pipeline.layers_loop import with_loop

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(3, 4)), jnp.float32)
NUM_BLOCKS = 3


def fresh():
    def array(*shape):
        return jnp.asarray(RNG.normal(size=shape), jnp.float32)

    blocks = {f"layers_{i}": {"w": array(4, 4), "b": array(4)} for i in range(NUM_BLOCKS)}
    return {"embed": {"w": array(4, 4)}, "head": {"w": array(4, 2)}, **blocks}


PARAMS = fresh()


def staged(params):
    blocks = BlockList.of(params, "layers")
    leaves = jax.tree.leaves(params)
    return Staged.of(
        params, blocks, [jnp.stack([leaves[i] for i in indices]) for indices in blocks.indices]
    )


def dense(block, x):
    return x @ block["w"] + block["b"]


def network(params, x, *, block=dense, between=None, after=lambda x: x):
    """Blocks with what a function adds between them; another function may see all results."""
    x = jnp.sin(x @ params["embed"]["w"])
    results = []
    for i in range(NUM_BLOCKS):
        x = block(params[f"layers_{i}"], x)
        results.append(x)
        if between is not None and i < NUM_BLOCKS - 1:
            x = between(results)
    return after(results if between is None else [*results[:-1], x]) @ params["head"]["w"]


def last(results):
    return results[-1]


def residual(block, x):
    """Normalizes first, so that a block begins before its parameters are used."""
    y = (x - jnp.mean(x, axis=-1, keepdims=True)) / (1 + jnp.std(x, axis=-1, keepdims=True))
    return x + jax.nn.gelu(jax.nn.relu(y) @ block["w"] + block["b"])


@pytest.mark.parametrize("block", [dense, residual, lambda p, x: jax.checkpoint(residual)(p, x)])
def test_a_loop_gives_what_the_list_gives(block):
    function = partial(network, block=block, after=last)
    looped = with_loop(function)
    expected = jax.value_and_grad(lambda params: jnp.sum(function(params, X) ** 2))(PARAMS)
    loss, grads = jax.value_and_grad(lambda p: jnp.sum(looped(p, X) ** 2))(staged(PARAMS))
    program = jax.make_jaxpr(looped)(staged(PARAMS), X)
    assert [e.primitive.name for e in program.eqns].count("scan") == 1
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    unstacked = grads.structure.unflatten(grads.leaves(list))
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), unstacked, expected[1])


# As nn.remat does, whose modules fold their numbers into keys inside.
@pytest.mark.parametrize("wrap", [lambda function: function, jax.checkpoint])
def test_numbers_that_differ_between_blocks_stay_their_own(wrap):
    def scaled(params, x):
        key = jax.random.key(0)
        x = jnp.sin(x @ params["embed"]["w"])
        for i in range(NUM_BLOCKS):

            def block(own, x, key, i=i):
                noise = jax.random.normal(jax.random.fold_in(key, i), x.shape)
                return x + noise * dense(own, x / (i + 1))

            x = wrap(block)(params[f"layers_{i}"], x, _jax.make_varying(key))
        return x @ params["head"]["w"]

    mesh = _jax.make_data_mesh(jax.devices()[:2])
    rows = jnp.concatenate([X, X, X, X])

    def run(function, params):
        def of_rank(params, x):
            return function(_jax.make_varying(params), x)

        by_row = PartitionSpec("data")
        mapped = _jax.shard_map(
            of_rank, mesh=mesh, in_specs=(PartitionSpec(), by_row), out_specs=by_row
        )
        return jax.jit(mapped)(params, rows)

    np.testing.assert_allclose(
        run(with_loop(scaled), staged(PARAMS)), run(scaled, PARAMS), rtol=1e-5, atol=1e-5
    )


def backward_order(params, x):
    for i in reversed(range(NUM_BLOCKS)):
        x = dense(params[f"layers_{i}"], x)
    return x


def without_one(params, x):
    for i in (0, 2):
        x = dense(params[f"layers_{i}"], x)
    return x


def one_differs(params, x):
    for i in range(NUM_BLOCKS):
        activation = jax.nn.tanh if i == 2 else jax.nn.sigmoid
        x = activation(dense(params[f"layers_{i}"], x))
    return x


def one_normalizes(params, x):
    for i in range(NUM_BLOCKS):
        y = x @ params[f"layers_{i}"]["w"]
        x = (y - 1.0 if i == 1 else y * 2.0) + params[f"layers_{i}"]["b"]
    return x


def skipping(params, x):
    results = [dense(params["layers_0"], x)]
    results.append(dense(params["layers_1"], results[0]))
    return dense(params["layers_2"], results[1]) + results[0]


def of_two_before(params, x):
    before = x
    for i in range(NUM_BLOCKS):
        block = params[f"layers_{i}"]
        before, x = x, x @ block["w"] + before + block["b"]
    return x


def summing(params, x):
    """Adds what each block computes from its result, as a loss that a module sows."""
    total = 0.0
    for i in range(NUM_BLOCKS):
        x = x + dense(params[f"layers_{i}"], x)
        total += jnp.mean(x**2)
    return x * total


def printing(params, x):
    for i in range(NUM_BLOCKS):
        x = dense(params[f"layers_{i}"], x)
        jax.debug.print("{}", x)
    return x


def regularized(params, x):
    return network(params, x, after=last) * jnp.sum(params["layers_1"]["w"] ** 2)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (one_differs, r"layers_2 is followed by tanh float32\[3, 4\] where layers_0 .*logistic"),
        (backward_order, "layers_1 is not used after layers_0"),
        (jax.jit(partial(network, after=last)), r"one operation \(jit\) computes layers_0 and lay"),
        (without_one, "layers_1 is not used"),
        (regularized, r"parameters of layers_1 are used outside of it, too \(.*weight_decay"),
        (skipping, r"a result of layers_0 \(float32\[3, 4\]\) is used after the blocks"),
        (summing, r"a result of layers_\d \(float32.*\) is used after the blocks, as stat"),
        (printing, r"a result of layers_0 \(float32.*\) is used .*added losses and prints are"),
        (of_two_before, r"a result of layers_0 \(float32\[3, 4\]\) is used by layers_2, too"),
        (
            partial(network, between=lambda results: sum(results), after=last),
            "layers_2 is followed by dot_general .* where layers_0 is followed by add",
        ),
        (one_normalizes, "layers_1 computes sub .* where layers_0 computes mul"),
        (
            partial(network, after=lambda results: results[-1] + results[1]),
            r"a result of layers_1 \(float32\[3, 4\]\) is used after the blocks",
        ),
        (
            partial(network, between=lambda results: jnp.exp(results[-1]), after=last),
            "layers_2 is followed by dot_general .* where layers_0 is followed by exp",
        ),
    ],
)
def test_blocks_that_are_no_loop_are_refused(function, message):
    with pytest.raises(ValueError, match=f"layers_0, ..., layers_2 needs equal blocks.*{message}"):
        with_loop(function)(staged(PARAMS), X)


def test_an_array_of_one_block_that_differs_is_refused():
    params = {**PARAMS, "layers_1": {"w": jnp.zeros((4, 5)), "b": jnp.zeros(4)}}
    message = r"layers_1/w is float32\[4, 5\], and layers_0/w is float32\[4, 4\]"
    with pytest.raises(ValueError, match=message):
        staged(params)
