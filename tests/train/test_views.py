"""Views: other models over the variables of a trained one."""

import flax.linen as nn
import keras
import pytest
from reference_trainer import Net, make_data
from training import assert_close, crossentropy

import tnt_jax as tnt


class Doubled(nn.Module):
    """Computes with the variables of `Net` in another way, and for inference only."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16)(x))
        return 2 * nn.Dense(3)(x)


def test_view_follows_the_variables_of_its_model(use_ranks):
    use_ranks(2)
    model = tnt.Model(Net())
    view = model.view(Doubled())
    x, y, _ = make_data(24)
    with pytest.raises(RuntimeError, match="made from has no variables yet"):
        view.predict(x, verbose=0)
    model.compile("sgd", loss=crossentropy())
    for _ in range(2):
        model.fit(x, y, batch_size=8, verbose=0)
        assert_close(view.predict(x, verbose=0), 2 * model.predict(x, verbose=0))
    view.compile(loss=crossentropy())
    assert view.evaluate(x, y, verbose=0) != model.evaluate(x, y, verbose=0)
    with pytest.raises(RuntimeError, match="A view cannot be trained"):
        view.fit(x, y)
    model.fit(x, y, batch_size=8, verbose=0)


def test_view_of_a_keras_model_over_shared_layers(use_ranks):
    use_ranks(2)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(4)(inputs)
    model = tnt.Model(keras.Model(inputs, keras.layers.Dense(3)(hidden)))
    features = model.view(keras.Model(inputs, hidden))
    x, y, _ = make_data(24)
    model.compile("sgd", loss=crossentropy())
    model.fit(x, y, batch_size=8, verbose=0)
    kernel, bias = model.variables[:2]
    assert_close(features.predict(x, verbose=0), x @ kernel + bias)
    with pytest.raises(
        ValueError,
        match=r"which the variables given to it lack. A view needs a model made of the same layers",
    ):
        model.view(keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])).predict(
            x, verbose=0
        )
