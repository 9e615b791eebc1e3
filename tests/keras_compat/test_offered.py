"""What parts of a model do is offered by the model."""

import inspect

import flax.linen as nn
import pytest

import tnt_jax as tnt


def test_what_parts_of_a_model_do_is_offered_with_arguments_and_documentation():
    assert list(inspect.signature(tnt.Model.save_weights).parameters) == [
        "self",
        "filepath",
        "overwrite",
        "tnt_save_all_devices",
    ]
    public = [
        name for name in dir(tnt.Model) if not name.startswith("_") and name != "train_function"
    ]
    undocumented = {name for name in public if not inspect.getattr_static(tnt.Model, name).__doc__}
    documented = inspect.getdoc(tnt.Model)
    assert all(f"    {name}: " in documented for name in undocumented), undocumented
    with pytest.raises(AttributeError):
        tnt.Model(nn.Dense(3)).layers = []
