"""The data sets that a configuration can name: each gives batches for training and validation, and
what a model must know of them.
"""

import gzip
import inspect
import pickle
import tarfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from configuration import check_keys, choose

import tnt_jax as tnt


class Datasets(NamedTuple):
    """Batches for training and validation, and the number of training examples."""

    train: Any
    valid: Any
    num_train: int


def make(config, *, batch_size, seed):
    """Returns the `Datasets` that the section `data` names, in global batches of `batch_size`.

    Raises:
        ValueError: If the name or another key is unknown.
        FileNotFoundError: If files are missing; the text says which.
    """
    loader = choose(config["name"], LOADERS, "data set")
    known = {
        name for name, p in inspect.signature(loader).parameters.items() if p.kind is p.KEYWORD_ONLY
    } - {
        "batch_size",
        "seed",
    }
    settings = {key: value for key, value in config.items() if key != "name"}
    check_keys(settings, known, f"the data set {config['name']!r}")
    return loader(**settings, batch_size=batch_size, seed=seed)


def dummy(*, batch_size, seed, input_shape=(64, 64, 3), n_train=1024, n_valid=1024, n_classes=2):
    """Random pixels with random labels."""
    random = np.random.default_rng(seed)

    def part(size):
        return random.standard_normal((size, *input_shape), np.float32), random.integers(
            0, n_classes, size
        ).astype(np.int32)

    return _batches(part(n_train), part(n_valid), batch_size=batch_size, seed=seed, shift=None)


def cifar10(*, batch_size, seed, data_dir, n_train=None, n_valid=None, shift=4):
    """CIFAR-10 from its archives (`cifar-10-batches-py` or `cifar-10-python.tar.gz`) in `data_dir`,
    else from TFDS, kept there.
    """
    archive = Path(data_dir) / "cifar-10-python.tar.gz"
    folder = Path(data_dir) / "cifar-10-batches-py"
    if folder.is_dir():
        files = {file.name: file.read_bytes() for file in folder.iterdir() if "batch" in file.name}
        train, valid = _cifar_parts(files)
    elif archive.is_file():
        with tarfile.open(archive) as tar:
            files = {
                Path(m.name).name: tar.extractfile(m).read()
                for m in tar
                if m.isfile() and "batch" in m.name
            }
        train, valid = _cifar_parts(files)
    else:
        train, valid = (
            _arrays(tnt.data.load("cifar10", split, data_dir=data_dir))
            for split in ("train", "test")
        )
    return _batches(
        _first(train, n_train),
        _first(valid, n_valid),
        batch_size=batch_size,
        seed=seed,
        shift=shift,
    )


def idx(*, batch_size, seed, data_dir, n_train=None, n_valid=None, shift=4):
    """Images in the files of MNIST and Fashion-MNIST: `train-images-idx3-ubyte` and so on, also
    with `.gz`.
    """
    parts = []
    for prefix, size in (("train", n_train), ("t10k", n_valid)):
        images = read_idx(Path(data_dir) / f"{prefix}-images-idx3-ubyte")
        labels = read_idx(Path(data_dir) / f"{prefix}-labels-idx1-ubyte")
        parts.append(
            _first(
                (images[..., None] if images.ndim == 3 else images, labels.astype(np.int32)), size
            )
        )
    return _batches(*parts, batch_size=batch_size, seed=seed, shift=shift)


def folders(
    *,
    batch_size,
    seed,
    data_dir,
    train="train",
    valid="validation",
    image_size=224,
    scaling="mean",
    crop="distorted",
    shift=4,
):
    """JPEG files in class folders: `data_dir/train/CLASS/*.jpg` and
    `data_dir/validation/CLASS/*.jpg`.

    Training sees crops of random size and shape (`crop: distorted`, as on ImageNet), or, better for
    few photos, the central part that validation sees (`crop: central`), kept in memory, shifted by
    up to `shift` pixels and flipped.
    """
    choose(crop, {"distorted": 0, "central": 0}, "crop")
    classes = sorted(entry.name for entry in (Path(data_dir) / train).iterdir() if entry.is_dir())
    records = tnt.data.image_folder(Path(data_dir) / train, classes=classes)
    num_train = int(records.cardinality())
    valid_records = tnt.data.image_folder(Path(data_dir) / valid, classes=classes)
    form = tnt.data.ImageFormat(size=image_size, scaling=scaling)
    examples = tnt.data.evaluation_images(valid_records, batch_size=batch_size, image_format=form)
    if crop == "distorted":
        return Datasets(
            tnt.data.training_images(records, batch_size=batch_size, image_format=form, seed=seed),
            examples,
            num_train,
        )
    photos = (
        tnt.data.evaluation_images(records, batch_size=batch_size, image_format=form)
        .dataset.unbatch()
        .cache()
    )
    augmented = _augmented(photos.shuffle(num_train, seed), seed=seed, shift=shift)
    return Datasets(augmented.batch(batch_size).prefetch(2), examples, num_train)


LOADERS = {"dummy": dummy, "cifar10": cifar10, "idx": idx, "folders": folders}


def read_idx(path):
    """Returns the array of an IDX file, or of the file with `.gz` added to its name.

    Raises:
        FileNotFoundError: If neither file exists.
        ValueError: If the file does not hold what its first bytes say.
    """
    zipped = path.with_name(path.name + ".gz")
    if not path.is_file() and not zipped.is_file():
        raise FileNotFoundError(f"There is neither {path} nor {zipped.name} beside it.")
    content = path.read_bytes() if path.is_file() else gzip.decompress(zipped.read_bytes())
    num_dims = content[3]
    shape = np.frombuffer(content, ">i4", num_dims, offset=4)
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * num_dims)
    if content[:3] != b"\0\0\x08" or values.size != np.prod(shape):
        raise ValueError(
            f"{path} is no complete IDX file of bytes: it says {shape.tolist()} and holds "
            f"{values.size} values."
        )
    return values.reshape(shape)


def _cifar_parts(files):
    names = [f"data_batch_{number}" for number in range(1, 6)]
    missing = [name for name in (*names, "test_batch") if name not in files]
    if missing:
        raise FileNotFoundError(f"The CIFAR-10 archive lacks {', '.join(missing)}.")

    def part(names):
        batches = [pickle.loads(files[name], encoding="bytes") for name in names]
        pixels = np.concatenate([batch[b"data"] for batch in batches])
        labels = np.concatenate([batch[b"labels"] for batch in batches]).astype(np.int32)
        # Each row holds the red, the green and the blue plane, row by row.
        return pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels

    return part(names), part(["test_batch"])


def _arrays(dataset):
    examples = list(dataset.as_numpy_iterator())
    return np.stack([image for image, _ in examples]), np.array(
        [label for _, label in examples], np.int32
    )


def _first(part, size):
    images, labels = part
    return images[:size], labels[:size]


def _augmented(examples, *, seed, shift):
    """Returns examples whose images are shifted by up to `shift` pixels and flipped, otherwise in
    every epoch.
    """
    numbers = tf.data.Dataset.random(seed, rerandomize_each_iteration=True)

    def augment(example, number):
        image, label = example
        return tnt.data.shift_and_flip(
            image, tf.stack([number, tf.constant(0, tf.int64)]), padding=shift
        ), label

    return tf.data.Dataset.zip((examples, numbers)).map(
        augment, num_parallel_calls=tf.data.AUTOTUNE
    )


def _batches(train, valid, *, batch_size, seed, shift):
    """Returns shuffled batches of pixels from 0 to 1, shifted and flipped unless `shift` is None,
    and plain ones for validation.
    """
    examples = tf.data.Dataset.from_tensor_slices(train).shuffle(len(train[1]), seed)
    if shift is not None:
        examples = _augmented(examples, seed=seed, shift=shift)

    def scale(image, label):
        return (tf.cast(image, tf.float32) / 255 if image.dtype == tf.uint8 else image), label

    def batched(dataset):
        return dataset.map(scale, num_parallel_calls=tf.data.AUTOTUNE).batch(batch_size).prefetch(2)

    return Datasets(
        batched(examples), batched(tf.data.Dataset.from_tensor_slices(valid)), len(train[1])
    )
