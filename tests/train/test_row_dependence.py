"""A traced program tells whether values of a row depend on other rows, in every branch and loop."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from tnt_jax.distributed.sums.random_rows import key_for, row_key
from tnt_jax.train.steps.row_dependence import (
    Exchanged,
    Free,
    Mixed,
    Rows,
    Unknown,
    dependences,
    is_by_row,
    marked,
)

ROWS = 4
X = jnp.ones((ROWS, 6))
WEIGHTS = jnp.ones((6, 6))


def found(function, x=X, **others):
    program = jax.make_jaxpr(function)(x, **others)
    return dependences(program.jaxpr, [True] * len(jax.tree.leaves(x)))


def drawing(function, x):
    """Returns a key from which a function draws by row."""
    return key_for(function, row_key(jax.random.key(0), 0), x, {})


def dropped(key, x):
    return x * jax.random.bernoulli(key, 0.5, x.shape)


def moved(key, x):
    flat = x.reshape(-1, 3).T
    return (flat * jax.random.normal(key, flat.shape)).T.reshape(len(x), -1)


def split(key, x):
    keys = jax.random.split(key, len(x))
    return x + jax.vmap(lambda key: jax.random.normal(key, x.shape[1:]))(keys)


@jax.custom_vjp
def centred(x):
    return x - x.mean(0)


centred.defvjp(lambda x: (centred(x), None), lambda _, g: (g - g.mean(0),))


@jax.custom_jvp
def doubled(x):
    return 2 * x


doubled.defjvp(lambda x, t: (2 * x[0], 2 * t[0]))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x - x.mean(0),
        lambda x: x @ x.T,
        lambda x: jax.nn.softmax(x @ x.T) @ x,
        lambda x: x + x[::-1],
        lambda x: jnp.sum((x[:, None] - x[None]) ** 2, (1, 2)),
        lambda x: jnp.cumsum(x, 0),
        lambda x: jnp.sort(x, 0),
        lambda x: x * (x[:, 0] >= jax.lax.top_k(x[:, 0], 2)[0][-1])[:, None],
        lambda x: x * (jnp.argmax(x[:, 0]) == jnp.arange(ROWS))[:, None],
        lambda x: jax.lax.cond(X[0, 0] > 100, lambda x: x - x.mean(0), lambda x: x, x),
        lambda x: jnp.where(X[0, 0] > 100, x - x.mean(0), x),
        lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x - x.mean(0), x),
        lambda x: jax.lax.scan(lambda c, _: (c - c.mean(0), c), x, None, 3)[0],
        lambda x: jax.lax.while_loop(
            lambda c: c[0, 0] < 2, lambda c: c + c.sum(0), WEIGHTS[:4] * x
        ),
        lambda x: jax.jit(jax.checkpoint(lambda x: x - x.mean(0)))(x),
        lambda x: jax.vmap(lambda column: column - column.mean(), 1, 1)(x),
        centred,
        jax.grad(lambda x: jnp.sum(centred(x) ** 2)),
        lambda x: jax.lax.map(lambda w: x.sum(0) * w, WEIGHTS),
    ],
)
def test_what_combines_rows_is_found(function):
    (result,), _ = found(function)
    assert isinstance(result, Mixed)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.tanh(x @ WEIGHTS + WEIGHTS[0]),
        lambda x: nn.LayerNorm().apply({"params": {"scale": WEIGHTS[0], "bias": WEIGHTS[0]}}, x),
        lambda x: jax.nn.softmax(x),
        lambda x: optax.softmax_cross_entropy_with_integer_labels(x, x[:, 0].astype(int)),
        lambda x: jax.nn.one_hot(x[:, 0].astype(int), 5),
        lambda x: WEIGHTS[x[:, 0].astype(int)],
        lambda x: jnp.take_along_axis(x, x[:, :1].astype(int), 1),
        lambda x: jnp.take(x, jnp.array([1, 0, 2]), axis=1),
        lambda x: x.reshape(ROWS, 2, 3).transpose(1, 0, 2).sum((0, 2)),
        lambda x: (x.reshape(-1, 3) @ WEIGHTS[:3, :2]).reshape(ROWS, -1),
        lambda x: jnp.einsum("bi,bj->bij", x, x),
        lambda x: jnp.concatenate([x, jnp.zeros_like(x)], 1)[:, 2:5],
        lambda x: jnp.pad(x, ((0, 0), (1, 1))),
        lambda x: jax.lax.top_k(x, 2)[0],
        lambda x: jnp.sort(x, 1),
        lambda x: jnp.cumsum(x, 1),
        lambda x: jax.lax.scan(lambda c, step: (c + step, c), jnp.zeros(ROWS), x.T)[1].T,
        lambda x: jax.lax.fori_loop(0, 3, lambda i, x: x * 2, x),
        lambda x: jax.lax.cond(X[0, 0] > 1, lambda x: x * 2, lambda x: jnp.zeros_like(x), x),
        lambda x: jax.vmap(lambda row: row @ row)(x),
        lambda x: jax.nn.relu(doubled(x)),
        lambda x: dropped(drawing(dropped, x), x),
        lambda x: moved(drawing(moved, x), x),
        lambda x: split(drawing(split, x), x),
        lambda x: jnp.zeros(ROWS),
        jax.grad(lambda x: jnp.sum(jnp.tanh(x @ WEIGHTS) ** 2)),
    ],
)
def test_what_treats_rows_alike_is_known(function):
    (result,), _ = found(function)
    assert is_by_row(result), result


IMAGES = jnp.ones((ROWS, 8, 8, 3))


class Vision(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.max_pool(nn.relu(nn.Conv(8, (3, 3))(x)), (2, 2), (2, 2))
        x = nn.avg_pool(nn.GroupNorm(4)(x), (2, 2), (2, 2)).reshape(len(x), -1)
        return nn.Dense(3)(nn.Dropout(0.5, deterministic=False)(x))


class Text(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Embed(10, 8)(x) + self.param("places", nn.initializers.normal(), (7, 8))
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        x = nn.MultiHeadDotProductAttention(2, dropout_rate=0.1, deterministic=False)(x, mask=mask)
        return nn.Bidirectional(nn.RNN(nn.LSTMCell(5)), nn.RNN(nn.GRUCell(5)))(x)


@pytest.mark.parametrize(("module", "x"), [(Vision(), IMAGES), (Text(), jnp.ones((ROWS, 7), int))])
def test_the_rows_of_usual_networks_are_known_to_be_independent(module, x):
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = module.init(rngs, x)

    def apply(key, x):
        return module.apply(variables, x, rngs={"dropout": key})

    (result,), _ = found(lambda x: apply(drawing(apply, x), x), x)
    assert is_by_row(result), result


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * jnp.arange(ROWS)[:, None],
        lambda x: x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape),
        lambda x: x[jnp.arange(ROWS), x[:, 0].astype(int)],
        lambda x: x[:2],
        lambda x: x.reshape(-1, 3) * jax.random.uniform(jax.random.key(0), (2 * ROWS, 3)),
        lambda x: jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x),
        lambda x: jax.lax.while_loop(lambda c: (c < 2).any(), lambda c: c * 2, x),
    ],
)
def test_what_a_trace_does_not_tell_stays_unknown(function):
    (result,), _ = found(function)
    assert result == Unknown()


def test_what_ranks_exchange_is_the_users_own():
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    step = jax.shard_map(
        lambda x: x - jax.lax.pmean(x.mean(0), "data"), mesh=mesh, in_specs=spec, out_specs=spec
    )
    assert found(step)[0] == [Exchanged()]


def test_marked_values_are_found_within_gradients():
    def loss(weights, x):
        return jnp.mean(marked(jnp.sum(jnp.tanh(x @ weights) @ x.T, -1)))

    results, marks = found(lambda x: jax.value_and_grad(loss)(WEIGHTS, x))
    assert any(isinstance(mark, Mixed) for mark in marks)
    assert all(isinstance(result, Mixed) for result in results)


def test_values_of_no_batch_are_free():
    (result,), _ = found(lambda x: WEIGHTS @ WEIGHTS)
    assert result == Free(frozenset([0, 1]))
    assert found(lambda x: x[:, :1])[0] == [Rows(0)]
