"""The programs before and after a diff of the documentation train alike: the first as its own
library does, the second here on eight ranks.
"""

import sys
from types import ModuleType

import jax
import keras
import numpy as np
import pytest
from pages import PAGES, ROOT, diffs, side

DIFFS = [
    pytest.param(diff, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, diff in enumerate(diffs(page))
]


def losses_of(program, name, monkeypatch):
    module = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, module)  # Flax looks up the module of its classes.
    exec(compile(program, name, "exec"), vars(module))
    return module.losses


def losses_before(diff, monkeypatch):
    """Runs the original; with `pmap` on one device, whose statistics are those of all rows."""
    devices = jax.local_devices()[:1]
    with monkeypatch.context() as patch:
        patch.setattr(jax, "local_devices", lambda: devices)
        patch.setattr(jax, "local_device_count", lambda: 1)
        try:
            return losses_of(side(diff, "+"), "before", patch)
        finally:
            keras.distribution.set_distribution(None)


@pytest.mark.parametrize("diff", DIFFS)
def test_a_program_trains_as_before(diff, use_ranks, monkeypatch):
    expected = losses_before(diff, monkeypatch)
    use_ranks(8)
    found = losses_of(side(diff, "-"), "after", monkeypatch)
    assert len(set(expected)) >= 3
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_the_guides_of_keras_need_five_lines_at_most():
    guides = diffs(ROOT / "docs/keras_guides.md")
    added = [sum(line.startswith("+") and line != "+" for line in d.splitlines()) for d in guides]
    assert len(added) == 3
    assert max(added) <= 5


@pytest.mark.parametrize("removed", ["+", "-"])
def test_a_diff_has_two_sides(removed):
    diff = " a = 1\n-b = 2\n+b = 3\n\n c = 4\n"
    kept = {"+": "2", "-": "3"}[removed]
    assert side(diff, removed) == f"a = 1\nb = {kept}\n\nc = 4\n"
