"""Every public optimizer, schedule and callback of Keras: the same names and arguments, and
configurations there and back.

The classes come from Keras, so that a new one fails here until it is made or left out with a
reason.
"""

import inspect
import json
import pickle
import typing

import keras
import numpy as np
import pytest

import tnt_jax as tnt
from tnt_jax.keras_compat import keras_objects

OURS = {"optimizers": tnt.optimizers, "schedules": tnt.schedules, "callbacks": tnt.callbacks}
KERAS = {
    "optimizers": keras.optimizers,
    "schedules": keras.optimizers.schedules,
    "callbacks": keras.callbacks,
}
# Classes that we leave out, and why.
LEFT_OUT = {
    "optimizers.MultiOptimizer": "optax.partition gives each part of the parameters a rule of "
    "its own",
    "optimizers.OptimizerMap": "belongs to MultiOptimizer",
}
# Arguments without a default.
NEEDED = {
    "optimizers.Optimizer": {"learning_rate": 0.1},
    "schedules.CosineDecay": {"initial_learning_rate": 0.1, "decay_steps": 10},
    "schedules.CosineDecayRestarts": {"initial_learning_rate": 0.1, "first_decay_steps": 10},
    "schedules.ExponentialDecay": {
        "initial_learning_rate": 0.1,
        "decay_steps": 10,
        "decay_rate": 0.5,
    },
    "schedules.InverseTimeDecay": {
        "initial_learning_rate": 0.1,
        "decay_steps": 10,
        "decay_rate": 0.5,
    },
    "schedules.PiecewiseConstantDecay": {"boundaries": [2, 5], "values": [0.3, 0.2, 0.1]},
    "schedules.PolynomialDecay": {"initial_learning_rate": 0.1, "decay_steps": 10},
}
# Settings that are no defaults, for configurations.
SETTINGS = {
    "clipnorm": 0.5, "use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3,
    "gradient_accumulation_steps": 4,
    "loss_scale_factor": 8.0, "weight_decay": 0.25, "name": "mine", "epsilon": 1e-3, "beta_1": 0.8,
    "momentum": 0.3,
    "exclude_layers": ["head"], "staircase": True, "alpha": 0.5, "amsgrad": True, "centered": True,
    "relative_step": False,
}  # fmt: skip


def classes(*kinds):
    found = [
        (kind, name)
        for kind in kinds
        for name, value in vars(KERAS[kind]).items()
        if inspect.isclass(value)
    ]
    return [
        pytest.param(*pair, id=".".join(pair)) for pair in found if ".".join(pair) not in LEFT_OUT
    ]


def keras_parameters(kind, name):
    every = list(inspect.signature(getattr(KERAS[kind], name).__init__).parameters.values())[1:]
    return [
        parameter
        for parameter in every
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]


def our_parameters(kind, name):
    """Returns the arguments of our class by name, those of `**options: Unpack[...]` among them, and
    the positional ones in order.
    """
    init = getattr(OURS[kind], name).__init__
    parameters = list(inspect.signature(init).parameters.values())[1:]
    named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    for parameter in parameters:
        if typing.get_origin(parameter.annotation) is typing.Unpack:
            hint = typing.get_type_hints(init, include_extras=True)[parameter.name]
            named |= set(typing.get_type_hints(typing.get_args(hint)[0]))
    return named, [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


@pytest.mark.parametrize(("kind", "name"), classes("optimizers", "schedules", "callbacks"))
def test_every_argument_of_keras_is_known_at_its_place_with_its_default(kind, name):
    theirs = keras_parameters(kind, name)
    named, positional = our_parameters(kind, name)
    assert {parameter.name for parameter in theirs} <= named
    for mine, parameter in zip(positional, theirs, strict=False):
        assert mine.name == parameter.name
        assert mine.default == parameter.default, parameter.name


def test_every_name_that_is_left_out_is_one_of_keras():
    for path in LEFT_OUT:
        kind, name = path.split(".")
        assert hasattr(KERAS[kind], name), path
        assert kind == "callbacks" or not hasattr(OURS[kind], name), (
            f"{path} is there: take it off the list."
        )


def plain(config):
    """Returns a configuration with float32 numbers as Python's, and lists for tuples."""
    rounded = json.loads(json.dumps(config), parse_float=lambda text: float(np.float32(text)))
    # Where a class of Keras or ours is written differs on purpose.
    return {key: value for key, value in rounded.items() if not isinstance(value, dict)}


@pytest.mark.parametrize("settings", [{}, SETTINGS], ids=["defaults", "settings"])
@pytest.mark.parametrize(("kind", "name"), classes("optimizers", "schedules"))
def test_configurations_are_those_of_keras_and_make_an_equal_object(kind, name, settings):
    if name in ("LearningRateSchedule", "LossScaleOptimizer", "Optimizer"):
        pytest.skip("an abstract class, or one with a test of its own")
    known = {parameter.name for parameter in keras_parameters(kind, name)}
    arguments = NEEDED.get(f"{kind}.{name}", {}) | {
        key: value for key, value in settings.items() if key in known
    }
    if kind == "optimizers" and settings:
        arguments["learning_rate"] = 0.03125
    cls, theirs = getattr(OURS[kind], name), getattr(KERAS[kind], name)(**arguments)
    made = cls(**arguments)
    config = made.get_config()
    expected = theirs.get_config() | (
        {} if "name" in arguments or kind == "schedules" else {"name": config["name"]}
    )
    # Excluded layers may be None or empty.
    assert {k: v or None for k, v in plain(config).items()} == {
        k: v or None for k, v in plain(expected).items()
    }
    assert all(getattr(made, key) == value for key, value in arguments.items())
    module = OURS[kind]
    for other in (
        cls.from_config(json.loads(json.dumps(config))),
        pickle.loads(pickle.dumps(made)),
        module.deserialize(json.loads(json.dumps(module.serialize(made)))),
        module.deserialize(json.loads(json.dumps(KERAS[kind].serialize(theirs)))),
    ):
        assert type(other) is cls
        assert plain(other.get_config()) == plain(config | {"name": other.name})


@pytest.mark.parametrize(
    "make",
    [
        lambda: tnt.schedules.CosineDecay(0.1, 20),
        lambda: keras.optimizers.schedules.CosineDecay(0.1, 20),
    ],
)
def test_a_schedule_stays_in_the_configuration_of_its_optimizer(make):
    optimizer = tnt.optimizers.SGD(make(), momentum=0.5)
    other = tnt.optimizers.SGD.from_config(json.loads(json.dumps(optimizer.get_config())))
    assert type(other.learning_rate) is tnt.schedules.CosineDecay
    assert float(other.rate_at(10)) == pytest.approx(0.05)


def test_the_configuration_of_a_loss_scale_holds_its_inner_optimizer():
    theirs = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(0.25, momentum=0.5), initial_scale=8.0, name="scaled"
    )
    made = tnt.optimizers.get(keras.optimizers.serialize(theirs))
    again = tnt.optimizers.LossScaleOptimizer.from_config(json.loads(json.dumps(made.get_config())))
    for optimizer in (made, again, pickle.loads(pickle.dumps(made))):
        assert (optimizer.name, optimizer.initial_scale, type(optimizer.inner_optimizer)) == (
            "scaled",
            8.0,
            tnt.optimizers.SGD,
        )
        assert (optimizer.learning_rate, optimizer.inner_optimizer.momentum) == (0.25, 0.5)


def test_get_takes_every_form_of_keras():
    assert tnt.optimizers.get(None) is None
    assert (
        type(tnt.optimizers.get({"class_name": "ADAMW", "config": {"weight_decay": 0.5}}))
        is tnt.optimizers.AdamW
    )
    with pytest.raises(ValueError, match=r"'Unheard' is not in tnt_jax.optimizers"):
        tnt.optimizers.deserialize({"class_name": "Unheard", "config": {}})
    with pytest.raises(TypeError, match="An Optax transformation has no configuration"):
        tnt.optimizers.serialize(tnt.optimizers.get(__import__("optax").sgd(0.1)))


def test_a_schedule_of_ones_own_is_written_by_its_arguments():
    class Halving(tnt.schedules.LearningRateSchedule):
        def __init__(self, start, *, every=10):
            self.start, self.every = start, every

        def __call__(self, step):
            return self.start * 0.5 ** (step // self.every)

    written = json.loads(
        json.dumps(tnt.optimizers.serialize(tnt.optimizers.SGD(Halving(0.4, every=5))))
    )
    other = tnt.optimizers.deserialize(written, custom_objects={"Halving": Halving})
    assert float(other.rate_at(10)) == pytest.approx(0.1)
    with pytest.raises(NotImplementedError, match="LearningRateSchedule must implement __call__"):
        tnt.schedules.LearningRateSchedule()(0)


def test_names_of_keras_are_never_abstract():
    assert keras_objects.find_class("optimizer", "optimizers") is None
