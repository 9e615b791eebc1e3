"""The page of models states the parameters that the modules have, and misses no family."""

import re

import jax
import jax.numpy as jnp
import pytest
from pages import ROOT

from tnt_jax import models

PAGE = (ROOT / "docs/models.md").read_text()
ROWS = re.findall(r"^\| `(\w+\(.*\))` \| ([\d,]+) \|$", PAGE, re.MULTILINE)


def inputs_of(name):
    tokens = jax.ShapeDtypeStruct((1, 8), jnp.int32)
    if name == "Transformer":
        return [tokens, tokens]
    if name in {"TextClassifier", "Decoder"}:
        return [tokens]
    size = 64 if re.search(r"resnet(18|34|50|101|152)", name) else 32
    return [jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)]


@pytest.mark.parametrize(("call", "published"), ROWS)
def test_a_model_has_as_many_parameters_as_the_page_says(call, published):
    name, _, arguments = call.partition("(")
    names = {name: getattr(models, name), "PARAM_SETS": models.PARAM_SETS}
    names["DECODER_SIZES"] = models.DECODER_SIZES
    flag = {} if name == "Decoder" else {"train": False}
    module = eval(f"{name}({arguments}", names)
    shapes = jax.eval_shape(
        lambda *inputs: module.init(jax.random.key(0), *inputs, **flag), *inputs_of(name)
    )
    assert f"{sum(leaf.size for leaf in jax.tree.leaves(shapes['params'])):,}" == published


def test_the_page_has_every_model():
    shown = {call.partition("(")[0] for call, _ in ROWS}
    parts = {"Attention", "BasicBlock", "BottleneckBlock", "ResNet", "CifarResNet", "Translator"}
    values = {name: getattr(models, name) for name in models.__all__ if not name.endswith("model")}
    made = {
        name
        for name, value in values.items()
        if name.startswith("resnet") or (isinstance(value, type) and hasattr(value, "init"))
    }
    assert made - parts - {"Sequences"} == shown
