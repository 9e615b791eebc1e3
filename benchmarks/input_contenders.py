"""The contenders of `benchmarks/input_pipeline.py`, by format of the data.

Each function takes a folder and a batch size, and returns a function that yields the host batches
of an epoch.
"""

import importlib.util
import os
from functools import cache
from pathlib import Path

MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NUM_ARRAY_ROWS = 10_000


# ---- Folders of JPEG files ----


def ours(folder, batch_size):
    from tnt_jax.data import ImageFormat, image_folder, training_images
    from tnt_jax.data.layout import RankSlice
    from tnt_jax.data.tf.tfdata import TfDataSource

    data = training_images(
        image_folder(folder), batch_size=batch_size, image_format=ImageFormat(scaling="mean_std")
    )
    source = TfDataSource(data, RankSlice(1))
    return lambda epoch: (batch.data for batch in source.batches(epoch))


def hand_written(folder, batch_size):
    import tensorflow as tf

    names = tf.constant(sorted(path.name for path in Path(folder).iterdir()))
    files = tf.data.Dataset.list_files(f"{folder}/*/*.jpg", shuffle=True, seed=42)

    def prepare(file):
        label = tf.argmax(tf.equal(names, tf.strings.split(file, os.sep)[-2]), output_type=tf.int32)
        return training_image(tf.io.read_file(file)), label

    dataset = (
        files.map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(batch_size)
        .prefetch(tf.data.AUTOTUNE)
    )
    return lambda epoch: dataset.as_numpy_iterator()


def training_image(jpeg):
    """Returns a random part of an image, as hand-written pipelines compute it."""
    import tensorflow as tf

    start, extent, _ = tf.image.sample_distorted_bounding_box(
        tf.io.extract_jpeg_shape(jpeg),
        tf.zeros([0, 0, 4]),
        0,
        0.1,
        (0.75, 4 / 3),
        (0.05, 1.0),
        100,
        True,
    )
    image = tf.io.decode_and_crop_jpeg(jpeg, tf.concat([start[:2], extent[:2]], 0), channels=3)
    image = tf.image.resize(tf.image.random_flip_left_right(image), [224, 224])
    return (image / 255.0 - MEAN) / DEVIATION


class TorchImages:
    """A map-style dataset as torchvision's reference training makes it, with Pillow."""

    def __init__(self, folder):
        names = sorted(path.name for path in Path(folder).iterdir())
        self.files = [
            (str(file), label)
            for label, name in enumerate(names)
            for file in sorted((Path(folder) / name).iterdir())
        ]

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        import numpy as np
        from PIL import Image

        file, label = self.files[index]
        image = Image.open(file).convert("RGB")
        image = image.resize((224, 224), Image.Resampling.BILINEAR, box=random_box(*image.size))
        if np.random.rand() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return (np.asarray(image, np.float32) / 255 - np.float32(MEAN)) / np.float32(
            DEVIATION
        ), label


def random_box(width, height):
    import numpy as np

    for _ in range(100):
        area, ratio = width * height * np.random.uniform(0.05, 1), np.random.uniform(0.75, 4 / 3)
        w, h = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
        if w <= width and h <= height:
            left, top = np.random.randint(width - w + 1), np.random.randint(height - h + 1)
            return left, top, left + w, top + h
    return 0, 0, width, height


def torch_loader(folder, batch_size):
    import torch

    loader = torch.utils.data.DataLoader(
        TorchImages(folder), batch_size, shuffle=True, num_workers=os.cpu_count() or 1,
        persistent_workers=True, prefetch_factor=2,
        multiprocessing_context="forkserver",
    )  # fmt: skip
    return lambda epoch: ((images.numpy(), labels.numpy()) for images, labels in loader)


def grain_images(folder, batch_size):
    return grain_epochs(TorchImages(folder), batch_size, num_workers=os.cpu_count() or 1)


def random_access_images(folder, batch_size):
    return random_access(TorchImages(folder), batch_size, num_workers=os.cpu_count() or 1)


# ---- TFRecords with the same images ----


def write_records(folder, target, num_files=4):
    """Writes the images of a folder into TFRecord files with the usual names of features."""
    import tensorflow as tf

    Path(target).mkdir()
    files = TorchImages(folder).files
    for number in range(num_files):
        with tf.io.TFRecordWriter(f"{target}/train-{number:05}") as writer:
            for file, label in files[number::num_files]:
                image = tf.train.Feature(
                    bytes_list=tf.train.BytesList(value=[Path(file).read_bytes()])
                )
                labels = tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))
                feature = {"image/encoded": image, "image/class/label": labels}
                example = tf.train.Example(features=tf.train.Features(feature=feature))
                writer.write(example.SerializeToString())


def our_records(folder, batch_size):
    from tnt_jax.data import ImageFormat, training_images
    from tnt_jax.data.layout import RankSlice
    from tnt_jax.data.tf.records import image_records
    from tnt_jax.data.tf.tfdata import TfDataSource

    records = image_records(f"{folder}/train-*", shuffle_files=True)
    data = training_images(
        records, batch_size=batch_size, image_format=ImageFormat(scaling="mean_std")
    )
    source = TfDataSource(data, RankSlice(1))
    return lambda epoch: (batch.data for batch in source.batches(epoch))


def hand_written_records(folder, batch_size):
    import tensorflow as tf

    features = {
        "image/encoded": tf.io.FixedLenFeature([], tf.string),
        "image/class/label": tf.io.FixedLenFeature([], tf.int64),
    }

    def prepare(record):
        parsed = tf.io.parse_single_example(record, features)
        image = training_image(parsed["image/encoded"])
        return image, tf.cast(parsed["image/class/label"], tf.int32)

    files = tf.data.Dataset.list_files(f"{folder}/train-*", shuffle=True, seed=42)
    dataset = (
        files.interleave(tf.data.TFRecordDataset, cycle_length=4)
        .shuffle(1000, seed=42)
        .map(prepare, num_parallel_calls=tf.data.AUTOTUNE)
        .batch(batch_size)
        .prefetch(tf.data.AUTOTUNE)
    )
    return lambda epoch: dataset.as_numpy_iterator()


# ---- Arrays in memory ----


@cache
def arrays():
    """Returns images and labels like those of CIFAR."""
    import numpy as np

    rng = np.random.default_rng(0)
    x = rng.random((NUM_ARRAY_ROWS, 32, 32, 3), np.float32)
    return x, rng.integers(0, 10, NUM_ARRAY_ROWS).astype(np.int32)


class Rows:
    """The arrays, row by row."""

    def __len__(self):
        return NUM_ARRAY_ROWS

    def __getitem__(self, index):
        x, y = arrays()
        return x[index], y[index]


def our_arrays(folder, batch_size):
    from tnt_jax.data.layout import RankSlice
    from tnt_jax.data.sources import ArraySource

    options = {"global_batch_size": batch_size, "rank_slice": RankSlice(1), "shuffle": True}
    source = ArraySource(arrays(), **options)
    return lambda epoch: (batch.data for batch in source.batches(epoch))


def random_access_arrays(folder, batch_size):
    return random_access(Rows(), batch_size, num_workers=0)


def tf_arrays(folder, batch_size):
    import tensorflow as tf

    dataset = (
        tf.data.Dataset.from_tensor_slices(arrays())
        .shuffle(NUM_ARRAY_ROWS, seed=42)
        .batch(batch_size)
        .prefetch(tf.data.AUTOTUNE)
    )
    return lambda epoch: dataset.as_numpy_iterator()


def torch_arrays(folder, batch_size):
    import torch

    data = torch.utils.data.TensorDataset(*[torch.from_numpy(x) for x in arrays()])
    loader = torch.utils.data.DataLoader(data, batch_size, shuffle=True)
    return lambda epoch: ((x.numpy(), y.numpy()) for x, y in loader)


def grain_arrays(folder, batch_size):
    return grain_epochs(Rows(), batch_size, num_workers=0)


# ---- For several formats ----


def random_access(dataset, batch_size, num_workers):
    from tnt_jax.data import RandomAccess
    from tnt_jax.data.indexed.random_access import RandomAccessSource
    from tnt_jax.data.layout import RankSlice

    worker = "processes" if num_workers else "threads"
    data = RandomAccess(
        dataset, batch_size=batch_size, shuffle=True, num_workers=num_workers, worker=worker
    )
    source = RandomAccessSource(data, RankSlice(1))
    return lambda epoch: (batch.data for batch in source.batches(epoch))


def grain_epochs(dataset, batch_size, num_workers):
    import grain
    from absl import flags

    flags.FLAGS.mark_as_parsed()  # Grain's workers read flags of absl.

    def epoch(number):
        rows = grain.MapDataset.source(dataset).shuffle(seed=number).to_iter_dataset()
        batches = rows.batch(batch_size)
        if num_workers:
            batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=num_workers))
        return iter(batches)

    return epoch


CONTENDERS = {
    "JPEG": {
        "tnt_jax, tf.data": ours,
        "tnt_jax, RandomAccess": random_access_images,
        "tf.data, hand-written": hand_written,
        "PyTorch DataLoader": torch_loader,
        "Grain": grain_images,
    },
    "TFRecords": {"tnt_jax": our_records, "tf.data, hand-written": hand_written_records},
    "arrays": {
        "tnt_jax": our_arrays,
        "tnt_jax, RandomAccess": random_access_arrays,
        "tf.data": tf_arrays,
        "PyTorch DataLoader": torch_arrays,
        "Grain": grain_arrays,
    },
}
KINDS = tuple(CONTENDERS)
_NEEDS = {
    "tf.data": ("tensorflow",),
    "tf.data, hand-written": ("tensorflow",),
    "PyTorch DataLoader": ("torch",),
    "Grain": ("grain",),
}


def lacking(kind, name):
    """Returns what a contender lacks, in words, or ""."""
    needs = _NEEDS.get(name, ()) + (("PIL",) if kind == "JPEG" else ())
    missing = [library for library in needs if importlib.util.find_spec(library) is None]
    return f"{' and '.join(missing)} must be installed" if missing else ""


def make_up_images(folder, count=48):
    """Writes JPEG files of random colours, of two classes; returns their folder."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    images = Path(folder) / "images"
    for number in range(count):
        place = images / ("dress" if number % 2 else "hat")
        place.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (300, 250, 3), np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.jpg")
    return str(images)
