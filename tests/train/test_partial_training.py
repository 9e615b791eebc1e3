"""Lower precision, and training a part of the parameters, as options of `Model`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from reference_trainer import Net, make_data
from training import assert_close, crossentropy, fit

import tnt_jax as tnt

# ---- Precision ----


class Dtypes(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        self.variable("seen", "kind", lambda: jnp.zeros((), jnp.int32))
        dense = nn.Dense(3)
        y = dense(x)
        assert x.dtype == y.dtype == self.expected
        return y

    expected: jnp.dtype = jnp.float32


@pytest.mark.parametrize(
    ("precision", "arithmetic", "master"),
    [
        ("float32", jnp.float32, jnp.float32),
        ("mixed_bfloat16", jnp.bfloat16, jnp.float32),
        ("bfloat16", jnp.bfloat16, jnp.bfloat16),
    ],
)
def test_precision_of_arithmetic_and_weights(use_ranks, precision, arithmetic, master):
    use_ranks(2)
    x, y, _ = make_data(8)
    net = Dtypes(expected=jnp.dtype(arithmetic))
    variables = nn.Dense(3).init(jax.random.key(0), x)
    model = tnt.Model(
        net,
        precision=precision,
        variables={"params": {"Dense_0": variables["params"]}, "seen": {"kind": np.int32(0)}},
    )
    model.compile(tnt.optimizers.Adam(0.01), loss=crossentropy())
    model.fit(x, y, batch_size=8, epochs=1, verbose=0)
    assert {leaf.dtype for leaf in jax.tree.leaves(model._trainer.state.params)} == {
        jnp.dtype(master)
    }
    slots = [leaf for leaf in jax.tree.leaves(model._trainer.state.opt_state) if leaf.ndim]
    assert {leaf.dtype for leaf in slots} == {jnp.dtype(master)}
    assert model.predict(x, verbose=0).dtype == np.float32


def test_mixed_precision_learns_as_float32_within_its_precision(use_ranks):
    use_ranks(2)
    net = Net(batch_norm=True, axis_name="data")
    expected, expected_history = fit(net, optax.sgd(0.1), 48, epochs=3)
    model, history = fit(net, optax.sgd(0.1), 48, epochs=3, precision="mixed_bfloat16")
    # bfloat16 has 8 bits of mantissa.
    np.testing.assert_allclose(history["loss"], expected_history["loss"], rtol=2**-6)
    assert_close(model.variables, expected.variables, tolerance=2**-5)
    assert history["loss"] != expected_history["loss"]


def test_unknown_precision_and_keras_policy():
    with pytest.raises(
        ValueError,
        match="precision must be one of 'float32', 'mixed_bfloat16', 'bfloat16', but is 'float16'",
    ):
        tnt.Model(Net(), precision="float16")
    with pytest.raises(ValueError, match=r"keras\.config\.set_dtype_policy\('mixed_bfloat16'\)"):
        tnt.Model(keras.Sequential([keras.layers.Dense(1)]), precision="mixed_bfloat16")


def test_keras_dtype_policy_is_kept(use_ranks):
    use_ranks(2)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, dtype="mixed_bfloat16")])
    x, y, _ = make_data(8)
    wrapped = tnt.Model(model)
    wrapped.compile("sgd", loss=crossentropy())
    wrapped.fit(x, y, batch_size=8, verbose=0)
    assert {leaf.dtype for leaf in jax.tree.leaves(wrapped._trainer.state.params)} == {
        jnp.dtype("float32")
    }
    assert wrapped.predict(x, verbose=0).dtype == jnp.bfloat16


# ---- Frozen parameters ----


@pytest.mark.parametrize(
    ("options", "trained"),
    [
        ({"frozen": ["Dense_0"]}, {"Dense_1/kernel", "Dense_1/bias"}),
        ({"trainable": ["Dense_1"]}, {"Dense_1/kernel", "Dense_1/bias"}),
        ({"trainable": ["*/bias"]}, {"Dense_0/bias", "Dense_1/bias"}),
        ({"trainable": ["Dense_0"], "frozen": ["*/bias"]}, {"Dense_0/kernel"}),
    ],
)
def test_only_chosen_parameters_are_trained(use_ranks, options, trained):
    use_ranks(2)
    x, _, _ = make_data(24)
    start = Net().init(jax.random.key(0), x[:1], train=False)["params"]
    model, _ = fit(Net(), "adam", **options)
    moved = {
        f"{layer}/{name}"
        for layer, arrays in model.variables["params"].items()
        for name, array in arrays.items()
        if np.any(array != start[layer][name])
    }
    assert moved == trained
    assert len(jax.tree.leaves(model._trainer.state.params)) == len(trained)


def test_frozen_training_equals_zeroed_gradients(use_ranks):
    use_ranks(4)
    labels = {"Dense_0": "frozen", "Dense_1": "trained"}
    masked = optax.multi_transform(
        {"trained": optax.sgd(0.1), "frozen": optax.set_to_zero()}, labels
    )
    expected, _ = fit(Net(), masked)
    model, _ = fit(Net(), optax.sgd(0.1), frozen=["Dense_0"])
    assert_close(model.variables, expected.variables)


def test_errors_of_frozen_paths(use_ranks):
    use_ranks(1)
    with pytest.raises(
        ValueError, match=r"names 'Dense_7', but there is no such.*Dense_0/bias, Dense_0/kernel"
    ):
        fit(Net(), "sgd", frozen=["Dense_7"])
    with pytest.raises(ValueError, match="leave no parameter to train"):
        fit(Net(), "sgd", frozen=["*"])
    with pytest.raises(
        TypeError, match=r"frozen must be a sequence of paths, such as \['Dense_0'\]"
    ):
        tnt.Model(Net(), frozen="Dense_0")
