"""Loss scaling decides on all ranks as Keras's LossScaleOptimizer does on one, and goes on where it
stopped.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import tnt_jax as tnt
from tnt_jax.keras_compat import optimizers
from tnt_jax.train.finite import loss_scale

keras = pytest.importorskip("keras")
TOO_LARGE = (4, 5, 11)  # Steps whose gradients are not finite.


def gradients():
    rng = np.random.default_rng(0)
    grads = [{"bias": rng.normal(size=2), "kernel": rng.normal(size=(3, 2))} for _ in range(16)]
    for step in TOO_LARGE:
        grads[step]["kernel"][1, 1] = np.nan if step == 5 else np.inf
    return [jax.tree.map(lambda a: a.astype("float32"), grad) for grad in grads]


@pytest.mark.parametrize(
    "inner",
    [
        lambda room: room.SGD(0.1, momentum=0.9),
        lambda room: room.Adam(0.01, global_clipnorm=0.5),
        lambda room: room.SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    ],
)
@pytest.mark.parametrize("kind", ["ours", "keras"])
def test_scales_and_weights_are_those_of_keras(inner, kind):
    params = {"bias": np.ones(2, "float32"), "kernel": np.ones((3, 2), "float32")}
    theirs = keras.optimizers.LossScaleOptimizer(
        inner(keras.optimizers), initial_scale=64.0, dynamic_growth_steps=3
    )
    variables = [keras.Variable(params[name], name=name) for name in sorted(params)]
    theirs.build(variables)
    weights, held = [v.value for v in variables], [v.value for v in theirs.variables]
    if kind == "ours":
        ours = optimizers.LossScaleOptimizer(
            inner(optimizers), initial_scale=64.0, dynamic_growth_steps=3
        )
    else:
        given = keras.optimizers.LossScaleOptimizer(
            inner(keras.optimizers), initial_scale=64.0, dynamic_growth_steps=3
        )
        ours = optimizers.get(given)
    transformation = ours.transformation()
    state = transformation.init(params)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def step(params, state, grads):
        # Only the second rank sees what is not finite.
        grads = jax.tree.map(lambda g: jax.lax.psum(g[0], "data"), grads)
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    mapped = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P()))
    seen = []
    for grad in gradients():
        weights, held = theirs.stateless_apply(
            held, [jnp.asarray(grad[name]) for name in sorted(grad)], weights
        )
        shares = jax.tree.map(
            lambda g: np.stack([np.zeros_like(g), g, np.zeros_like(g), np.zeros_like(g)]), grad
        )
        params, state = mapped(params, state, shares)
        seen.append(float(loss_scale(state)))
        assert seen[-1] == float(held[[v.name for v in theirs.variables].index("dynamic_scale")])
        for name, weight in zip(sorted(params), weights, strict=True):
            np.testing.assert_allclose(params[name], weight, rtol=1e-5, atol=1e-6)
    assert len(set(seen)) > 2
    assert float(optimizers.read_learning_rate(state)) == pytest.approx(float(theirs.learning_rate))


class Explosive(nn.Module):
    """Its loss overflows float32 where the scale is large enough, and trains where it is not."""

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, kernel_init=nn.initializers.ones)(x)


def fit(num_ranks, optimizer, steps=6, **options):
    tnt.shutdown()
    tnt.init(devices=range(num_ranks))
    rng = np.random.default_rng(0)
    x = 4 * rng.normal(size=(24, 3)).astype("float32")
    model = tnt.Model(Explosive(), **options)
    model.compile(optimizer, loss="mse")
    model.fit(x, x.sum(1, keepdims=True) / 3, batch_size=24, epochs=steps, shuffle=False, verbose=0)
    return model


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (1, {}),
        (4, {}),
        (2, {"shard_optimizer_state": True}),
        (2, {"reproducible": True, "virtual_ranks": 2}),
    ],
)
def test_a_scale_that_is_too_large_is_halved_until_training_goes_on(use_ranks, num_ranks, options):
    scaled = fit(
        num_ranks,
        optimizers.LossScaleOptimizer(optimizers.SGD(0.01), initial_scale=2.0**127),
        steps=8,
        **options,
    )
    scale = float(loss_scale(scaled.state.opt_state))
    assert np.log2(scale) == int(np.log2(scale))
    skipped = 127 - int(np.log2(scale))
    assert 1 <= skipped <= 6
    again = fit(1, optimizers.SGD(0.01), steps=8 - skipped)
    for a, b in zip(scaled.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    assert not np.allclose(scaled.get_weights()[1], np.ones((3, 1)))


def test_a_fixed_factor_changes_nothing_in_float32(use_ranks):
    plain = fit(2, keras.optimizers.SGD(0.01, momentum=0.9))
    scaled = fit(2, keras.optimizers.SGD(0.01, momentum=0.9, loss_scale_factor=1024.0))
    assert float(loss_scale(scaled.state.opt_state)) == 1024
    for a, b in zip(scaled.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_scale_is_saved_and_loaded(use_ranks, tmp_path):
    def optimizer():
        return optimizers.LossScaleOptimizer(
            optimizers.SGD(0.01, momentum=0.9), dynamic_growth_steps=4
        )

    whole, first = fit(2, optimizer()), fit(2, optimizer(), steps=4)
    first.save(tmp_path / "half")
    second = tnt.models.load_model(tmp_path / "half", custom_objects={"Explosive": Explosive})
    rng = np.random.default_rng(0)
    x = 4 * rng.normal(size=(24, 3)).astype("float32")
    second.fit(
        x,
        x.sum(1, keepdims=True) / 3,
        batch_size=24,
        epochs=6,
        initial_epoch=4,
        shuffle=False,
        verbose=0,
    )
    assert (
        float(loss_scale(second.state.opt_state))
        == float(loss_scale(whole.state.opt_state))
        == 2.0**16
    )
    for a, b in zip(jax.tree.leaves(second.state), jax.tree.leaves(whole.state), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_errors(use_ranks):
    with pytest.raises(
        ValueError, match="gradient_compression cannot be combined with a scaled loss"
    ):
        fit(2, optimizers.LossScaleOptimizer(optimizers.SGD()), gradient_compression="bfloat16")
    for options, message in [
        ({"clipnorm": 1.0}, "does not take clipnorm: pass it to inner_optimizer"),
        ({"dynamic": False}, "pass loss_scale_factor to the inner optimizer"),
        ({"speed": 1}, "no option speed"),
    ]:
        with pytest.raises(ValueError, match=message):
            optimizers.LossScaleOptimizer(optimizers.SGD(), **options)
    with pytest.raises(TypeError, match="must be an optimizer, such as"):
        optimizers.LossScaleOptimizer("sgd")
    optimizers.LossScaleOptimizer(optimizers.SGD(), use_ema=False, ema_momentum=0.99, clipnorm=None)
