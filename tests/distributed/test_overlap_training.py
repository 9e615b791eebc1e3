"""Training by the ring, with all ranks in this process, beside training by XLA's sums;
`test_multiprocess.py` has real processes.
"""

import re
from dataclasses import replace

import flax.linen as nn
import jax
import numpy as np
import optax
import pytest
from reference_trainer import Net, make_data
from rings import make_rings

import tnt_jax as tnt
from tnt_jax.distributed import cpu_ring
from tnt_jax.distributed.cpu_ring import reducer as overlap
from tnt_jax.keras_compat import core as core_module

NUM_RANKS = 4
_CALL = "@xla_ffi_python_cpu_callback"


@pytest.fixture
def by_ring(use_ranks, monkeypatch):
    """Returns what makes models sum by a ring of one process from then on."""
    use_ranks(NUM_RANKS)

    def switch():
        (ring,) = make_rings(1)
        reducer = overlap.RingReducer(ring, NUM_RANKS)
        for module in (cpu_ring, overlap):
            monkeypatch.setattr(module, "connect", lambda: reducer)
        choose = core_module.choose_reduction
        monkeypatch.setattr(
            core_module,
            "choose_reduction",
            lambda *args, **choices: replace(choose(*args, **choices), by_ring=True),
        )

    return switch


def make_model(axis_name, optimizer=None, **choices):
    model = tnt.Model(Net(batch_norm=True, dropout=0.3, axis_name=axis_name), seed=4, **choices)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer or optax.sgd(0.1, momentum=0.9), loss=loss, metrics=["accuracy"])
    return model


def train(axis_name, optimizer=None, **choices):
    """Returns logs and variables; the last batch of each epoch is padded."""
    model = make_model(axis_name, optimizer, **choices)
    x, y, weight = make_data(31)
    history = model.fit(x, y, batch_size=9, sample_weight=weight, epochs=2, verbose=0).history
    return history, model.variables


@pytest.mark.parametrize("axis_name", ["data", pytest.param(None, marks=pytest.mark.long)])
@pytest.mark.parametrize("every", [pytest.param(None, marks=pytest.mark.long), 2])
def test_the_ring_trains_as_xla_does(by_ring, axis_name, every):
    def run():
        return train(axis_name, tnt.optimizers.SGD(0.1, gradient_accumulation_steps=every))

    expected = run()
    by_ring()
    jax.tree.map(
        lambda own, other: np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-5),
        run(),
        expected,
    )


@pytest.mark.long  # Two jobs; the ring itself is tested beside.
def test_half_precision_is_summed_in_single_precision(by_ring):
    expected = train(None, precision="bfloat16")
    by_ring()
    found = train(None, precision="bfloat16")
    jax.tree.map(
        lambda own, other: np.testing.assert_allclose(own, other, rtol=2e-2, atol=2e-2),
        found,
        expected,
    )
    x, y, _ = make_data(7)
    calls = [
        line
        for line in make_model(None, precision="bfloat16").lowered_text(x, y, 9).splitlines()
        if _CALL in line
    ]
    assert calls
    assert not any("bf16" in call for call in calls)


def test_only_small_arrays_are_joined(by_ring):
    by_ring()
    model = tnt.Model(nn.Sequential([nn.Dense(128), nn.Dense(10)]))
    model.compile("sgd", loss="mse")
    text = model.lowered_text(np.zeros((8, 128), "f4"), np.zeros((8, 10), "f4"), 8)
    calls = [line for line in text.splitlines() if _CALL in line]
    # The other kernel, two biases and two sums of the loss; a kernel of 64 KiB.
    assert any("tensor<1420xf32>, tensor<128x128xf32>" in call for call in calls), calls


@pytest.mark.parametrize("every", [None, 2])
def test_what_xla_sums_comes_before_the_ring(by_ring, every):
    """Otherwise processes that take turns in different orders would wait for each other for
    ever.
    """
    by_ring()
    x, y, _ = make_data(7)
    text = make_model(
        "data", tnt.optimizers.SGD(0.1, gradient_accumulation_steps=every)
    ).lowered_text(x, y, 9)
    # The program is written down in the order of its trace.
    kinds = re.findall(rf"stablehlo\.all_reduce|{_CALL}", text)
    assert kinds.count("stablehlo.all_reduce") > 1
    first = kinds.index(_CALL)
    assert "stablehlo.all_reduce" not in kinds[first:]
