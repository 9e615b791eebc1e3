"""The Street View House Numbers, cropped digits (Netzer et al. 2011): from the files that their
authors publish, from TensorFlow Datasets, or a stand-in that is drawn.

    python svhn_data.py FOLDER

draws the stand-in.
"""

import argparse
from pathlib import Path

import numpy as np

import tnt_jax as tnt

PARTS = ("train", "test")
# Digits 0 to 9 in five rows of three dots, each row as bits.
_DOTS = ["75557", "26227", "71747", "71717", "55711", "74717", "74757", "71111", "75757", "75717"]


def load(folder):
    """Returns `(images, labels)` of the training and of the test set; images uint8 `[n, 32, 32,
    3]`, labels int32 `[n]` from 0 to 9.

    Args:
        folder: Folder with `train_32x32.mat` and `test_32x32.mat`, else with `svhn_cropped` of
            TensorFlow Datasets, which is downloaded to it if it is missing.

    Raises:
        FileNotFoundError: If only one of the two files is there.
        ValueError: If a file does not hold what it should.
    """
    files = [Path(folder) / f"{part}_32x32.mat" for part in PARTS]
    missing = [file.name for file in files if not file.is_file()]
    if len(missing) == 1:
        raise FileNotFoundError(f"{folder} lacks {missing[0]}.")
    if not missing:
        return tuple(map(read_mat, files))
    return tuple(_arrays(tnt.data.load("svhn_cropped", p, data_dir=folder)) for p in PARTS)


def read_mat(file):
    """Returns images and labels of a MATLAB file: `X` [32, 32, 3, n] and `y` [n, 1], in which the
    digit 0 has the label 10.

    Raises:
        ValueError: If the file is damaged, or its arrays have other shapes or labels.
    """
    from scipy.io import loadmat

    try:
        content = loadmat(file, variable_names=("X", "y"))
        images, labels = content["X"], content["y"].reshape(-1)
    except (ValueError, KeyError, NotImplementedError, EOFError, OSError) as error:
        raise ValueError(f"{file} is no MATLAB 5 file with the arrays X and y: {error}.") from error
    if images.dtype != np.uint8 or images.shape != (32, 32, 3, len(labels)):
        raise ValueError(
            f"{file} must hold X, uint8 [32, 32, 3, n], and y [n, 1], but holds {images.dtype} "
            f"{list(images.shape)} and {list(content['y'].shape)}."
        )
    if not np.isin(labels, range(1, 11)).all():
        raise ValueError(f"{file} must have labels from 1 to 10, but has {np.unique(labels)}.")
    return np.ascontiguousarray(images.transpose(3, 0, 1, 2)), (labels % 10).astype(np.int32)


def draw(num_images, seed):
    """Returns drawn images and labels: a digit in the middle, in a color on another, and parts of
    other digits beside it.
    """
    random = np.random.default_rng(seed)
    dots = np.array([[[int(row) >> bit & 1 for bit in (2, 1, 0)] for row in d] for d in _DOTS])
    digits = np.kron(dots, np.ones((1, 4, 4))).astype(bool)  # [10, 20, 12]
    labels = random.integers(0, 10, num_images)
    images = np.empty((num_images, 32, 32, 3))
    for image, label in zip(images, labels, strict=True):
        paper, ink = random.permutation([60, 190]) + random.integers(-30, 31, 2)
        ground = np.full((32, 60), paper, np.float32)
        row, column = random.integers(2, 10), 24 + random.integers(-3, 4)
        left, right = random.integers(0, 10, 2)
        for digit, place in ((left, column - 15), (label, column), (right, column + 15)):
            ground[row : row + 20, place : place + 12][digits[digit]] = ink
        image[:] = ground[:, 14:46, None] + random.integers(-20, 20, 3)
    noisy = images + random.normal(0, 10, images.shape)
    return noisy.clip(0, 255).astype(np.uint8), labels.astype(np.int32)


def write_stand_in(folder, num_train=2000, num_test=500):
    """Writes drawn images as `train_32x32.mat` and `test_32x32.mat`."""
    from scipy.io import savemat

    Path(folder).mkdir(parents=True, exist_ok=True)
    for seed, (part, size) in enumerate(zip(PARTS, (num_train, num_test), strict=True)):
        images, labels = draw(size, seed)
        labels = np.where(labels == 0, 10, labels)[:, None].astype(np.uint8)
        content = {"X": images.transpose(1, 2, 3, 0), "y": labels}
        savemat(Path(folder) / f"{part}_32x32.mat", content)


def _arrays(dataset):
    images, labels = zip(*dataset.as_numpy_iterator(), strict=True)
    return np.stack(images), np.array(labels, np.int32)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draws a stand-in for SVHN.")
    parser.add_argument("folder")
    parser.add_argument("--num_train", type=int, default=2000, help="training images")
    parser.add_argument("--num_test", type=int, default=500, help="test images")
    args = parser.parse_args()
    write_stand_in(args.folder, args.num_train, args.num_test)
