"""The programs of the gallery: short, complete, right, and the same on four devices as on one."""

import importlib
import os
import sys
from pathlib import Path

import numpy as np
import pytest

GALLERY = Path(__file__).parents[2] / "examples" / "gallery"
PROGRAMS = sorted(path.stem for path in GALLERY.glob("*.py") if path.stem != "digits_data")
# The others have convolutions, dropout, custom loops and rows that are compared, too.
LONG = (
    *("distillation", "experts", "packed_language_model", "segmentation_unet"),
    *("variational_autoencoder", "vision_transformer"),
)
# What the whole program must reach.
REACHED = {
    "vision_transformer": lambda accuracy: accuracy > 0.85,
    "packed_language_model": lambda loss: loss < 2.6,  # log(128) is 4.9.
    "clip": lambda accuracy: accuracy > 0.9,
    "distillation": lambda both: both[1] > both[0],
    "experts": lambda accuracy: accuracy > 0.93,
    "variational_autoencoder": lambda nats: nats < 27,
    "segmentation_unet": lambda iou: iou > 0.7,
    "gan": lambda nearest: nearest[0] < 1.6 * nearest[1],
    "forecasting": lambda found: found[0] < 0.9 * found[1] and 0.65 < found[2] < 0.9,
    "keras_hub_bert": lambda accuracy: accuracy > 0.97,  # 0.87 are no spam.
}


@pytest.fixture
def program(request, monkeypatch):
    if request.param == "keras_hub_bert":
        pytest.importorskip("keras_hub", reason="needs keras-hub, which no extra installs")
        if "TNT_JAX_DATA" not in os.environ:
            pytest.skip("needs the data sets in TNT_JAX_DATA")
    monkeypatch.syspath_prepend(str(GALLERY))
    yield importlib.import_module(request.param)
    for name in (*PROGRAMS, "digits_data"):
        sys.modules.pop(name, None)


def test_every_program_has_a_claim_and_a_line_in_the_table():
    assert set(REACHED) == set(PROGRAMS)
    table = (GALLERY.parent / "README.md").read_text()
    assert all(f"(gallery/{name}.py)" in table for name in PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_below_80_lines_and_says_how_it_is_started(name):
    text = (GALLERY / f"{name}.py").read_text()
    assert len(text.splitlines()) < 80
    assert f"tnt-jax -n 2 -- examples/gallery/{name}.py" in text


@pytest.mark.parametrize(
    "program",
    [pytest.param(x, marks=pytest.mark.long) if x in LONG else x for x in PROGRAMS],
    indirect=True,
)
def test_a_program_gives_on_four_devices_what_it_gives_on_one(program, use_ranks, monkeypatch):
    if hasattr(program, "load"):
        # Seven batches of digits, of which the last is smaller, show what an epoch shows.
        (images, labels), held_out = program.load()
        monkeypatch.setattr(program, "load", lambda: ((images[:400], labels[:400]), held_out))
    found = []
    for ranks in (1, 4):
        use_ranks(ranks)
        found.append(program.main(epochs=1))
    np.testing.assert_allclose(*map(np.asarray, found), rtol=2e-3, atol=2e-3)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, indirect=True)
def test_a_program_reaches_what_it_is_for(program, use_ranks):
    use_ranks(2)
    assert REACHED[program.__name__](program.main())
