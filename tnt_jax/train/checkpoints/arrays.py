"""Arrays in a folder, in Orbax's layout: Zarr arrays in one OCDBT database, and a description.

Orbax reads these folders and writes such ones. They are written here because Orbax's own writer
waits in barriers for processes that have failed, and leaves out what any process but the first
writes alone.

    write_arrays(folder, {"params/w": HostArray.of(w, has_whole=True)})
    arrays, problems = read_arrays(folder, kinds)
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tnt_jax import _jax
from tnt_jax.files import read_regular

# The names are Orbax's.
_DESCRIPTION = "_METADATA"
_OF_PROCESS = "ocdbt.process_"
# jax.tree_util.DictKey, in Orbax's numbering.
_DICT_KEY = 2
# Shape of a whole array, and the shape of each of its parts by where it begins.
Regions = tuple[tuple[int, ...], dict[tuple[int, ...], tuple[int, ...]]]


@dataclass(frozen=True)
class HostArray:
    """Host copies of an array, or of those parts of it that this process saves or has read."""

    shape: tuple[int, ...]  # Of the whole array.
    dtype: np.dtype
    chunk: tuple[int, ...]  # Shape of one shard.
    shards: list[tuple[tuple[int, ...], np.ndarray]]  # Where each begins, and its values.

    @classmethod
    def of(cls, leaf: Any, *, has_whole: bool) -> "HostArray":
        """Returns copies of what this process saves; of whole arrays nothing unless `has_whole`."""
        if is_spread(leaf):
            shards = [
                (_starts(shard.index), np.array(shard.data))
                for shard in leaf.addressable_shards
                if shard.replica_id == 0
            ]
            chunk = leaf.sharding.shard_shape(leaf.shape)
            return cls(leaf.shape, np.dtype(leaf.dtype), chunk, shards)
        shape, dtype = np.shape(leaf), np.dtype(getattr(leaf, "dtype", type(leaf)))
        whole = [((0,) * len(shape), np.array(leaf))] if has_whole else []
        return cls(shape, dtype, shape, whole)

    def region(self, index: tuple[slice, ...]) -> np.ndarray:
        """Returns the part at a region of the whole array."""
        starts = _starts(index)
        return next(values for at, values in self.shards if at == starts)


def _starts(index: tuple[slice, ...]) -> tuple[int, ...]:
    return tuple(part.start or 0 for part in index)


def is_spread(leaf: Any) -> bool:
    """Returns whether each process holds but a part of an array."""
    return isinstance(leaf, jax.Array) and not (
        leaf.is_fully_addressable or leaf.is_fully_replicated
    )


def spread_regions(arrays: Mapping[str, Any]) -> dict[str, Regions]:
    """Returns which parts of arrays this process holds, of those that each holds in part."""
    return {
        path: (
            tuple(leaf.shape),
            {_starts(shard.index): shard.data.shape for shard in leaf.addressable_shards},
        )
        for path, leaf in arrays.items()
        if is_spread(leaf)
    }


def check_savable(arrays: Mapping[str, Any]) -> None:
    """Raises a TypeError for a dtype that cannot be stored, a ValueError for paths of one name."""
    paths: dict[str, str] = {}
    for path, leaf in arrays.items():
        dtype = np.dtype(getattr(leaf, "dtype", type(leaf))).name
        if not _is_storable(dtype):
            raise TypeError(
                f"{path} has the dtype {dtype}, which checkpoints cannot hold. Save it as another "
                "dtype, such as uint8, or leave it out of the state."
            )
        other = paths.setdefault(_stored_name(path), path)
        if other != path:
            raise ValueError(
                f"{other} and {path} would have the same name in a checkpoint, where dots stand "
                "for slashes. Rename one of them."
            )


@functools.cache
def _is_storable(dtype: str) -> bool:
    import tensorstore as ts

    try:
        ts.Spec({"driver": "zarr", "kvstore": {"driver": "memory"}, "dtype": dtype})
    except ValueError:
        return False
    return True


def write_arrays(
    folder: Path, arrays: Mapping[str, HostArray], *, process: int | None = None
) -> None:
    """Writes arrays to a folder, in one transaction; an OSError if they cannot be written.

    Of several processes each gives its number; `merge_arrays` then joins what they wrote.
    """
    import tensorstore as ts

    base = folder if process is None else folder / f"{_OF_PROCESS}{process}"
    base.mkdir(parents=True, exist_ok=True)
    context, transaction = ts.Context(), ts.Transaction()
    with _as_os_error(f"{folder} cannot be written"):
        stores = [
            ts.open(
                _spec(base, path) | _layout(array),
                context=context,
                transaction=transaction,
                create=True,
                open=True,
            )
            for path, array in arrays.items()
        ]
        writes = [
            store.result()[region(starts, values.shape)].write(
                values, can_reference_source_data_indefinitely=True
            )
            for store, array in zip(stores, arrays.values(), strict=True)
            for starts, values in array.shards
        ]
        for write in writes:
            write.copy.result()
        transaction.commit_sync()


def merge_arrays(folder: Path) -> None:
    """Joins what several processes wrote to a folder into one database."""
    import tensorstore as ts

    # Within one context and transaction values are not copied, but referred to.
    context, transaction = ts.Context(), ts.Transaction(atomic=True)
    with _as_os_error(f"{folder} cannot be written"):
        whole = ts.KvStore.open(_database(folder), context=context).result()
        for path in sorted(folder.glob(f"{_OF_PROCESS}*")):
            part = ts.KvStore.open(_database(path), context=context).result()
            part.experimental_copy_range_to(whole.with_transaction(transaction)).result()
        transaction.commit_sync()


def describe_arrays(folder: Path, arrays: Mapping[str, HostArray]) -> None:
    """Writes which arrays a folder holds."""
    folder.mkdir(exist_ok=True)
    entries = {}
    for path, array in arrays.items():
        keys = tuple(path.split("/"))
        entries[str(keys)] = {
            "key_metadata": [{"key": key, "key_type": _DICT_KEY} for key in keys],
            "value_metadata": {
                "value_type": "np.ndarray",
                "skip_deserialize": False,
                "write_shape": list(array.chunk),
            },
        }
    description = {
        "tree_metadata": entries,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    (folder / _DESCRIPTION).write_text(json.dumps(description))


def read_shapes(folder: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shape and dtype of each array of a folder by path, or raises a ValueError."""
    return {
        path: jax.ShapeDtypeStruct(store.result().shape, store.result().dtype.numpy_dtype)
        for path, store in _opened(folder).items()
    }


def read_arrays(
    folder: Path, kinds: Mapping[str, str], wanted: Mapping[str, Regions] | None = None
) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the arrays of a folder by path, and what is wrong with those that cannot be read.

    Each must be of its kind (`kind_of`): a damaged description may demand any amount of memory. Of
    those that are `wanted` in parts (`spread_regions`), these are read, as a `HostArray`. A
    ValueError says that the description of the folder cannot be read.
    """
    arrays, problems = {}, {}
    reads = {}
    for path, opening in _opened(folder).items():
        try:
            store = opening.result()
            found = _jax.kind_of(jax.ShapeDtypeStruct(store.shape, store.dtype.numpy_dtype))
            if kinds.get(path) == found:
                reads[path] = store, _started(store, (wanted or {}).get(path))
            else:
                problems[path] = f"is {found}, but was saved as {kinds.get(path, 'nothing')}"
        except ValueError as error:
            problems[path] = _first_words(error)
    for path, (store, (is_whole, started)) in reads.items():
        try:
            parts = [(at, np.asarray(read.result())) for at, read in started]
            values = parts[0][1]
            if not is_whole:
                dtype = np.dtype(store.dtype.numpy_dtype)
                values = HostArray(tuple(store.shape), dtype, values.shape, parts)
            arrays[path] = values
        except ValueError as error:
            problems[path] = _first_words(error)
    return arrays, problems


def _started(store: Any, wanted: Regions | None) -> tuple[bool, list[Any]]:
    """Starts to read an array, or parts of it if it has the shape that is expected."""
    shape = tuple(store.shape)
    if wanted is None or wanted[0] != shape:
        return True, [((0,) * len(shape), store.read())]
    parts = wanted[1].items()
    return False, [(at, store[region(at, size)].read()) for at, size in parts]


def _opened(folder: Path) -> dict[str, Any]:
    import tensorstore as ts

    context = ts.Context()
    return {
        path: ts.open(
            _spec(folder, path) | {"fill_missing_data_reads": False}, context=context, open=True
        )
        for path in _described(folder)
    }


def _described(folder: Path) -> Iterator[str]:
    """Yields the paths of the arrays that the description of a folder names."""
    try:
        entries = json.loads(read_regular(folder / _DESCRIPTION))["tree_metadata"]
        for entry in entries.values():
            if not entry["value_metadata"]["skip_deserialize"]:
                yield "/".join(key["key"] for key in entry["key_metadata"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{folder / _DESCRIPTION} does not describe arrays: {type(error).__name__}: {error}"
        ) from error


def _spec(base: Path, path: str) -> dict[str, Any]:
    return {"driver": "zarr", "kvstore": _database(base) | {"path": f"{_stored_name(path)}/"}}


def _stored_name(path: str) -> str:
    """Returns the name that Orbax gives to an array."""
    return path.replace("/", ".")


def _database(base: Path) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{base}/"}}


def _layout(array: HostArray) -> dict[str, Any]:
    # Weights compress by less than a tenth, at the price of the processors that train.
    return {
        "dtype": array.dtype.name,
        "metadata": {
            "shape": list(array.shape),
            "chunks": [max(1, size) for size in array.chunk],
            "compressor": None,
        },
        # Zeros, too, are stored: without them a missing part could not be told from one.
        "store_data_equal_to_fill_value": True,
    }


def region(starts: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """Returns the slices of a part of an array."""
    return tuple(slice(start, start + size) for start, size in zip(starts, shape, strict=True))


@contextmanager
def _as_os_error(what: str) -> Iterator[None]:
    """Raises what tensorstore raises, which depends on the place, as OSError."""
    try:
        yield
    except Exception as error:
        raise OSError(f"{what}: {_first_words(error)}") from error


def _first_words(error: Exception) -> str:
    """Returns what tensorstore says, without the settings that follow."""
    return str(error).split(" [tensorstore_spec=")[0].split(" [source locations=")[0]
