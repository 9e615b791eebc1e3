"""Lists, tuples and dicts: which are inputs and targets, and what is said when a module does not
take them.
"""

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx

import tnt_jax as tnt

keras = pytest.importorskip("keras")

X = np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32)
Y = X.sum(1, keepdims=True)
W = np.linspace(0.5, 1.5, 16, dtype=np.float32)


class Two(nn.Module):
    @nn.compact
    def __call__(self, left, right, train: bool = False):
        return nn.Dense(1)(left) + nn.Dense(1)(right)


class Pair(nn.Module):
    """Takes two inputs as one argument."""

    @nn.compact
    def __call__(self, inputs):
        left, right = inputs
        return nn.Dense(1)(left) + nn.Dense(1)(right)


class Named(nn.Module):
    @nn.compact
    def __call__(self, batch):
        return nn.Dense(1)(batch["image"])


pytestmark = pytest.mark.usefixtures("two_ranks")


def one_keras():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])


def two_keras():
    left, right = keras.Input((3,), name="left"), keras.Input((1,), name="right")
    return keras.Model(
        [left, right], keras.layers.Dense(1)(keras.layers.Concatenate()([left, right]))
    )


ONE = {
    "linen": lambda: nn.Dense(1),
    "linen sequential": lambda: nn.Sequential([nn.Dense(1)]),
    "nnx": lambda: nnx.Linear(3, 1, rngs=nnx.Rngs(0)),
    "keras": one_keras,
}
TWO = {"linen": Two, "one argument": Pair, "keras": two_keras}


def model_of(module, **kwargs):
    model = tnt.Model(module, seed=0)
    model.compile("sgd", "mse", **kwargs)
    return model


def batches(parts):
    return lambda: (parts([X[i : i + 4], Y[i : i + 4]]) for i in range(0, 16, 4))


@pytest.mark.parametrize("kind", ONE)
def test_a_tuple_or_list_of_arrays_is_inputs_and_targets(kind):
    model = model_of(ONE[kind]())
    model.build(X[:1])
    start = model.get_weights()

    def fit(*args, **kwargs):
        model.set_weights(start)
        return model.fit(*args, batch_size=4, shuffle=False, verbose=0, **kwargs).history

    expected = fit(X, Y, validation_data=(X, Y))
    weighted = fit(X, Y, sample_weight=W, validation_data=(X, Y, W))
    assert len({*expected["loss"], *expected["val_loss"], *weighted["loss"]}) == 3
    for parts in (tuple, list):
        assert fit(parts([X, Y]), validation_data=parts([X, Y])) == expected
        assert fit(parts([X, Y, W]), validation_data=parts([X, Y, W])) == weighted
    assert fit((X, Y), validation_split=0.25) == fit(X, Y, validation_split=0.25)
    expected = model.predict(X, verbose=0)
    for parts in (tuple, list):
        assert model.evaluate(parts([X, Y]), verbose=0) == model.evaluate(X, Y, verbose=0)
        np.testing.assert_array_equal(model.predict(parts([X, Y]), verbose=0), expected)
        np.testing.assert_array_equal(model.predict(batches(parts)(), verbose=0), expected)


def test_lists_from_a_generator_are_the_tuples():
    losses = [
        model_of(nn.Dense(1)).fit(batches(parts)(), verbose=0).history for parts in (tuple, list)
    ]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("kind", TWO)
def test_several_inputs_stay_inputs(kind):
    model = model_of(TWO[kind]())
    history = [
        model.fit(inputs, Y, shuffle=False, verbose=0).history["loss"]
        for inputs in ((X, Y), [X, Y])
    ]
    assert np.isfinite(history).all()
    expected = model.predict((X, Y), verbose=0)
    np.testing.assert_array_equal(model.predict([X, Y], verbose=0), expected)
    np.testing.assert_array_equal(model.predict([((X, Y), Y)], verbose=0), expected)
    np.testing.assert_allclose(
        model.evaluate(((X, Y), Y), verbose=0), np.mean((expected - Y) ** 2), rtol=1e-5
    )


def test_predicting_a_pair_with_a_fresh_module_of_one_argument_takes_both():
    assert tnt.Model(Pair()).predict((X, Y), verbose=0).shape == (16, 1)


@pytest.mark.parametrize(
    ("make", "call", "message"),
    [
        (
            Two,
            lambda m: m.fit((X, Y), verbose=0),
            r"Two takes 2 input\(s\) \(left, right\), but the data gives 1: float32\[16, 3\]",
        ),
        (
            Two,
            lambda m: m.fit(X, Y, verbose=0),
            r"Two takes 2 input\(s\) \(left, right\), but the data gives 1",
        ),
        (
            Two,
            lambda m: m.predict(batches(tuple)(), verbose=0),
            r"takes 2 input\(s\).*Let each element be \(\(left, right\), targets\)",
        ),
        (
            Two,
            lambda m: m.fit((X, X, X), Y, verbose=0),
            r"Two takes 2 input\(s\) \(left, right\), but the data gives 3",
        ),
        (
            two_keras,
            lambda m: m.fit(X, Y, verbose=0),
            r"Functional takes 2 input\(s\) \(left, right\), but the data gives 1",
        ),
        (
            one_keras,
            lambda m: m.fit((X, X), Y, verbose=0),
            r"Sequential takes 1 input\(s\).*but the data gives 2",
        ),
        (
            ONE["linen"],
            lambda m: m.fit((X, X), Y, verbose=0),
            r"Dense takes \(inputs\) and cannot use the tuple of 2.*float32\[16, 3\]",
        ),
        (
            ONE["nnx"],
            lambda m: m.fit([X, X], Y, verbose=0),
            r"Linear takes \(inputs, out_sharding\) and cannot use the list of 2",
        ),
        (
            ONE["linen"],
            lambda m: m.fit([{"image": X, "label": Y}], verbose=0),
            r"dict, here with the keys 'image', 'label', counts as inputs alone.*"
            r"dataset.map\(lambda element: \(element\['image'\], element\['label'\]\)\)",
        ),
        (
            Named,
            lambda m: m.fit([{"image": X, "label": Y}], verbose=0),
            r"The data holds no targets",
        ),
        (
            ONE["nnx"],
            lambda m: m.evaluate([{"y": Y, "x": X, "z": X}], verbose=0),
            r"keys 'x', 'y', 'z'.*\(\{'x': element\['x'\], 'z': element\['z'\]\}, element\['y'\]\)",
        ),
        (
            ONE["linen"],
            lambda m: m.predict([{"x": X, "y": Y}], verbose=0),
            r"Dense takes \(inputs\) and cannot use the dict of 2.*\['x'\]",
        ),
        (ONE["linen"], lambda m: m.fit((X, Y, W, W), verbose=0), "holds no targets"),
    ],
)
def test_what_was_expected_and_what_came_is_said(make, call, message):
    with pytest.raises(ValueError, match="(?s)" + message):
        call(model_of(make()))


def test_a_dict_that_the_module_takes_is_its_input():
    model = model_of(Named())
    assert model.predict([{"image": X, "label": Y}], verbose=0).shape == (16, 1)
    assert np.isfinite(model.fit({"image": X}, Y, verbose=0).history["loss"]).all()


def test_an_objective_gets_tuples_and_dicts_as_they_are():
    def objective(params, batch, rngs, apply):
        seen.append(jax.tree.structure(batch.inputs))
        return (
            apply(
                params, batch.inputs["left"] if isinstance(batch.inputs, dict) else batch.inputs[0]
            )
            ** 2
        )[:, 0]

    for x in ({"left": X, "right": Y}, (X, Y)):
        seen = []
        model = tnt.Model(nnx.Linear(3, 1, rngs=nnx.Rngs(0)))
        model.compile("sgd", objective=objective)
        model.fit(x, verbose=0)
        assert set(seen) == {jax.tree.structure(x)}
