"""Configurations: constructor arguments as plain values, and objects made from them; names are
looked up, never imported.
"""

import copy
import json
import pickle
import sys

import numpy as np
import pytest

from tnt_jax.keras_compat import configuration, losses, optimizers, schedules


def doubled(y_true, y_pred):
    return 2 * losses.mean_squared_error(y_true, y_pred)


class Scaled(losses.Loss):
    """A loss of a user's with an argument of its own, and the base class's behind `**kwargs`."""

    def __init__(self, factor, **kwargs):
        super().__init__(**kwargs)
        self.factor = factor

    def call(self, y_true, y_pred):
        return self.factor * losses.mean_absolute_error(y_true, y_pred)


OBJECTS = [
    (losses.Huber(0.3, reduction="sum", name="mine"), "losses"),
    (losses.CategoricalFocalCrossentropy(np.array([1.0, 2.0])), "losses"),
    (losses.LossFunctionWrapper(losses.mean_squared_error, "sum"), "losses"),
    (losses.LossFunctionWrapper(doubled), "losses"),
    (Scaled(3.0, reduction="sum"), "losses"),
    (schedules.CosineDecay(0.1, 100, warmup_target=0.2), "schedules"),
]
CUSTOM = {"Scaled": Scaled, "doubled": doubled}


@pytest.mark.parametrize(
    ("made", "room"), OBJECTS, ids=[type(made).__name__ for made, _ in OBJECTS]
)
def test_a_configuration_goes_there_and_back_as_json(made, room):
    config = made.get_config()
    written = json.loads(json.dumps(configuration.serialize(made)))
    again = configuration.deserialize(written, room, CUSTOM)
    for copied in (
        again,
        type(made).from_config(config, CUSTOM),
        pickle.loads(pickle.dumps(made)),
        copy.deepcopy(made),
    ):
        assert type(copied) is type(made)
        assert copied.get_config() == config


def test_a_schedule_inside_an_optimizer_goes_there_and_back():
    config = optimizers.Adam(schedules.ExponentialDecay(0.1, 10, 0.5), clipnorm=1.0).get_config()
    again = optimizers.Adam.from_config(json.loads(json.dumps(config)))
    assert again.get_config() == config
    assert type(again.learning_rate) is schedules.ExponentialDecay


def test_a_name_that_changed_is_the_one_in_the_configuration():
    loss = losses.get("mse")
    assert loss.get_config()["name"] == "mse"


def test_what_keras_serialized_is_made_as_ours():
    keras = pytest.importorskip("keras")
    written = keras.losses.serialize(
        keras.losses.BinaryCrossentropy(from_logits=True, label_smoothing=0.1, name="b")
    )
    loss = configuration.deserialize(written, "losses")
    assert type(loss) is losses.BinaryCrossentropy
    assert loss.fn_kwargs == {"from_logits": True, "label_smoothing": 0.1, "axis": -1}
    assert (
        configuration.deserialize(keras.losses.serialize(keras.losses.poisson), "losses")
        is losses.poisson
    )


@pytest.mark.parametrize(
    "config",
    [
        {"module": "os", "class_name": "function", "config": "system"},
        {"module": "antigravity", "class_name": "Thing", "config": {}},
        {"module": "tnt_jax.losses", "class_name": "base", "config": {}},
        {"module": "tnt_jax.losses", "class_name": "__import__", "config": {}},
        {"module": "tnt_jax.losses", "class_name": {"a": 1}, "config": {}},
        {
            "class_name": "LossFunctionWrapper",
            "config": {"fn": {"module": "os", "class_name": "function", "config": "system"}},
        },
    ],
)
def test_names_that_are_not_ours_are_refused_and_not_imported(config):
    with pytest.raises(
        (ValueError, TypeError), match=r"is not in tnt_jax\.losses.*custom_objects="
    ):
        configuration.deserialize(config, "losses")
    assert "antigravity" not in sys.modules


def test_what_has_no_configuration_is_refused_with_the_remedy():
    with pytest.raises(TypeError, match=r"has no get_config\(\), so it cannot be written"):
        configuration.serialize(object())
    with pytest.raises(TypeError, match="a name or a dict with 'class_name'"):
        configuration.deserialize(3, "losses")
