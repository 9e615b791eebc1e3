"""Tables of Hugging Face, Arrow, Parquet and WebDataset give the rows that their own libraries read,
and each process reads its own alone.
"""

import io
import os
import pickle
import tarfile

import grain
import jax
import numpy as np
import pytest
from crashes import Crash, CrashAt
from flax import nnx

import tnt_jax as tnt
from tnt_jax.data.dispatch import as_source
from tnt_jax.data.indexed.grain import rows_of_batched
from tnt_jax.data.indexed.random_access import RandomAccess, RandomAccessSource
from tnt_jax.data.layout import RankSlice, ReadOptions
from tnt_jax.data.sources import IterableSource
from tnt_jax.data.tables import tar_shards as tar_shards_module

datasets = pytest.importorskip("datasets", reason="needs Hugging Face's datasets")
webdataset = pytest.importorskip("webdataset", reason="needs webdataset")
pa = pytest.importorskip("pyarrow")
from pyarrow import feather, parquet  # noqa: E402

NUM_ROWS = 29
X = np.arange(NUM_ROWS * 3, dtype=np.float32).reshape(NUM_ROWS, 3)
Y = np.arange(NUM_ROWS) % 4
COLUMNS = {"x": X, "y": Y, "other": [f"text {n}" for n in range(NUM_ROWS)]}


def write_files(folder, kind, sizes=(10, 0, 12, 7)):
    """Writes files of several lengths, of which one is empty."""
    table = pa.table({"x": list(X), "y": Y, "other": COLUMNS["other"]})
    start = 0
    for number, size in enumerate(sizes):
        part = table.slice(start, size)
        start += size
        if kind == "parquet":
            parquet.write_table(part, folder / f"{number}.parquet", row_group_size=4)
        else:
            feather.write_feather(part, folder / f"{number}.arrow", compression="uncompressed")
    assert start == NUM_ROWS
    return folder


def write_shards(folder, sizes=(10, 12, 7)):
    start, paths = 0, []
    for number, size in enumerate(sizes):
        paths.append(str(folder / f"{number}.tar"))
        with webdataset.TarWriter(paths[-1]) as writer:
            for row in range(start, start + size):
                sample = {"__key__": f"a/{row:04}", "x.npy": X[row], "cls": int(Y[row])}
                writer.write({**sample, "txt": COLUMNS["other"][row]})
        start += size
    return paths


def make(kind, folder):
    names = {"inputs": "x", "targets": "y"}
    if kind == "hugging face":
        return tnt.data.columns(datasets.Dataset.from_dict(COLUMNS), **names)
    if kind == "dicts":
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)]
        return tnt.data.columns(rows, **names)
    if kind == "tar":
        return tnt.data.tar_shards(write_shards(folder), inputs="x.npy", targets="cls")
    return tnt.data.arrow_files(write_files(folder, kind), format=kind, **names)


KINDS = ["hugging face", "dicts", "tar", "parquet", "arrow"]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_table_in_any_order(kind, tmp_path):
    rows = make(kind, tmp_path)
    assert len(rows) == NUM_ROWS
    order = np.random.default_rng(0).permutation(NUM_ROWS).tolist()
    # Worker processes get a copy.
    for table in (rows, pickle.loads(pickle.dumps(rows))):
        for index, (x, y) in zip(order, table.__getitems__(order), strict=True):
            np.testing.assert_array_equal(x, X[index])
            assert y == Y[index]
    np.testing.assert_array_equal(rows[28][0], X[28])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_processes", [1, 2, 4])
def test_processes_together_give_each_row_once(kind, num_processes, tmp_path):
    spec = RandomAccess(make(kind, tmp_path), batch_size=8, shuffle=True, seed=1)
    sources = [
        RandomAccessSource(spec, RankSlice(4, p * 4 // num_processes, 4 // num_processes))
        for p in range(num_processes)
    ]
    seen = []
    for parts in zip(*(source.batches(epoch=2) for source in sources), strict=True):
        for part in parts:
            is_real = np.ones(len(part.data[1]), bool) if part.mask is None else part.mask > 0
            seen += part.data[0][is_real, 0].tolist()
    assert sorted(seen) == X[:, 0].tolist()


def test_samples_are_those_that_webdataset_reads(tmp_path):
    paths = write_shards(tmp_path)
    rows = tnt.data.tar_shards(paths, inputs=("x.npy", "txt"), targets="cls")
    truth = list(webdataset.WebDataset(paths, shardshuffle=False, empty_check=False).decode())
    assert len(rows) == len(truth) == NUM_ROWS
    for (inputs, target), sample in zip(map(rows.__getitem__, range(NUM_ROWS)), truth, strict=True):
        np.testing.assert_array_equal(inputs[0], sample["x.npy"])
        assert (inputs[1], target) == (sample["txt"], sample["cls"])


def test_a_process_reads_the_files_of_its_own_samples_alone(tmp_path, monkeypatch):
    rows = tnt.data.tar_shards(write_shards(tmp_path), inputs="x.npy", targets="cls")
    reads = []
    pread = os.pread
    monkeypatch.setattr(
        tar_shards_module.os, "pread", lambda *where: reads.append(where) or pread(*where)
    )
    source = RandomAccessSource(RandomAccess(rows, batch_size=8), RankSlice(4, 1, 1))
    # Two of the eight rows of each batch, and of the last five the third and fourth.
    assert len(list(source.batches(0))) == 4
    assert len(reads) == 2 * (2 + 2 + 2 + 2)


def test_images_of_shards_are_arrays_and_pickles_are_refused(tmp_path):
    from PIL import Image

    picture = np.random.default_rng(0).integers(0, 255, (4, 5, 3)).astype(np.uint8)
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        png = io.BytesIO()
        Image.fromarray(picture).save(png, "png")
        for name, data in (("1.png", png.getvalue()), ("1.pyd", b"code")):
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    image = tnt.data.tar_shards([tmp_path / "a.tar"], inputs="png")
    np.testing.assert_array_equal(image[0][0], picture)
    with pytest.raises(ValueError, match="'pyd', for which there is no decoder"):
        tnt.data.tar_shards([tmp_path / "a.tar"], inputs="pyd")[0]
    size = tnt.data.tar_shards([tmp_path / "a.tar"], inputs="pyd", decoders={"pyd": len})
    assert size[0] == (4,)


def test_shards_that_cannot_be_read_are_named(tmp_path):
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz"):
        pass
    with pytest.raises(ValueError, match=r"a\.tar\.gz is no uncompressed tar file"):
        tnt.data.tar_shards([tmp_path / "a.tar.gz"])
    with pytest.raises(ValueError, match="There is no shard"):
        tnt.data.tar_shards([])
    (path, *_) = write_shards(tmp_path)
    rows = tnt.data.tar_shards([path], inputs="x.npy", targets="cls")
    os.truncate(path, 1000)
    with pytest.raises(EOFError, match=r"0\.tar ends within the file"):
        rows[9]


def write_tar(path, *files):
    """Writes an archive of files of 600 bytes each, of which a head and two blocks are stored."""
    with tarfile.open(path, "w") as archive:
        for name in files:
            member = tarfile.TarInfo(name)
            member.size = 600
            archive.addfile(member, io.BytesIO(b"1" * 600))
    return path


def damaged(path, at, data):
    """Overwrites the head of a file at a byte, with its checksum; without data the file ends there."""
    raw = bytearray(path.read_bytes())
    if data is None:
        raw = raw[:at]
    else:
        head = at // 512 * 512
        raw[at : at + len(data)] = data
        raw[head + 148 : head + 156] = b" " * 8
        raw[head + 148 : head + 156] = b"%06o\0 " % sum(raw[head : head + 512])
    path.write_bytes(raw)


@pytest.mark.parametrize(
    ("at", "data"),
    [
        (1536 + 1000, None),
        (1536 + 200, None),
        (1536, None),
        (3072, None),
        (1536 + 124, b"77777777777\0"),
        (124, b"\xff" * 12),
        (124, b"\x80" + b"\x7f" * 11),
        (1536 + 156, b"S"),
        (1536, b"a.txt\0"),
        (0, b""),
    ],
    ids="in a file,in a head,between files,no end,too large,negative,enormous,sparse,twice,"
    "whole".split(","),
)
def test_no_sample_of_a_damaged_shard_is_lost_in_silence(at, data, tmp_path):
    path = write_tar(tmp_path / "a.tar", "a.txt", "b.txt")
    damaged(path, at, data)
    if data == b"":
        assert len(tnt.data.tar_shards(path, inputs="txt")) == 2
        return
    with pytest.raises(ValueError, match=r"a\.tar is no uncompressed tar file, or is damaged: "):
        tnt.data.tar_shards(path, inputs="txt")


def test_names_of_files_in_shards_lead_nowhere(tmp_path):
    path = write_tar(tmp_path / "a.tar", "../../a.txt", "/etc/passwd.txt")
    rows = tnt.data.tar_shards(path, inputs="txt")
    assert [row[0] for row in rows] == ["1" * 600] * 2
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_counted_from_the_end_as_in_a_list(kind, tmp_path):
    rows = make(kind, tmp_path)
    for index in (-1, -NUM_ROWS):
        np.testing.assert_array_equal(rows[index][0], X[index])
    for index in (NUM_ROWS, -NUM_ROWS - 1):
        with pytest.raises(IndexError, match=f"There is no row {index}: there are 29 rows"):
            rows[index]


def test_a_row_without_a_column_is_named(tmp_path):
    path = write_tar(tmp_path / "a.tar", "a.txt", "a.id", "b.txt")
    rows = tnt.data.tar_shards(path, inputs="txt", targets="id", decoders={"id": len})
    assert rows[0][1] == 600
    with pytest.raises(ValueError, match="targets names the column 'id'") as caught:
        rows[1]
    assert caught.value.__notes__ == ["This happened in row 1."]
    parquet.write_table(pa.table({"x": [1.0], "y": [2]}), tmp_path / "0.parquet")
    parquet.write_table(pa.table({"x": [1.0]}), tmp_path / "1.parquet")
    paths = [str(tmp_path / f"{n}.parquet") for n in (0, 1)]
    with pytest.raises(pa.ArrowInvalid, match=r"FieldRef\.Name\(y\)") as caught:
        tnt.data.arrow_files(paths, inputs="x", targets="y")[1]
    assert caught.value.__notes__ == [f"This happened in {paths[1]}."]


def test_tables_without_rows_are_refused(tmp_path):
    (tmp_path / "none").mkdir()
    for paths in ([], tmp_path / "none"):
        with pytest.raises(ValueError, match="needs one file at least"):
            tnt.data.arrow_files(paths, inputs="x")
    parquet.write_table(pa.table({"x": X[:0, 0], "y": Y[:0]}), tmp_path / "0.parquet")
    rows = tnt.data.arrow_files(tmp_path / "0.parquet", inputs="x", targets="y")
    assert len(rows) == 0
    with pytest.raises(ValueError, match="The dataset is empty"):
        as_source(rows, None, None, ReadOptions(RankSlice(1)))


def test_a_column_that_is_not_there_is_named(tmp_path):
    table = datasets.Dataset.from_dict(COLUMNS)
    for make_rows in (
        lambda: tnt.data.columns(table, inputs="z"),
        lambda: tnt.data.arrow_files(write_files(tmp_path, "parquet"), inputs="z"),
        lambda: tnt.data.stream_columns(table.to_iterable_dataset(), 4, inputs="z"),
    ):
        with pytest.raises(
            ValueError, match="inputs names the column 'z', but the columns are 'x'"
        ):
            make_rows()
    with pytest.raises(ValueError, match="which of the columns"):
        tnt.data.columns(table.rename_columns({"x": "a", "y": "b"}))[0]


def test_streams_are_not_taken_for_tables_nor_for_batches():
    stream = datasets.Dataset.from_dict(COLUMNS).to_iterable_dataset()
    with pytest.raises(TypeError, match="stream_columns"):
        tnt.data.columns(stream)
    with pytest.raises(TypeError, match=r"takes a datasets\.IterableDataset, but got a list"):
        tnt.data.stream_columns([], 4)
    with pytest.raises(TypeError, match=r"gives rows, not batches: pass tnt_jax\.data\.stream_col"):
        as_source(stream, None, None, ReadOptions(RankSlice(1)))


@pytest.mark.parametrize("distribute", [True, False])
def test_a_shuffled_stream_has_an_order_of_its_own_in_each_epoch(distribute, use_ranks):
    use_ranks(1)
    stream = datasets.Dataset.from_dict(COLUMNS).to_iterable_dataset(num_shards=3)
    shuffled = stream.shuffle(seed=3, buffer_size=5)
    source = as_source(
        tnt.data.stream_columns(shuffled, 8, inputs="x", targets="y"),
        None,
        None,
        ReadOptions(RankSlice(1), distribute=distribute),
    )
    for epoch in (0, 1, 0):
        shuffled.set_epoch(epoch)
        expected = [row["x"][0] for row in shuffled]
        batches = source.batches(epoch)
        found = [x for batch in batches for x in batch.data[0][: batch.num_rows, 0]]
        np.testing.assert_array_equal(found, expected)
        batches = source.batches(epoch, 2)
        rest = [x for batch in batches for x in batch.data[0][: batch.num_rows, 0]]
        np.testing.assert_array_equal(rest, expected[16:])


def test_the_epoch_that_a_loader_of_the_user_was_given_stays():
    class Loader:
        epoch = 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            yield np.full((4, 1), self.epoch, np.float32)

    loader = Loader()
    source = as_source(loader, None, None, ReadOptions(RankSlice(1)))
    loader.set_epoch(7)
    (batch,) = source.batches(0)
    np.testing.assert_array_equal(batch.data, np.full((4, 1), 7))


class Counted:
    """A data source that counts what is read."""

    def __init__(self):
        self.read = []

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        self.read.append(int(index))
        return X[index], Y[index]


def batched(source, how):
    rows = grain.MapDataset.source(source)
    if how == "map":
        return rows.batch(8)
    return rows.to_iter_dataset(grain.ReadOptions(num_threads=2)).batch(8)


@pytest.mark.parametrize("how", ["map", "iter"])
def test_a_process_prepares_its_own_rows_of_a_batched_grain_dataset(how):
    source = Counted()
    own = as_source(batched(source, how), None, None, ReadOptions(RankSlice(4, 1, 1)))
    found = [batch.data[0][:, 0] for batch in own.batches(0)]
    np.testing.assert_array_equal(np.concatenate(found), X[[2, 3, 10, 11, 18, 19, 26, 27], 0])
    assert sorted(set(source.read)) == [2, 3, 10, 11, 18, 19, 26, 27]
    # A resumed run reads nothing of what is done.
    source.read.clear()
    list(own.batches(0, 2))
    assert sorted(set(source.read)) == [18, 19, 26, 27]


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows.filter(lambda row: row[1] > 0).to_iter_dataset().batch(8),
        lambda rows: rows.batch(8).map(lambda batch: batch),
        lambda rows: rows.repeat().batch(8),
        lambda rows: rows.batch(
            8, batch_fn=lambda rows: tuple(map(np.stack, zip(*rows, strict=True)))
        ),
    ],
    ids=["filter", "map behind", "endless", "own function"],
)
def test_other_grain_datasets_give_the_batches_that_they_make(change):
    dataset = change(grain.MapDataset.source(Counted()))
    source = as_source(dataset, None, None, ReadOptions(RankSlice(1)))
    truth = iter(dataset)
    for batch, _ in zip(source.batches(0), range(3), strict=False):
        np.testing.assert_array_equal(batch.data[0], next(truth)[0])


def make_batch(rows):
    """A function of the user that has the name of Grain's own."""
    return tuple(np.stack(column)[::-1] for column in zip(*rows, strict=True))


def flat_mapped(rows):
    class Twice(grain.experimental.FlatMapTransform):
        max_fan_out = 2

        def flat_map(self, row):
            return [row] * (1 + int(row[1] > 0))

    return grain.experimental.FlatMapMapDataset(rows, Twice()).to_iter_dataset().batch(8)


def noisy(row, generator):
    return row[0] + generator.normal(size=3).astype(np.float32), row[1]


GRAIN = {
    "plain": lambda rows: rows.batch(8),
    "dropped": lambda rows: rows.batch(8, drop_remainder=True),
    "shuffled": lambda rows: rows.seed(3).shuffle().random_map(noisy).repeat(2).batch(8),
    "windows": lambda rows: (
        grain.experimental.WindowShuffleMapDataset(rows, window_size=5, seed=3)[3:]
        .to_iter_dataset()
        .batch(8)
    ),
    "mixed": lambda rows: grain.MapDataset.mix([rows[:9], rows.shuffle(seed=1)], [1, 2]).batch(8),
    "lists": lambda rows: rows.map(lambda row: ([row[0], -row[0]], {"y": [row[1]]})).batch(8),
    "own make_batch": lambda rows: rows.batch(8, batch_fn=make_batch),
    "flat map": flat_mapped,
}


@pytest.mark.parametrize("kind", GRAIN)
def test_rows_of_a_grain_dataset_are_those_of_its_batches(kind):
    dataset = GRAIN[kind](grain.MapDataset.source(Counted()))
    for epoch, start in ((0, 0), (1, 2)):
        for number in range(2):
            part = RankSlice(2, number, 1)
            own = as_source(dataset, None, None, ReadOptions(part)).batches(epoch, start)
            whole = IterableSource(dataset, rank_slice=part).batches(epoch, start)
            for mine, theirs in zip(own, whole, strict=True):
                assert mine.num_rows == theirs.num_rows
                pairs = zip(
                    jax.tree.leaves((mine.data, mine.mask)),
                    jax.tree.leaves((theirs.data, theirs.mask)),
                    strict=True,
                )
                for a, b in pairs:
                    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "name", ["_batch_size", "_drop_remainder", "_batch_fn", "_parents", "class", "class of rows"]
)
def test_where_private_names_of_grain_are_others_whole_batches_are_read(name, monkeypatch):
    dataset = batched(Counted(), "map")
    assert rows_of_batched(dataset) is not None
    if name.startswith("class"):
        changed = dataset if name == "class" else dataset.parents[0]
        kind = type(changed)
        changed.__class__ = type("Other", (kind,), {"__module__": kind.__module__})
    elif name == "_parents":
        monkeypatch.setattr(dataset, name, ())
    else:
        monkeypatch.delattr(dataset, name)
    assert rows_of_batched(dataset) is None


def test_a_row_of_grain_that_is_none_is_named():
    rows = grain.MapDataset.source(Counted()).map(lambda row: row if row[1] else None)
    source = as_source(rows.to_iter_dataset().batch(8), None, None, ReadOptions(RankSlice(1)))
    with pytest.raises(ValueError, match="A row of the Grain dataset is None"):
        list(source.batches(0))


class Line(nnx.Module):
    def __init__(self):
        self.line = nnx.Linear(3, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.line(x / 100)


def data_of(kind, folder):
    if kind == "grain":
        return {"x": batched(Counted(), "iter")}
    if kind == "stream":
        stream = datasets.Dataset.from_dict(COLUMNS).to_iterable_dataset(num_shards=2)
        stream = stream.shuffle(seed=1, buffer_size=10)
        return {"x": tnt.data.stream_columns(stream, 8, inputs="x", targets="y")}
    (folder / "data").mkdir(exist_ok=True)
    return {"x": make(kind, folder / "data"), "batch_size": 8}


@pytest.mark.parametrize("kind", ["grain", "stream", "hugging face", "parquet", "tar"])
def test_an_interrupted_run_goes_on_within_an_epoch(kind, tmp_path, use_ranks):
    def fit(ranks, *extra, **options):
        use_ranks(ranks)
        model = tnt.Model(Line())
        model.compile("sgd", tnt.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(**data_of(kind, tmp_path), epochs=3, verbose=0, callbacks=extra, **options)
        return model.get_weights()

    whole = fit(2)
    backup = tnt.callbacks.BackupAndRestore(tmp_path / "backup", 1, delete_checkpoint=False)
    with pytest.raises(Crash):
        fit(2, backup, CrashAt(6))
    # On another number of devices.
    for mine, theirs in zip(fit(4, backup, CrashAt(-1)), whole, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ["hugging face", "parquet"])
def test_a_null_is_refused_and_not_taken_for_a_class(kind, tmp_path):
    table = pa.table({"x": X[:, 0], "y": [1, 0, None, 2] + [1] * 25, "other": [None] * NUM_ROWS})
    parquet.write_table(table, path := str(tmp_path / "0.parquet"))
    if kind == "parquet":
        rows = tnt.data.arrow_files(path)
    else:
        rows = tnt.data.columns(datasets.Dataset(table))
    assert [y for _, y in rows.__getitems__([3, 1])] == [2, 0]
    with pytest.raises(ValueError, match="The column 'y' is null in row 2 of the"):
        rows.__getitems__([3, 1, 2])


def test_lists_of_lists_in_a_file_are_arrays_of_one_shape(tmp_path):
    whole = np.arange(NUM_ROWS * 6, dtype=np.float32).reshape(NUM_ROWS, 3, 2)
    path = str(tmp_path / "0.parquet")
    parquet.write_table(pa.table({"x": whole.tolist(), "y": Y}), path)
    for index, (x, y) in enumerate(tnt.data.arrow_files(path)):
        np.testing.assert_array_equal(np.asarray(x, np.float32), whole[index])
        assert (x.dtype, y) == (np.float64, Y[index])
    parquet.write_table(pa.table({"x": [[[1.0, 2.0], [3.0]]], "y": [1]}), path)
    with pytest.raises(ValueError, match="one shape, but those of the column 'x' differ"):
        tnt.data.arrow_files(path)[0]
