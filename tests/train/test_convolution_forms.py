"""The ways to convolve that `benchmarks/convolutions.py` times compute the same, and its tables can
be made.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from convolution_forms import (
    PASSES,
    Layer,
    convolve,
    convolve_nchw,
    make_arrays,
    one_matmul,
    passes_of,
    sum_of_matmuls,
)
from convolutions_report import markdown

RESULT = Path(__file__).parents[2] / "benchmarks" / "results" / "convolutions.json"
# How arrays with channels last become those with channels first, for the result of each pass.
TO_FIRST = {
    "forward": (0, 3, 1, 2),
    "input gradient": (0, 3, 1, 2),
    "kernel gradient": (3, 2, 0, 1),
}


@pytest.mark.parametrize(
    "layer",
    [
        Layer("a", 2, 4, 2, 3, 3),
        pytest.param(Layer("b", 2, 4, 3, 2, 3, 2), marks=pytest.mark.long),
        Layer("c", 1, 4, 2, 2, 1),
    ],
)
def test_all_forms_compute_the_same(layer):
    x, kernel, grad = make_arrays(layer)
    expected = {name: run(x, kernel, grad) for name, run in passes_of(convolve, layer).items()}
    first = [x.transpose(0, 3, 1, 2), kernel.transpose(3, 2, 0, 1), grad.transpose(0, 3, 1, 2)]
    for name in PASSES:
        for form in (one_matmul, sum_of_matmuls):
            np.testing.assert_allclose(
                passes_of(form, layer)[name](x, kernel, grad), expected[name], rtol=1e-4, atol=1e-5
            )
        channels_first = passes_of(convolve_nchw, layer)[name](*first)
        np.testing.assert_allclose(
            channels_first, expected[name].transpose(TO_FIRST[name]), rtol=1e-4, atol=1e-5
        )


def test_recorded_result_makes_tables():
    results = json.loads(RESULT.read_text())
    text = markdown(results)
    assert all(row["layer"] in text for row in results["layers"])
    assert {len(line.split("|")) for line in text.split("\n\n")[0].splitlines()} == {
        text.splitlines()[0].count("|") + 1
    }
