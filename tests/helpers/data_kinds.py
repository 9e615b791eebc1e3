"""Every kind of data that `fit` takes, with the same rows in the same order, and what training
on them by hand gives.
"""

import os
from functools import cache
from itertools import cycle

import grain
import jax
import keras
import numpy as np
import tensorflow as tf
import tensorflow_datasets as tfds
from flax import nnx

import tnt_jax as tnt

try:
    import torch
except ImportError:  # Its kinds end in an error, and their tests skip.
    torch = None

try:
    import datasets
    import webdataset
    from pyarrow import feather, parquet
except ImportError:  # As above.
    datasets = None

NUM_ROWS, SIZE, EPOCHS = 22, 8, 2
_rng = np.random.default_rng(0)
X = _rng.normal(size=(NUM_ROWS, 3)).astype(np.float32)
Y = (X @ [[1.0], [-2.0], [0.5]] + 0.1 * _rng.normal(size=(NUM_ROWS, 1))).astype(np.float32)
FOLDER = ""


def rows():
    return list(zip(X, Y, strict=True))


def batches(parts=tuple, rank=0, size=1):
    x, y = X[rank::size], Y[rank::size]
    return [
        parts((x[i : i + SIZE // size], y[i : i + SIZE // size]))
        for i in range(0, len(x), SIZE // size)
    ]


class Items:
    def __init__(self, parts=tuple):
        self.parts = parts

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        return self.parts((X[index], Y[index]))


class Iterable:
    def __init__(self, elements):
        self.elements = elements

    def __iter__(self):
        return iter(self.elements)


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return batches(list)[index]


class Rows(tfds.core.GeneratorBasedBuilder):
    VERSION = tfds.core.Version("1.0.0")

    def _info(self):
        features = {
            "x": tfds.features.Tensor(shape=(3,), dtype=np.float32),
            "y": tfds.features.Tensor(shape=(1,), dtype=np.float32),
        }
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), supervised_keys=("x", "y")
        )

    def _split_generators(self, dl_manager):
        return {"train": ((number, {"x": x, "y": y}) for number, (x, y) in enumerate(rows()))}

    def _generate_examples(self):
        raise NotImplementedError


def tf_rows():
    return tf.data.Dataset.from_tensor_slices((X, Y))


def stored():
    return tnt.data.load("rows", data_dir=os.path.join(FOLDER, "records"))


def torch_loader(**options):
    data = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return torch.utils.data.DataLoader(data, batch_size=SIZE, **options)


@cache
def torch_workers():
    # Workers start once: they import PyTorch.
    return torch_loader(
        num_workers=2, multiprocessing_context="forkserver", persistent_workers=True
    )


def torch_dicts():
    data = [({"x": torch.tensor(x)}, torch.tensor(y)) for x, y in rows()]
    return torch.utils.data.DataLoader(data, batch_size=SIZE)


def grain_loader(**options):
    sampler = grain.samplers.IndexSampler(
        NUM_ROWS, shard_options=grain.sharding.NoSharding(), num_epochs=1
    )
    last = [grain.transforms.Batch(SIZE, drop_remainder=False)]
    return grain.DataLoader(data_source=Items(), sampler=sampler, operations=last, **options)


def hugging_face():
    return datasets.Dataset.from_dict({"x": X, "y": Y})


def write_tables(folder):
    """Writes the rows to Parquet and Arrow files and tar shards; the last ones are uneven."""
    if datasets is None:
        return
    table = hugging_face().data.table
    parquet.write_table(table.slice(0, 15), folder / "1.parquet", row_group_size=6)
    parquet.write_table(table.slice(15), folder / "2.parquet")
    feather.write_feather(table, folder / "1.arrow", compression="uncompressed")
    for number, part in enumerate((rows()[:9], rows()[9:])):
        with webdataset.TarWriter(str(folder / f"{number}.tar")) as writer:
            for row, (x, y) in enumerate(part):
                writer.write({"__key__": str(row), "x.npy": x, "y.npy": y})


def files(ending):
    return sorted(
        os.path.join(FOLDER, name) for name in os.listdir(FOLDER) if name.endswith(ending)
    )


def named(make, *given, **options):
    return {
        "x": make(*given, inputs="x", targets="y", **options),
        "batch_size": SIZE,
        "shuffle": False,
    }


def own(data):
    return {
        "x": data(tnt.get_process_index(), tnt.get_process_count()),
        "tnt_distribute_dataset": False,
    }


def own_tf(rank, size):
    return tf_rows().shard(size, rank).batch(SIZE // size)


OPTIONS = tf.data.Options()
# Arguments of `fit`. Those of `evaluate` and `predict` are the same without the targets and what
# belongs to `fit` alone.
KINDS = {
    "arrays": lambda: {"x": X, "y": Y, "batch_size": SIZE, "shuffle": False},
    "dict of arrays": lambda: {"x": {"x": X}, "y": Y, "batch_size": SIZE, "shuffle": False},
    "torch tensors": lambda: {"x": torch.from_numpy(X).requires_grad_(), "y": torch.from_numpy(Y), "batch_size": SIZE, "shuffle": False},
    "tf.data": lambda: {"x": tf_rows().batch(SIZE)},
    "tf.data, options": lambda: {"x": tf_rows().shuffle(1).with_options(OPTIONS).batch(SIZE).prefetch(1)},
    "tf.data, unbatched": lambda: {"x": tf_rows(), "tnt_micro_batch_size": SIZE // tnt.get_size()},
    "tf.data, all on every process": lambda: {"x": tnt.data.TfData(tf_rows().batch(SIZE), split="after")},
    "tf.data, reshuffled": lambda: {"x": tf_rows().shuffle(30, seed=3).batch(SIZE)},
    "TFDS": lambda: {"x": stored().batch(SIZE)},
    "TFDS, shuffled": lambda: {"x": stored().shuffle(30, seed=1, reshuffle_each_iteration=False).batch(SIZE)},
    "random access": lambda: {"x": tnt.data.RandomAccess(Items(), batch_size=SIZE)},
    "random access, lists": lambda: {"x": Items(list), "batch_size": SIZE, "shuffle": False},
    "torch dataset": lambda: {"x": torch_loader().dataset, "batch_size": SIZE, "shuffle": False},
    "torch loader": lambda: {"x": torch_loader()},
    "torch loader, workers": lambda: {"x": torch_workers()},
    "torch loader, dicts": lambda: {"x": torch_dicts()},
    "Grain MapDataset": lambda: {"x": grain.MapDataset.source(Items()), "batch_size": SIZE, "shuffle": False},
    "Grain MapDataset, batched": lambda: {"x": grain.MapDataset.source(Items()).batch(SIZE).map(lambda batch: batch)},
    "Grain IterDataset": lambda: {"x": grain.MapDataset.source(Items()).to_iter_dataset().batch(SIZE)},
    "Grain loader": lambda: {"x": grain_loader()},
    "Grain MapDataset, batched last": lambda: {"x": grain.MapDataset.source(Items()).batch(SIZE)},
    "Grain IterDataset, mapped": lambda: {"x": grain.MapDataset.source(Items()).to_iter_dataset().map(lambda row: row).batch(SIZE)},
    "Hugging Face": lambda: {"x": hugging_face(), "batch_size": SIZE, "shuffle": False},
    "Hugging Face, named": lambda: named(tnt.data.columns, hugging_face()),
    "Hugging Face, stream": lambda: {"x": tnt.data.stream_columns(hugging_face().to_iterable_dataset(3), SIZE)},
    "Parquet": lambda: named(tnt.data.arrow_files, files(".parquet")),
    "Arrow": lambda: named(tnt.data.arrow_files, files(".arrow"), format="arrow"),
    "tar shards": lambda: {"x": tnt.data.RandomAccess(tnt.data.tar_shards(files(".tar"), inputs="x.npy", targets="y.npy"), batch_size=SIZE, num_workers=2)},
    "PyDataset": lambda: {"x": Batches(), "shuffle": False},
    "list of batches": lambda: {"x": batches()},
    "generator": lambda: {"x": cycle(batches()), "steps_per_epoch": 3},
    "generator of lists": lambda: {"x": (batch for batch in cycle(batches(list))), "steps_per_epoch": 3},
    "own shard": lambda: own(lambda rank, size: batches(tuple, rank, size)),
    "own shard of lists": lambda: own(lambda rank, size: Iterable(batches(list, rank, size))),
    "own shard, tf.data": lambda: own(own_tf),
}  # fmt: skip


def stream(kind, epoch):
    """Returns the global batches that `kind` must give in `epoch`, read by its own library."""
    tf.random.set_seed(
        None
    )  # A global seed, which other tests may have set, changes the order of every seeded shuffle.
    if kind == "tf.data, reshuffled":
        data = KINDS[kind]()["x"]
        passes = [list(data.as_numpy_iterator()) for _ in range(epoch + 1)]
        return passes[epoch]
    return list(KINDS[kind]()["x"].as_numpy_iterator()) if kind.startswith("TFDS") else batches()


def expected(kind):
    """Returns what training by hand gives, in NumPy."""
    w, b, losses = np.ones((3, 1)), np.zeros(1), []
    for epoch in range(EPOCHS):
        total = 0.0
        for x, y in stream(kind, epoch):
            error = x @ w + b - y
            total += (error**2).sum()
            w, b = w - 0.1 * 2 * x.T @ error / len(x), b - 0.1 * 2 * error.mean(0)
        losses.append(total / NUM_ROWS)
    first = stream(kind, 0)
    predicted = np.concatenate([x @ w + b for x, _ in first])
    loss = np.mean((predicted - np.concatenate([y for _, y in first])) ** 2)
    return {
        "losses": losses,
        "weights": np.concatenate([w[:, 0], b]),
        "loss": loss,
        "predicted": predicted,
    }


class Line(nnx.Module):
    def __init__(self):
        self.line = nnx.Linear(3, 1, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return self.line(x)


def results(folder):
    """Trains, evaluates and predicts with every kind of data; returns the numbers of each, or
    its error.
    """
    global FOLDER
    FOLDER = str(folder)
    tf.random.set_seed(None)
    module = Line()
    model = tnt.Model(module)
    model.compile(tnt.optimizers.SGD(0.1), "mse")
    found = {}
    for kind, make in KINDS.items():
        module.line.kernel[...], module.line.bias[...] = jax.numpy.ones((3, 1)), jax.numpy.zeros(1)
        try:
            found[kind] = run(model, make)
        except Exception as error:
            found[kind] = {"error": np.array(f"{type(error).__name__}: {error}")}
    return found


def run(model, make):
    def arguments(*without):
        steps = {"steps": 3} if "steps_per_epoch" in make() else {}
        return (
            {k: v for k, v in make().items() if k not in ("shuffle", "steps_per_epoch", *without)}
            | steps
            | {"verbose": 0}
        )

    losses = model.fit(**make(), epochs=EPOCHS, verbose=0).history["loss"]
    line = model.module.line
    weights = np.concatenate([line.kernel[...][:, 0], line.bias[...]])
    loss, predicted = model.evaluate(**arguments()), model.predict(**arguments("y"))
    return {"losses": losses, "weights": weights, "loss": loss, "predicted": predicted}
