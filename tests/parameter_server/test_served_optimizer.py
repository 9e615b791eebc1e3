import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tnt_jax.parameter_server.partition import FixedShardsPartitioner, plan_shards
from tnt_jax.parameter_server.server import make_totals, serve_optimizer

SHAPES = {"a": (7, 3), "b": {"c": (5,), "s": ()}, "d": (4, 4)}
DECAYED = optax.adamw(
    1e-2, weight_decay=0.3, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)
)
CLIPPED = optax.chain(
    optax.add_decayed_weights(0.1), optax.clip_by_global_norm(1.0), optax.adam(1e-2)
)


def drawn(rng, scale=1.0):
    return jax.tree.map(
        lambda shape: jnp.float32(scale * rng.normal(size=shape)),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def served_for(transformation, params, num_servers, partitioner):
    leaves = jax.tree.leaves(params)
    plan = plan_shards(
        [x.shape for x in leaves],
        [x.dtype for x in leaves],
        num_servers=num_servers,
        partitioner=partitioner,
    )
    return serve_optimizer(transformation, params, plan, name="Example")


def on_servers(served, tree):
    leaves, structure = jax.tree.flatten(jax.tree.map(np.asarray, tree))
    return [
        structure.unflatten([served.plan.part(s, i, x) for i, x in enumerate(leaves)])
        for s in range(served.plan.num_servers)
    ]


def state_on_servers(served, state, params):
    host = jax.tree.map(np.asarray, state)
    result = []
    for server, part in enumerate(params):
        fresh, structure = jax.tree.flatten(served.transformation.init(part))
        given = served.state_on(server, host)
        result.append(
            structure.unflatten([f if g is None else g for f, g in zip(fresh, given, strict=True)])
        )
    return result


def updated(served, params, state, grads):
    num = len(params)
    if not served.points:
        step = jax.jit(served.update)
        return zip(*(step(params[s], state[s], grads[s]) for s in range(num)), strict=True)
    step = jax.jit(served.exchanging_update)
    totals = make_totals(
        served,
        lambda known: [
            [np.asarray(x) for x in step(params[s], state[s], grads[s], known)[2]]
            for s in range(num)
        ],
    )
    return zip(*(step(params[s], state[s], grads[s], totals)[:2] for s in range(num)), strict=True)


@pytest.mark.parametrize("partitioner", [None, FixedShardsPartitioner(2)], ids=["whole", "divided"])
@pytest.mark.parametrize(
    ("transformation", "num_rounds"),
    [
        (optax.sgd(0.1, momentum=0.9), 0),
        (DECAYED, 0),
        (optax.inject_hyperparams(optax.adam)(optax.cosine_decay_schedule(0.1, 10)), 0),
        pytest.param(CLIPPED, 1, marks=pytest.mark.long),
        (optax.chain(optax.clip_by_global_norm(1.0), CLIPPED), 2),
    ],
    ids=["momentum", "adamw with a mask", "schedule", "decay and norm", "two norms"],
)
def test_servers_update_like_one_process(transformation, num_rounds, partitioner):
    rng = np.random.default_rng(0)
    params = drawn(rng)
    state = transformation.init(params)
    served = served_for(transformation, params, 3, partitioner)
    assert served.num_rounds == num_rounds
    parts = on_servers(served, params)
    states = state_on_servers(served, state, parts)
    for _ in range(3):
        grads = drawn(rng, 3.0)
        updates, state = transformation.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        parts, states = updated(served, parts, states, on_servers(served, grads))
    of_servers = [[np.asarray(x) for x in jax.tree.leaves(part)] for part in parts]
    for index, leaf in enumerate(jax.tree.leaves(params)):
        whole = served.plan.whole(index, [part[index] for part in of_servers])
        np.testing.assert_allclose(whole, leaf, rtol=2e-6, atol=1e-6)
    whole_state = served.whole_state([jax.tree.leaves(each) for each in states])
    for whole, leaf in zip(whole_state, jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(whole, leaf, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("transformation", [optax.lamb(1e-2), optax.lars(0.1)])
def test_norms_of_single_variables_need_no_exchange_if_variables_are_whole(transformation):
    params = drawn(np.random.default_rng(0))
    assert served_for(transformation, params, 2, None).num_rounds == 0


@pytest.mark.parametrize(
    ("transformation", "partitioner", "message"),
    [
        (optax.apply_if_finite(optax.sgd(0.1), 3), None, r"mixes values of several .*\(cond\)"),
        (optax.MultiSteps(optax.sgd(0.1), 2), None, "mixes values of several variables"),
        (
            optax.chain(optax.centralize(), optax.sgd(0.1)),
            FixedShardsPartitioner(2),
            r"needs the whole of \['a'\] at once",
        ),
        (optax.add_noise(0.1, 0.5, key=0), None, "typed random key"),
    ],
)
def test_what_servers_cannot_exchange_is_refused_by_name(transformation, partitioner, message):
    params = drawn(np.random.default_rng(0))
    with pytest.raises(ValueError, match=f"The optimizer Example .*{message}"):
        served_for(transformation, params, 2, partitioner)


def test_one_server_takes_any_transformation():
    params = drawn(np.random.default_rng(0))
    assert not served_for(optax.apply_if_finite(optax.sgd(0.1), 3), params, 1, None).points
