"""A script in the style of Keras's tutorials trains on with the import and the model changed, and
nothing else.
"""

import json
import runpy
import sys

import keras
import numpy as np
import pytest
from processes import SCRIPTS, launch

pytest.importorskip("tensorflow", reason="The script reads its data with tf.data.")
pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]
SCRIPT = SCRIPTS / "keras_resnet_cifar.py"
CHANGES = {
    "import tensorflow as tf\n": "import tensorflow as tf\n\nimport tnt_jax as tnt\n\ntnt.init()\n",
    "model = resnet(train[0].shape[1], flags.blocks_per_stage, flags.filters)": (
        "model = tnt.Model(resnet(train[0].shape[1], flags.blocks_per_stage, flags.filters), "
        "synchronize_batch_norm=True)"
    ),
}
SMALL = "--num_images 44 --image_size 8 --blocks_per_stage 1 --batch_size 10 --warmup_epochs 1 --profile_runtime --logging_freq 3"
OUTPUTS = "--enable_checkpoint_and_export --enable_tensorboard"
BY_STEPS = f"{SMALL} {OUTPUTS} --filters 8 16 --train_epochs 3 --epochs_between_evals 2"
BY_EPOCHS = f"{SMALL} {OUTPUTS} --filters 8 --train_epochs 8 --schedule epochs --patience 1"


@pytest.fixture
def changed(tmp_path):
    text = SCRIPT.read_text()
    for old, new in CHANGES.items():
        assert text.count(old) == 1
        text = text.replace(old, new)
    path = tmp_path / "changed.py"
    path.write_text(text)
    return path


def run_here(script, flags, folder, monkeypatch, capsys):
    keras.utils.clear_session()
    monkeypatch.setattr(sys, "argv", [str(script), *flags.split(), "--model_dir", str(folder)])
    runpy.run_path(str(script), run_name="__main__")
    return capsys.readouterr().out


def result_of(text):
    (line,) = [line for line in text.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def assert_same_outcome(text, folder, expected_text, expected_folder):
    """Compares what two runs reported, the files they left, and the weights in each of them."""
    found, expected = result_of(text), result_of(expected_text)
    assert found["history"].keys() == expected["history"].keys()
    for name, values in expected["history"].items():
        np.testing.assert_allclose(found["history"][name], values, rtol=1e-4, err_msg=name)
    assert found["results"] == pytest.approx(expected["results"], rel=1e-4)
    assert found["hits"] == expected["hits"]
    assert float(text.partition("The exported model differs by ")[2].split()[0]) < 1e-6
    profile, expected_profile = (
        [" ".join(line.split()[:3]) for line in t.splitlines() if "PROFILE" in line]
        for t in (text, expected_text)
    )
    assert profile == expected_profile
    names, expected_names = (
        sorted(p.relative_to(f).as_posix() for p in f.rglob("*") if "events" not in p.name)
        for f in (folder, expected_folder)
    )
    assert names == expected_names
    for name in (name for name in names if name.endswith(".keras")):
        weights, expected_weights = (
            keras.models.load_model(f / name, compile=False).get_weights()
            for f in (folder, expected_folder)
        )
        for mine, theirs in zip(weights, expected_weights, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.long
def test_a_keras_script_gives_the_same_numbers_and_files(
    changed, two_ranks, tmp_path, monkeypatch, capsys
):
    expected = run_here(SCRIPT, BY_STEPS, tmp_path / "keras", monkeypatch, capsys)
    text = run_here(changed, BY_STEPS, tmp_path / "ours", monkeypatch, capsys)
    assert_same_outcome(text, tmp_path / "ours", expected, tmp_path / "keras")


@pytest.mark.long
def test_a_keras_script_stops_at_the_same_epoch_in_two_processes(
    changed, tmp_path, monkeypatch, capsys
):
    expected = run_here(SCRIPT, BY_EPOCHS, tmp_path / "keras", monkeypatch, capsys)
    result = launch(
        2, changed, *BY_EPOCHS.split(), "--model_dir", tmp_path / "ours", KERAS_BACKEND="jax"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert_same_outcome(result.stdout, tmp_path / "ours", expected, tmp_path / "keras")
    assert len(result_of(expected)["history"]["loss"]) < 8, "It must stop early to show anything."
