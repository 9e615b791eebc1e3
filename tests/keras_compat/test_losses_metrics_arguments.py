"""Every public class and function of keras.losses and keras.metrics beside ours: arguments, attributes
and configurations.
"""

import copy
import inspect
import json
import pickle

import keras
import pytest
from keras_counterparts import (
    CLASSES,
    CONCRETE,
    FUNCTIONS,
    OURS,
    THEIRS,
    make,
)


def positions(function, *, skip_self):
    parameters = list(inspect.signature(function).parameters.values())[1 if skip_self else 0 :]
    return {p.name: (index, p) for index, p in enumerate(parameters)}


def assert_accepts_what(theirs, ours, *, skip_self, where):
    """Asserts that each call that Keras's signature takes means the same to ours."""
    ours_by_name, theirs_by_name = (
        positions(function, skip_self=skip_self) for function in (ours, theirs)
    )
    for name, (index, parameter) in theirs_by_name.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            kinds = {p.kind for _, p in ours_by_name.values()}
            assert parameter.kind in kinds, f"{where} takes no *{name}"
            continue
        assert name in ours_by_name, f"{where} takes no {name}="
        at, own = ours_by_name[name]
        assert at == index, f"{where}: {name} is argument {index} in Keras and {at} here"
        assert own.kind == own.POSITIONAL_OR_KEYWORD, f"{where}: {name} is {own.kind}"
        assert own.default == parameter.default, (
            f"{where}: {name}={parameter.default!r} in Keras, {own.default!r} here"
        )


@pytest.mark.parametrize(("room", "name"), CLASSES)
def test_constructor_and_methods_take_what_those_of_keras_take(room, name):
    ours, theirs = getattr(OURS[room], name), getattr(THEIRS[room], name)
    assert_accepts_what(theirs.__init__, ours.__init__, skip_self=True, where=name)
    for method, function in inspect.getmembers(theirs, inspect.isfunction):
        is_abstract = method == "update_state" and theirs is keras.metrics.Metric
        if not method.startswith("_") and not is_abstract:
            assert_accepts_what(
                function, getattr(ours, method), skip_self=True, where=f"{name}.{method}"
            )
    for method, value in inspect.getmembers(theirs, lambda value: isinstance(value, property)):
        assert isinstance(getattr(ours, method), type(value)), f"{name}.{method}"


@pytest.mark.parametrize(("room", "name"), FUNCTIONS)
def test_functions_take_what_those_of_keras_take(room, name):
    assert_accepts_what(
        getattr(THEIRS[room], name), getattr(OURS[room], name), skip_self=False, where=name
    )


@pytest.mark.parametrize(("room", "name"), CONCRETE)
def test_attributes_and_configurations_are_those_of_keras_and_go_there_and_back(room, name):
    more = {"name": "mine", "dtype": "bfloat16"} | (
        {"reduction": "sum"} if room == "losses" else {}
    )
    ours, theirs = make(room, name, **more)
    config, expected = ours.get_config(), theirs.get_config()
    assert set(expected) <= set(config)
    for key in set(expected) - {"fn"}:
        assert json.loads(json.dumps(config[key])) == json.loads(json.dumps(expected[key])), key
    written = json.loads(json.dumps(OURS[room].serialize(ours)))
    from_theirs = OURS[room].deserialize(json.loads(json.dumps(THEIRS[room].serialize(theirs))))
    assert set(expected) <= set(from_theirs.get_config())
    again = [
        type(ours).from_config(config),
        pickle.loads(pickle.dumps(ours)),
        copy.deepcopy(ours),
        OURS[room].deserialize(written),
    ]
    for copied in [*again, OURS[room].get(written)] if room == "losses" else again:
        assert type(copied) is type(ours)
        assert (copied.get_config(), copied.dtype) == (config, "bfloat16")
    for attribute, value in vars(theirs).items():
        if not attribute.startswith("_") and isinstance(
            value, (bool, int, float, str, list, type(None))
        ):
            assert getattr(ours, attribute) == value, attribute
    if (
        room == "metrics" and name != "R2Score"
    ):  # Which makes one of its variables at once in Keras, the others at the first update.
        assert [variable.shape for variable in ours.variables] == [
            variable.shape for variable in theirs.variables
        ]
