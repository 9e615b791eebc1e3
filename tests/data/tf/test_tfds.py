import numpy as np
import pytest

tfds = pytest.importorskip("tensorflow_datasets", reason="needs TensorFlow Datasets")
tf = pytest.importorskip("tensorflow", reason="needs TensorFlow")

from tnt_jax.data.indexed.random_access import RandomAccess, RandomAccessSource  # noqa: E402
from tnt_jax.data.layout import RankSlice  # noqa: E402
from tnt_jax.data.recipes import tfds as loading  # noqa: E402
from tnt_jax.data.tf.tfdata import TfData, TfDataSource  # noqa: E402


class Dots(tfds.core.GeneratorBasedBuilder):
    """Images of one grey level, which is the label: 23 of them in the split `train`."""

    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = tfds.features.FeaturesDict(
            {
                "image": tfds.features.Image(shape=(4, 4, 1)),
                "label": tfds.features.ClassLabel(num_classes=23),
            }
        )
        return tfds.core.DatasetInfo(
            builder=self, features=features, supervised_keys=("image", "label")
        )

    def _split_generators(self, dl_manager):
        return {"train": self._generate_examples()}

    def _generate_examples(self):
        for number in range(23):
            yield number, {"image": np.full((4, 4, 1), number, np.uint8), "label": number}


class Unreachable(Dots):
    """A dataset whose server does not answer."""

    def _split_generators(self, dl_manager):
        raise ConnectionError("no route to host")


def labels_of(batches):
    return [
        int(label)
        for batch in batches
        for label in (batch.data[1] if batch.mask is None else batch.data[1][batch.mask > 0])
    ]


def test_prepared_once_and_found_by_name_and_folder(tmp_path):
    first = loading.load("dots", data_dir=tmp_path)
    order = [int(label) for _, label in first]
    assert sorted(order) == list(range(23))
    folder = next(tmp_path.glob("dots/1.0.0"))
    for name, kwargs in (
        (folder, {}),
        ("dots", {"data_dir": tmp_path}),
        (Dots(data_dir=str(tmp_path)), {}),
    ):
        again = loading.load(name, "train[:50%]", download=False, **kwargs)
        assert [int(label) for _, label in again] == [
            label for label in order if label in order[:12]
        ][: again.cardinality()]


def test_decoding_runs_for_own_rows_only(tmp_path):
    make = lambda: loading.load("dots", data_dir=tmp_path).shuffle(30, seed=1).batch(8)  # noqa: E731
    whole = list(make().as_numpy_iterator())
    parts = [TfDataSource(TfData(make()), RankSlice(2, process)) for process in range(2)]
    assert "map(parse_and_decode)" in parts[0].distribution.after
    for pair, (images, labels) in zip(
        zip(*(p.batches(0) for p in parts), strict=True), whole, strict=True
    ):
        rows = [[x if b.mask is None else x[b.mask > 0] for x in b.data] for b in pair]
        np.testing.assert_array_equal(np.concatenate([r[1] for r in rows]), labels)
        np.testing.assert_array_equal(np.concatenate([r[0] for r in rows]), images)


def test_data_source_is_random_access(tmp_path):
    source = loading.load_data_source("dots", data_dir=tmp_path)
    spec = RandomAccess(
        source,
        batch_size=8,
        shuffle=True,
        transform=lambda example, _: (example["image"], example["label"]),
    )
    parts = [RandomAccessSource(spec, RankSlice(2, process)) for process in range(2)]
    batches = [batch for part in parts for batch in part.batches(0)]
    assert sorted(labels_of(batches)) == list(range(23))
    assert all((batch.data[0][:, 0, 0, 0] == batch.data[1]).all() for batch in batches)


def test_wrong_format_is_explained(tmp_path):
    loading.load("dots", data_dir=tmp_path)
    with pytest.raises(
        ValueError, match=r"stored as tfrecord, which cannot be read at random. Prepare it again"
    ):
        loading.load_data_source(next(tmp_path.glob("dots/1.0.0")))


def test_shares_of_processes_are_the_split(tmp_path, monkeypatch):
    loading.load("dots", data_dir=tmp_path)
    monkeypatch.setattr(loading.runtime, "get_process_count", lambda: 3)
    shares = []
    for process in range(3):
        monkeypatch.setattr(loading.runtime, "get_process_index", lambda p=process: p)
        shares.append(
            [
                int(label)
                for _, label in loading.load_own_share("dots", data_dir=tmp_path, download=False)
            ]
        )
    assert [len(share) for share in shares] == [8, 8, 7]
    assert sorted(label for share in shares for label in share) == list(range(23))


def test_missing_data_is_explained(tmp_path):
    with pytest.raises(
        FileNotFoundError,
        match=r"dots/1.0.0 is not in .*, and downloading is switched off. .*tfds build dots",
    ):
        loading.load("dots", data_dir=tmp_path, download=False)
    with pytest.raises(
        FileNotFoundError, match=r"preparing it failed \(ConnectionError: no route to host\)"
    ):
        loading.load("unreachable", data_dir=tmp_path)
    with pytest.raises(FileNotFoundError, match="There is no dataset 'dotz'"):
        loading.load("dotz", data_dir=tmp_path)
    with pytest.raises(ValueError, match="has the splits 'train', but not 'test\\[:3\\]'"):
        loading.load("dots", "test[:3]", data_dir=tmp_path)
