"""Flax's examples with loops of their own: on one device and on four they train as the originals."""

import difflib
import gzip
import importlib
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from tnt_jax.distributed.sums.random_rows import row_key

EXAMPLES = Path(__file__).parents[2] / "examples" / "flax"
NAMES = ("mnist", "vae", "lm1b")


def code_lines(name):
    """Returns the lines of an example below its docstring."""
    return (EXAMPLES / f"{name}.py").read_text().partition('"""\n\nimport')[2].splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_a_port_changes_at_most_ten_lines_and_marks_them(name):
    original, port = code_lines(f"{name}_one_device"), code_lines(f"{name}_loop")
    changed = 0
    for tag, i, j, k, m in difflib.SequenceMatcher(
        None, original, port, autojunk=False
    ).get_opcodes():
        if tag != "equal":
            changed += max(sum(map(bool, lines)) for lines in (original[i:j], port[k:m]))
            assert all("# tnt" in line or not line for line in port[k:m])
    assert 5 <= changed <= 10
    assert not any("tnt" in line for line in original)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_the_lines_that_change(name):
    original, port = code_lines(f"{name}_one_device"), code_lines(f"{name}_loop")
    lines = list(difflib.unified_diff(original, port, n=0, lineterm=""))[2:]
    shown = [line for line in lines if line[0] in "+-" and line[1:]]
    page = (EXAMPLES.parents[1] / "docs" / "flax_examples.md").read_text()
    assert "\n".join(["```diff", *shown, "```"]) in page


def write_data(folder):
    """Writes 128 bars in images of Fashion-MNIST's format and as many sentences of Tatoeba's."""
    rng = np.random.default_rng(0)
    labels = np.arange(128) % 10
    images = rng.integers(0, 60, (128, 28, 28))
    for image, label in zip(images, labels, strict=True):
        image[2 * label + 3 : 2 * label + 7] += 150
    (folder / "fashion_mnist").mkdir()
    for part in ("train", "t10k"):
        for kind, array, offset in (("images-idx3", images, 16), ("labels-idx1", labels, 8)):
            file = folder / "fashion_mnist" / f"{part}-{kind}-ubyte.gz"
            file.write_bytes(gzip.compress(bytes(offset) + array.astype(np.uint8).tobytes()))
    (folder / "tatoeba_ende").mkdir()
    words = ["cat", "dog", "house", "red", "sees", "the", "a", "big"]
    lines = [" ".join(rng.choice(words, 1 + n % 7)) + f" {n}.\tDas." for n in range(128)]
    with gzip.open(folder / "tatoeba_ende" / "train.eng-deu.tsv.gz", "wt") as file:
        file.write("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_data(folder)
    return folder


def trained(example, folder, rng):
    """Returns parameters and metrics of an example on the data of a folder."""
    data = importlib.import_module("real_data")
    if "mnist" in example.__name__:
        return example.train(*data.fashion_mnist(folder, "train"), epochs=1)
    if "vae" in example.__name__:
        images = data.fashion_mnist(folder, "train")[0].reshape(-1, 784) > 0.5
        return example.train(images.astype(np.float32), rng, epochs=4)
    return example.train(data.english_sentences(folder, 48), rng, epochs=2)


@pytest.mark.long  # docs/flax.md runs one by default.
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_port_trains_as_the_original(name, folder, use_ranks, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    original, port = (importlib.import_module(f"{name}_{kind}") for kind in ("one_device", "loop"))
    for example in (original, port):
        if name == "lm1b":
            monkeypatch.setattr(example, "config", example.TransformerConfig(num_layers=1))
    # A distributed step draws random numbers by row of the global batch. Drawn so on one device, by
    # the original, they are the same.
    by_row = row_key(jax.random.key(1), 0)
    expected_params, expected = trained(original, folder, by_row)
    for num_ranks in (1, 4):
        use_ranks(num_ranks)
        params, history = trained(port, folder, jax.random.key(1))
        assert len(history) == len(expected) == 4
        for metrics, of_original in zip(history, expected, strict=True):
            for key, value in of_original.items():
                np.testing.assert_allclose(metrics[key], value, rtol=1e-5, err_msg=key)
        # Adam's first updates have the size of the rate wherever a gradient is not zero.
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), params, expected_params)
