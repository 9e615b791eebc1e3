"""Image pipelines on real JPEG files, pixel by pixel against Pillow and NumPy."""

import io
import os
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest

tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")
Image = pytest.importorskip("PIL.Image", reason="needs Pillow")

from tnt_jax.data.layout import RankSlice  # noqa: E402
from tnt_jax.data.recipes import images  # noqa: E402
from tnt_jax.data.tf import records  # noqa: E402
from tnt_jax.data.tf.tfdata import TfDataSource  # noqa: E402

DATA = os.environ.get("TNT_JAX_DATA")
needs_data = pytest.mark.skipif(
    DATA is None, reason="needs TNT_JAX_DATA, the folder of small real datasets"
)


@pytest.fixture(scope="module")
def jpegs():
    """Twelve real photos: `(class name, bytes)`."""
    with tarfile.open(Path(DATA) / "clothing_small" / "clothing_test.tar") as archive:
        members = [member for member in archive if member.isfile()][::31]
        return [
            (member.name.split("/")[1], archive.extractfile(member).read()) for member in members
        ][:12]


@pytest.fixture
def folder(jpegs, tmp_path):
    for number, (name, content) in enumerate(jpegs):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / f"{number:02}.jpg").write_bytes(content)
    return tmp_path


@pytest.fixture
def record_files(jpegs, tmp_path):
    files = [str(tmp_path / f"train-{number}.tfrecord") for number in range(3)]
    for number, file in enumerate(files):
        with tf.io.TFRecordWriter(file) as writer:
            for index, (_, content) in enumerate(jpegs[number::3]):
                features = {
                    "image/encoded": tf.train.Feature(
                        bytes_list=tf.train.BytesList(value=[content])
                    ),
                    "image/class/label": tf.train.Feature(
                        int64_list=tf.train.Int64List(value=[10 * number + index + 1])
                    ),
                }
                writer.write(
                    tf.train.Example(
                        features=tf.train.Features(feature=features)
                    ).SerializeToString()
                )
    return files


def pillow_pixels(jpeg):
    return np.asarray(Image.open(io.BytesIO(jpeg)).convert("RGB"), np.float64)


def bilinear(pixels, height, width):
    """Resizes `[h, w, 3]` by interpolating between pixel centres, without antialiasing, in
    NumPy.
    """

    def axis(old, new):
        centre = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
        low = np.floor(centre).astype(int)
        return low, np.minimum(low + 1, old - 1), centre - low

    top, bottom, y = axis(pixels.shape[0], height)
    left, right, x = axis(pixels.shape[1], width)
    y, x = y[:, None, None], x[None, :, None]
    upper = pixels[top][:, left] * (1 - x) + pixels[top][:, right] * x
    lower = pixels[bottom][:, left] * (1 - x) + pixels[bottom][:, right] * x
    return upper * (1 - y) + lower * y


@needs_data
def test_central_crop_equals_pillow_and_numpy(jpegs):
    for _, jpeg in jpegs:
        pixels = pillow_pixels(jpeg)
        height, width = pixels.shape[:2]
        scale = 256 / min(height, width)
        new_height, new_width = round(height * scale), round(width * scale)
        whole = bilinear(pixels, new_height, new_width)
        top, left = (new_height - 224) // 2, (new_width - 224) // 2
        expected = whole[top : top + 224, left : left + 224]
        actual = images.central_crop(tf.constant(jpeg)).numpy()
        # The decoded bytes are equal; the interpolation is in float32.
        assert np.abs(actual - expected).max() < 0.01


@needs_data
def test_random_crop_equals_crop_of_the_whole_image(jpegs):
    """Decoding only the crop gives the pixels of the whole image at the place that the sampler
    chose.
    """
    flips = 0
    for number, (_, jpeg) in enumerate(jpegs):
        seed = tf.constant([number, 5], tf.int64)
        actual = images.random_crop_and_flip(tf.constant(jpeg), seed).numpy()
        start, extent, _ = tf.image.stateless_sample_distorted_bounding_box(
            tf.io.extract_jpeg_shape(jpeg),
            tf.zeros([0, 0, 4]),
            seed,
            0.1,
            (0.75, 4 / 3),
            (0.05, 1.0),
            100,
            True,
        )
        (top, left, _), (height, width, _) = start.numpy(), extent.numpy()
        pixels = pillow_pixels(jpeg)
        share = height * width / pixels[..., 0].size
        assert 0.04 < share <= 1
        assert 0.7 < width / height < 1.4 or share == 1
        crop = bilinear(pixels[top : top + height, left : left + width], 224, 224)
        difference, mirrored = (np.abs(actual - one).mean() for one in (crop, crop[:, ::-1]))
        # Next to the crop's edges chroma is upsampled without the neighbours outside; everywhere
        # else the pixels are equal.
        assert min(difference, mirrored) < 0.05
        inside = np.abs(actual - (crop if difference < mirrored else crop[:, ::-1]))[8:-8, 8:-8]
        assert np.quantile(inside, 0.99) < 0.01
        flips += mirrored < difference
    assert 0 < flips < len(jpegs)


def test_formats():
    image = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    means = np.array([123.68, 116.78, 103.94], np.float32)
    np.testing.assert_allclose(images.ImageFormat(2)(image), image - means)
    standard = (image / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(
        images.ImageFormat(2, scaling="mean_std")(image), standard, rtol=1e-5
    )
    first = images.ImageFormat(2, scaling="none", layout="channels_first")(image)
    np.testing.assert_array_equal(first, np.moveaxis(image, -1, 0))
    with pytest.raises(
        ValueError, match="scaling must be one of 'mean', 'mean_std', 'none', but is 'caffe'"
    ):
        images.ImageFormat(scaling="caffe")  # pyright: ignore[reportArgumentType]


def test_shift_and_flip_moves_every_pixel_alike():
    image = np.arange(1, 32 * 32 * 3 + 1, dtype=np.int32).reshape(32, 32, 3)
    padded = np.pad(image, [(4, 4), (4, 4), (0, 0)])
    seen = set()
    for number in range(80):
        result = images.shift_and_flip(
            tf.constant(image), tf.constant([number, 1], tf.int64)
        ).numpy()
        shifts = {
            (y, x, flip)
            for y in range(9)
            for x in range(9)
            for flip in (1, -1)
            if np.array_equal(result[:, ::flip], padded[y : y + 32, x : x + 32])
        }
        assert len(shifts) == 1
        seen |= shifts
    assert {y for y, _, _ in seen} == {x for _, x, _ in seen} == set(range(9))
    assert {flip for _, _, flip in seen} == {1, -1}


@needs_data
def test_pixels_do_not_depend_on_the_number_of_processes(folder):
    def stream(num_processes, epoch):
        data = images.training_images(
            images.image_folder(folder), batch_size=5, image_format=images.ImageFormat(32)
        )
        parts = [
            TfDataSource(data, RankSlice(num_processes, process))
            for process in range(num_processes)
        ]
        assert num_processes == 1 or "zip" in parts[0].distribution.before[-1]
        assert num_processes == 1 or parts[0].distribution.after[0] == "map(fast)"
        batches = zip(*(source.batches(epoch) for source in parts), strict=True)
        real = [
            [(b.data if b.mask is None else [x[b.mask > 0] for x in b.data]) for b in step]
            for step in batches
        ]
        return [np.concatenate([part[k] for step in real for part in step]) for k in range(2)]

    one = stream(1, 1)
    for num_processes in (2, 4):
        for actual, expected in zip(stream(num_processes, 1), one, strict=True):
            np.testing.assert_array_equal(actual, expected)
    assert not np.array_equal(stream(1, 0)[0], one[0])
    assert one[0].shape == (12, 32, 32, 3)


@needs_data
def test_folder_reads_classes_in_order(folder, jpegs):
    rows = list(images.image_folder(folder).as_numpy_iterator())
    names = sorted({name for name, _ in jpegs})
    assert [names[row["label"]] for row in rows] == sorted(name for name, _ in jpegs)
    chosen = list(images.image_folder(folder, classes=names[1:2]).as_numpy_iterator())
    assert {row["label"] for row in chosen} == {0}


@needs_data
def test_records_give_the_images_in_one_order(record_files, jpegs):
    data = images.evaluation_images(
        records.image_records(record_files, label_offset=-1), batch_size=4
    )
    (source,) = [TfDataSource(data, RankSlice(1))]
    labels = np.concatenate([b.data[1] for b in source.batches(0)])
    np.testing.assert_array_equal(labels, [0, 10, 20, 1, 11, 21, 2, 12, 22, 3, 13, 23])
    first = next(source.batches(0)).data[0][0]
    np.testing.assert_array_equal(
        first, images.ImageFormat()(images.central_crop(tf.constant(jpegs[0][1])))
    )
    shuffled = records.image_records(record_files, shuffle_files=True)
    assert sorted(row["name"].decode() for row in shuffled.as_numpy_iterator())[0].endswith(
        "train-0.tfrecord, record 0"
    )


# ---- What cannot be read ----


@needs_data
@pytest.mark.parametrize("make", [images.training_images, images.evaluation_images])
def test_corrupt_jpeg_is_named(folder, make):
    victim = sorted(folder.glob("*/*.jpg"))[7]
    victim.write_bytes(victim.read_bytes()[:700])
    sources = [
        TfDataSource(make(images.image_folder(folder), batch_size=4), RankSlice(2, process))
        for process in range(2)
    ]
    errors = []
    for source in sources:
        try:
            list(source.batches(0))
        except ValueError as error:
            errors.append(str(error))
    assert errors == [f"{victim} cannot be read as a JPEG image."]


@needs_data
def test_corrupt_jpeg_is_skipped_and_counted(folder, caplog):
    for victim in sorted(folder.glob("*/*.jpg"))[2:8:5]:
        victim.write_bytes(b"no image")
    data = images.evaluation_images(images.image_folder(folder), batch_size=4, on_error="skip")
    sources = [TfDataSource(data, RankSlice(2, process)) for process in range(2)]
    with caplog.at_level("WARNING", logger="tnt_jax"):
        batches = [batch for source in sources for batch in source.batches(0)]
    assert sum(source.num_skipped for source in sources) == 2
    assert sum(int(batch.mask.sum()) for batch in batches) == 10
    assert "Skipped 1 records that cannot be read (1 on this process so far)." in caplog.text
    assert all(np.isfinite(batch.data[0]).all() for batch in batches)


@needs_data
def test_truncated_record_file_is_named(record_files):
    path = Path(record_files[1])
    path.write_bytes(path.read_bytes()[:-5000])
    data = images.evaluation_images(records.image_records(record_files), batch_size=4)
    expected = r"train-1\.tfrecord, record 3 cannot be read: the file is truncated or corrupt \(.*\)\. Copy the file again"
    with pytest.raises(ValueError, match=expected):
        list(TfDataSource(data, RankSlice(1)).batches(0))
    with pytest.raises(ValueError, match=expected):
        records.check_records(record_files)
    skipping = images.evaluation_images(
        records.image_records(record_files, on_error="skip"), batch_size=4
    )
    assert sum(batch.num_rows for batch in TfDataSource(skipping, RankSlice(1)).batches(0)) == 11


@needs_data
def test_processes_that_would_skip_differently_are_told(record_files):
    skipping, strict = (
        images.evaluation_images(
            records.image_records(record_files, on_error=choice), batch_size=4
        ).dataset
        for choice in ("skip", "raise")
    )
    assert (records.ignores_errors(skipping), records.ignores_errors(strict)) == (
        True,
        False,
    )
    whole = records.file_sizes(skipping)
    assert whole == {file: Path(file).stat().st_size for file in record_files}
    Path(record_files[1]).write_bytes(Path(record_files[1]).read_bytes()[:-5000])
    records.require_same_sizes([whole, whole])
    message = f"{record_files[1]} has {whole[record_files[1]]} bytes on process 0 and"
    with pytest.raises(ValueError, match=re.escape(message)):
        records.require_same_sizes([whole, records.file_sizes(skipping)])


def test_missing_places_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        images.image_folder(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="holds no JPEG files in class folders"):
        images.image_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match="for the class 'cat'"):
        images.image_folder(tmp_path, classes=["cat"])
    with pytest.raises(FileNotFoundError, match="No file matches"):
        records.image_records(tmp_path / "train-*")
    with pytest.raises(FileNotFoundError, match=r"a\.tfrecord does not exist"):
        records.image_records([tmp_path / "a.tfrecord"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every folder")
def test_unreadable_folder_is_named(tmp_path):
    (tmp_path / "cat").mkdir(mode=0)
    with pytest.raises(PermissionError, match="cat"):
        images.image_folder(tmp_path)


@needs_data
@pytest.mark.parametrize("make", [images.training_images, images.evaluation_images])
def test_the_end_of_an_epoch_does_not_wait_for_the_tuner_of_tensorflow(folder, make):
    source = TfDataSource(make(images.image_folder(folder), batch_size=4), RankSlice(1))
    assert source._stream.options().autotune.enabled is False
