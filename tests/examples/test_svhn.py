"""The SVHN exercise: its data, its solution beside `fit`, and its command in two processes."""

import importlib.util
import os
import re
from pathlib import Path

import numpy as np
import pytest
from processes import launch

import tnt_jax as tnt

ROOT = Path(__file__).parents[2]
SVHN = ROOT / "examples" / "svhn"


def load(name, file):
    """Returns a file as a module of its own: another example has a train.py, too."""
    spec = importlib.util.spec_from_file_location(name, SVHN / file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def svhn_data(monkeypatch):
    monkeypatch.syspath_prepend(str(SVHN))
    return importlib.import_module("svhn_data")


def test_mat_files_come_back_as_drawn_with_ten_for_zero(svhn_data, tmp_path):
    from scipy.io import loadmat

    svhn_data.write_stand_in(tmp_path, 30, 20)
    content = loadmat(tmp_path / "train_32x32.mat")
    assert content["X"].shape == (32, 32, 3, 30)
    assert content["y"].shape == (30, 1)
    assert set(content["y"].flat) <= set(range(1, 11))
    train, test = svhn_data.load(tmp_path)
    for part, size, seed in ((train, 30, 0), (test, 20, 1)):
        images, labels = svhn_data.draw(size, seed)
        np.testing.assert_array_equal(part[0], images)
        np.testing.assert_array_equal(part[1], labels)
        assert (part[0].dtype, part[1].dtype) == (np.uint8, np.int32)
    assert 0 in train[1]


def save(folder, **content):
    from scipy.io import savemat

    for part in ("train", "test"):
        savemat(folder / f"{part}_32x32.mat", content)


IMAGES = np.zeros((32, 32, 3, 4), np.uint8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"X": IMAGES}, "no MATLAB 5 file with the arrays X and y"),
        ({"X": IMAGES.T, "y": np.ones((4, 1))}, r"must hold X, uint8 \[32, 32, 3, n\]"),
        ({"X": IMAGES, "y": np.ones((5, 1))}, r"but holds uint8 \[32, 32, 3, 4\] and \[5, 1\]"),
        ({"X": IMAGES, "y": np.arange(4)[:, None]}, r"labels from 1 to 10, but has \[0 1 2 3\]"),
    ],
)
def test_wrong_files_are_explained(svhn_data, tmp_path, content, message):
    save(tmp_path, **content)
    with pytest.raises(ValueError, match=message):
        svhn_data.load(tmp_path)


def test_a_damaged_and_a_missing_file_are_explained(svhn_data, tmp_path):
    svhn_data.write_stand_in(tmp_path, 8, 8)
    file = tmp_path / "train_32x32.mat"
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(ValueError, match="no MATLAB 5 file"):
        svhn_data.load(tmp_path)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks train_32x32\.mat"):
        svhn_data.load(tmp_path)


def test_tensorflow_datasets_are_read(svhn_data, tmp_path, monkeypatch):
    import tensorflow as tf

    images, labels = svhn_data.draw(6, 0)
    asked = []

    def load(name, part, *, data_dir):
        asked.append((name, part, data_dir))
        return tf.data.Dataset.from_tensor_slices((images, labels.astype(np.int64)))

    monkeypatch.setattr(tnt.data, "load", load)
    train, _ = svhn_data.load(tmp_path)
    assert asked == [("svhn_cropped", part, tmp_path) for part in ("train", "test")]
    np.testing.assert_array_equal(train[0], images)
    assert train[1].dtype == np.int32


def test_the_exercise_says_what_to_write(svhn_data):
    exercise = importlib.import_module("exercise")
    with pytest.raises(NotImplementedError, match=r"Write train_step in exercise\.py"):
        exercise.train_step(None, None, None)
    with pytest.raises(NotImplementedError, match=r"Write eval_step in exercise\.py"):
        exercise.eval_step(None, None)


def test_images_are_drawn_with_labels_and_predictions(svhn_data, tmp_path):
    from matplotlib.image import imread

    train = load("svhn_train", "train.py")
    images, labels = svhn_data.draw(20, 0)
    for name, predicted in (("right.png", labels), ("wrong.png", (labels + 1) % 10)):
        train.draw_images(tmp_path / name, images, labels, predicted)
    # Titles of wrong predictions are red.
    num_red = [
        int(np.all(imread(tmp_path / name)[..., :3] == (1, 0, 0), axis=-1).sum())
        for name in ("right.png", "wrong.png")
    ]
    assert num_red[0] < num_red[1] // 10


def losses_of(way, text):
    return np.array([float(x) for x in re.findall(rf"^{way}, epoch \d+: loss (\S+),", text, re.M)])


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_solution_learns_beside_fit_and_in_two_processes_as_on_one_device(
    svhn_data, tmp_path, use_ranks, capsys
):
    svhn_data.write_stand_in(tmp_path, 600, 43)  # 43 rows in a batch of 50.
    train, solution = load("svhn_train", "train.py"), importlib.import_module("solution")
    use_ranks(1)
    data = svhn_data.load(tmp_path)
    train.custom_loop(solution, *data, batch_size=50, epochs=2, seed=0)
    alone = losses_of("loop", capsys.readouterr().out)
    words = ("--data", tmp_path, "--epochs", 9, "--batch_size", 50)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = launch(2, SVHN / "train.py", *words, PYTHONPATH=paths)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 device(s)" in done.stdout
    # Later Adam has made more of the last bits.
    np.testing.assert_allclose(losses_of("loop", done.stdout)[:2], alone, rtol=1e-4)
    for way in ("loop", "fit"):
        row = next(line.split() for line in done.stdout.splitlines() if line.startswith(f"{way} "))
        assert float(row[-1]) > 0.7, done.stdout
