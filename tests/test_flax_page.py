"""The flags that the page "Training a Flax model" names, and Flax's examples as ported."""

import importlib.util
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import tnt_jax as tnt

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples" / "flax"
PAGE = ROOT / "docs" / "flax.md"


def test_the_page_names_every_flag_that_is_known():
    from tnt_jax.adapters.base import TRAIN_FLAGS

    section = PAGE.read_text().split("## Training and evaluation\n")[1].split("\n## ")[0]
    rows = [line.split("|") for line in section.splitlines() if line.startswith("| `")]
    named = {
        flag: row[2].strip() == "True" for row in rows for flag in re.findall(r"`(\w+)`", row[1])
    }
    assert named == TRAIN_FLAGS


def load(name):
    spec = importlib.util.spec_from_file_location(f"flax_example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Flax looks up the module of its dataclasses.
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["mnist", "vae", "lm1b"])
def test_a_port_has_at_most_ten_changed_lines_in_its_training_part(name):
    lines = (EXAMPLES / f"{name}.py").read_text().splitlines()
    assert 3 <= sum("# tnt" in line for line in lines) <= 10


@pytest.mark.slow
@pytest.mark.skipif("TNT_JAX_DATA" not in os.environ, reason="needs the data sets in TNT_JAX_DATA")
@pytest.mark.parametrize(
    ("name", "num_examples"),
    [
        pytest.param("mnist", 64, marks=pytest.mark.long),
        pytest.param("vae", 256, marks=pytest.mark.long),
        pytest.param("lm1b", 128, marks=pytest.mark.long),
    ],
)
def test_an_example_of_flax_learns_alike_on_one_device_and_on_four(
    name, num_examples, use_ranks, monkeypatch
):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    example, histories = load(name), []
    for num_ranks in (1, 4):
        use_ranks(num_ranks)
        model = example.main(
            ["--data", os.environ["TNT_JAX_DATA"], "--epochs", "2", "--examples", str(num_examples)]
        )
        histories.append(model.history.history)
    assert histories[0]["loss"][1] < histories[0]["loss"][0]
    assert histories[0].keys() == histories[1].keys()
    for key, values in histories[0].items():
        np.testing.assert_allclose(
            histories[1][key], values, rtol=2e-2 if "accuracy" in key else 2e-3, err_msg=key
        )
    assert tnt.get_size() == 4
