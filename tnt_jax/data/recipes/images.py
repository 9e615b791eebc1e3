"""JPEG images: sources and the preprocessing of ImageNet and CIFAR, as `tf.data` pipelines.

`fit` splits these pipelines early:

    train = training_images(image_folder("imagenet/train"), batch_size=256)
    records = image_records("imagenet/validation-*", label_offset=-1)
    model.fit(train, validation_data=evaluation_images(records, batch_size=256))

All random choices are stateless, with a number per example and epoch, so that the pixels do not
depend on the number of processes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from tnt_jax.cluster.devices import count_cores
from tnt_jax.data.arguments import check_choice
from tnt_jax.data.elements import OnError
from tnt_jax.data.tf.tfdata import TfData

Scaling = Literal["mean", "mean_std", "none"]
Layout = Literal["channels_last", "channels_first"]
# Batches that are put together at a time: each copies some GB/s, and all are held in memory.
_MOST_BATCHES = 4

# With this inverse transform TensorFlow decodes to the same bits as Pillow; it takes no longer than
# the approximate default.
_TRANSFORM = "INTEGER_ACCURATE"
# Means and deviations of ImageNet's channels, red first: of pixels from 0 to 255 as VGG subtracts
# them (Simonyan and Zisserman 2014, arXiv:1409.1556, section 2.1), and of pixels from 0 to 1 as
# torchvision's reference training uses them.
MEANS = (123.68, 116.78, 103.94)
UNIT_MEANS = (0.485, 0.456, 0.406)
UNIT_DEVIATIONS = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class ImageFormat:
    """Format of a preprocessed image.

    Attributes:
        size: Height and width.
        scaling: `"mean"` subtracts `MEANS` from pixels from 0 to 255; `"mean_std"` standardizes
            pixels from 0 to 1; `"none"` does nothing.
        layout: `"channels_last"` is `[size, size, 3]`, `"channels_first"` is `[3, size, size]`.
    """

    size: int = 224
    scaling: Scaling = "mean"
    layout: Layout = "channels_last"

    def __post_init__(self) -> None:
        check_choice("scaling", self.scaling, ("mean", "mean_std", "none"))
        check_choice("layout", self.layout, ("channels_last", "channels_first"))

    def __call__(self, image: Any) -> Any:
        """Returns float32 pixels in this format.

        The image is `[size, size, 3]` with values from 0 to 255.
        """
        image = tf.cast(image, tf.float32)
        if self.scaling == "mean":
            image -= MEANS
        elif self.scaling == "mean_std":
            image = (image / 255.0 - UNIT_MEANS) / UNIT_DEVIATIONS
        return tf.transpose(image, [2, 0, 1]) if self.layout == "channels_first" else image


def training_images(
    records: Any,
    *,
    batch_size: int,
    image_format: ImageFormat | None = None,
    shuffle_buffer: int = 4096,
    seed: int = 42,
    drop_remainder: bool = False,
    on_error: OnError = "raise",
) -> TfData:
    """Returns shuffled batches of randomly cropped and flipped images.

    A batch is `(float32 [batch, ...], int32 [batch])`.

    Args:
        records: Dataset of dictionaries with `label`, `jpeg` (bytes) and `name`, from
            `image_folder`, `image_records` or made by the user. Without `jpeg` the name is that of
            a JPEG file, which the process that needs it reads.
        batch_size: Rows of the global batch.
        image_format: Size, scaling and layout.
        shuffle_buffer: Records among which the next one is drawn; records are small, because they
            are not decoded yet.
        seed: Seed of the order and of the augmentation.
        drop_remainder: Whether an incomplete last batch is dropped.
        on_error: `"raise"` ends the run at an image that cannot be decoded, naming it; `"skip"`
            masks, warns and counts.
    """
    finish = image_format or ImageFormat()
    numbers = tf.data.Dataset.random(seed, rerandomize_each_iteration=True)
    shuffled = tf.data.Dataset.zip((records.shuffle(shuffle_buffer, seed), numbers))

    def prepare(record: Any, number: Any) -> Any:
        seed = tf.stack([number, tf.constant(0, tf.int64)])
        return finish(random_crop_and_flip(_jpeg_of(record), seed, size=finish.size))

    return _batches(shuffled, prepare, finish, batch_size, drop_remainder, on_error)


def evaluation_images(
    records: Any,
    *,
    batch_size: int,
    image_format: ImageFormat | None = None,
    drop_remainder: bool = False,
    on_error: OnError = "raise",
) -> TfData:
    """Returns batches of central crops in the order of the records.

    The arguments are those of `training_images`.
    """
    finish = image_format or ImageFormat()
    short_side = finish.size * 256 // 224

    def prepare(record: Any, number: Any) -> Any:
        del number
        return finish(central_crop(_jpeg_of(record), size=finish.size, short_side=short_side))

    numbered = tf.data.Dataset.zip((records, tf.data.Dataset.counter()))
    return _batches(numbered, prepare, finish, batch_size, drop_remainder, on_error)


def random_crop_and_flip(jpeg: Any, seed: Any, *, size: int = 224) -> Any:
    """Decodes a random part of a JPEG, flips it half of the time and resizes it: `[size, size, 3]`.

    The part covers 5 to 100 % of the image with an aspect ratio from 3:4 to 4:3 and at least 10 %
    of its area; without such a part in 100 attempts it is the whole image (Szegedy et al. 2014,
    arXiv:1409.4842, section 6). Only the part is decoded. Pixels are float32, from 0 to 255; the
    same seed, int64 `[2]`, gives the same ones.
    """
    start, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.io.extract_jpeg_shape(jpeg),
        bounding_boxes=tf.constant([0.0, 0.0, 1.0, 1.0], shape=[1, 1, 4]),
        seed=seed,
        min_object_covered=0.1,
        aspect_ratio_range=(0.75, 4 / 3),
        area_range=(0.05, 1.0),
        max_attempts=100,
        use_image_if_no_bounding_boxes=True,
    )
    crop = tf.concat([start[:2], extent[:2]], axis=0)
    image = tf.io.decode_and_crop_jpeg(jpeg, crop, channels=3, dct_method=_TRANSFORM)
    image = tf.image.stateless_random_flip_left_right(image, seed + 1)
    return tf.ensure_shape(tf.image.resize(image, [size, size]), [size, size, 3])


def central_crop(jpeg: Any, *, size: int = 224, short_side: int = 256) -> Any:
    """Returns the centre of a JPEG whose shorter side is `short_side`: float32, 0 to 255."""
    if short_side < size:
        raise ValueError(f"short_side ({short_side}) must be at least size ({size}).")
    image = tf.io.decode_jpeg(jpeg, channels=3, dct_method=_TRANSFORM)
    shape = tf.cast(tf.shape(image)[:2], tf.float32)
    new = tf.cast(tf.round(shape * (short_side / tf.reduce_min(shape))), tf.int32)
    offset = (new - size) // 2
    image = tf.slice(tf.image.resize(image, new), [offset[0], offset[1], 0], [size, size, 3])
    return tf.ensure_shape(image, [size, size, 3])


def shift_and_flip(image: Any, seed: Any, *, padding: int = 4) -> Any:
    """Shifts an image by up to `padding` pixels each way and flips it half of the time.

    Empty pixels are zeros. This is the augmentation of CIFAR in He et al. 2015, arXiv:1512.03385,
    section 4.2.

    Args:
        image: `[height, width, channels]` of any type.
        seed: int64 `[2]`; the same seed gives the same pixels.
        padding: Largest shift in pixels.

    Returns:
        An image of the same shape and type.
    """
    padded = tf.pad(image, [[padding, padding], [padding, padding], [0, 0]])
    shifted = tf.image.stateless_random_crop(padded, tf.shape(image), seed)
    flipped = tf.image.stateless_random_flip_left_right(shifted, seed + 1)
    return tf.ensure_shape(flipped, image.shape)


def image_folder(path: str | Path, *, classes: list[str] | None = None) -> Any:
    """Returns `{"name": file, "label": label}` for each JPEG file in a folder of class folders.

    Files are read later, by the process that needs them. Files are in order of class and name;
    labels count the classes in order.

    Args:
        path: The folder.
        classes: Names of the class folders in the order of their labels; all folders, sorted, by
            default.

    Raises:
        FileNotFoundError: If the folder, a class or any JPEG file is missing.
        PermissionError: If a folder cannot be listed.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder} is not a folder. Pass the folder that contains one folder of JPEG files per "
            "class."
        )
    if classes is None:
        classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    files = [_jpeg_files(folder / name) for name in classes]
    if not any(files):
        raise FileNotFoundError(
            f"{folder} holds no JPEG files in class folders (found {len(classes)} folders)."
        )
    labels = np.repeat(np.arange(len(files), dtype=np.int32), list(map(len, files)))
    images = {"name": list(chain.from_iterable(files)), "label": labels}
    return tf.data.Dataset.from_tensor_slices(images)  # pyright: ignore[reportArgumentType]


def _jpeg_files(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder} for the class {folder.name!r}.")
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in (".jpg", ".jpeg"))
    return list(map(str, files))


def _jpeg_of(record: Any) -> Any:
    """Returns the JPEG's bytes of a record, which holds them or names their file."""
    return record["jpeg"] if "jpeg" in record else tf.io.read_file(record["name"])


def _batches(
    numbered: Any,
    prepare: Callable[[Any, Any], Any],
    finish: ImageFormat,
    batch_size: int,
    drop_remainder: bool,
    on_error: OnError,
) -> TfData:
    check_choice("on_error", on_error, ("raise", "skip"))

    size = [finish.size, finish.size]
    shape = [3, *size] if finish.layout == "channels_first" else [*size, 3]

    def or_blank(record: Any, number: Any) -> Any:
        """Returns `(True, image)`, or `(False, zeros)` for an image that cannot be prepared."""
        one = tf.data.Dataset.from_tensors((record, number))
        image = one.map(lambda record, number: (True, prepare(record, number))).ignore_errors()
        blank = tf.data.Dataset.from_tensors((False, tf.zeros(shape)))
        return image.concatenate(blank).take(1).get_single_element()

    def fast(record: Any, number: Any) -> Any:
        return prepare(record, number), record["label"]

    def flagged(record: Any, number: Any) -> Any:
        is_good, image = or_blank(record, number)
        return is_good, (image, record["label"])

    def named(record: Any, number: Any) -> Any:
        is_good, image = or_blank(record, number)
        text = tf.strings.join([record["name"], " cannot be read as a JPEG image."])
        with tf.control_dependencies([tf.debugging.Assert(is_good, [text])]):
            return tf.identity(image), record["label"]

    # Not by TensorFlow's tuner: the end of an epoch may wait for it, for half a second. Without it,
    # AUTOTUNE would stand for 16 calls at most.
    num_calls = count_cores()
    options = tf.data.Options()
    options.autotune.enabled = False

    def batched(function: Callable[..., Any]) -> Any:
        return (
            numbered.map(function, num_parallel_calls=num_calls)
            .batch(batch_size, drop_remainder, min(num_calls, _MOST_BATCHES))
            .prefetch(2)
            .with_options(options)
        )

    if on_error == "skip":
        return TfData(batched(flagged), has_flags=True)
    return TfData(batched(fast), named=batched(named))
