"""One checkpoint as files: a folder with trees of arrays, a text, and checksums of both.

The arrays are in Orbax's layout: Zarr arrays in one OCDBT database, and a description. Orbax reads
these folders and writes such ones. They are written here because Orbax's own writer waits in
barriers for processes that have failed, and leaves out what any process but the first writes alone.

There are two kinds of checksums, both CRC-32, which notices each error of up to 32 bits in a row:
one of each array (with its shape and dtype) from memory to memory, and one of each file, which says
which file is damaged. They lie in the folder `checksums` of the checkpoint:

    arrays_0.json   {"state/params/w": ["float32[4, 3]", [[[0, 0], [4, 3], 123456]]]}
    files.json      {"crc32": 98765, "files": {"state/_METADATA": [2188, 4567]}}

`files.json` has a checksum of its own.
"""

import functools
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax import _jax
from tnt_jax.files import irregular_entries, read_regular
from tnt_jax.train.checkpoints.directory import FILES, FOLDER, write_mark
from tnt_jax.train.state import is_spread

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


_BLOCK_BYTES = 2**20


def array_checksum(array: np.ndarray) -> int:
    """Returns a checksum of shape, dtype and values of an array."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return zlib.crc32(data.data, zlib.crc32(_jax.kind_of(array).encode()))


def write_array_checksums(folder: Path, arrays: Mapping[str, HostArray], *, process: int) -> None:
    """Writes the checksums of the arrays that a process saves of a checkpoint."""
    noted = {
        path: [
            _jax.kind_of(array),
            [
                [list(starts), list(values.shape), array_checksum(values)]
                for starts, values in array.shards
            ],
        ]
        for path, array in arrays.items()
        if array.shards
    }
    (folder / FOLDER).mkdir(exist_ok=True)
    (folder / FOLDER / f"arrays_{process}.json").write_text(json.dumps(noted))


def write_file_checksums(folder: Path) -> None:
    """Writes the checksums of all files of a checkpoint, which then are on the disk."""
    files = {name: list(_file_checksum(folder / name, is_synced=True)) for name in _names(folder)}
    target = folder / FOLDER / FILES
    with target.open("w") as file:
        json.dump({"crc32": _checksum_of_list(files), "files": files}, file)
        file.flush()
        os.fsync(file.fileno())


def damaged_files(folder: Path) -> list[str]:
    """Returns what is wrong with the files of a checkpoint, which has no irregular entries."""
    try:
        noted = json.loads(read_regular(folder / FOLDER / FILES))
        files = {name: (int(size), int(crc)) for name, (size, crc) in noted["files"].items()}
        is_whole = noted["crc32"] == _checksum_of_list(noted["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [f"{FOLDER}/{FILES} cannot be read ({type(error).__name__}: {error})"]
    if not is_whole:
        return [f"{FOLDER}/{FILES} has changed"]
    # A list that has been tampered with may name any file of the machine, or a device without end.
    inside = set(_names(folder))
    problems = {
        name: _problem_of_file(folder / name, *expected) if name in inside else "is missing"
        for name, expected in files.items()
    }
    return [f"{name} {problem}" for name, problem in problems.items() if problem]


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def read_array_checksums(folder: Path) -> dict[str, tuple[str, list[Any]]]:
    """Returns, by path, the kind of each array and the place and checksum of its parts."""
    found: dict[str, tuple[str, list[Any]]] = {}
    try:
        for file in sorted((folder / FOLDER).glob("arrays_*.json")):
            for path, (text, parts) in json.loads(read_regular(file)).items():
                found.setdefault(path, (text, []))[1].extend(parts)
    except (OSError, TypeError, AttributeError, RecursionError, ValueError) as error:
        raise ValueError(f"The checksums of the arrays in {folder} cannot be read.") from error
    return found


def problem_of_array(array: np.ndarray | HostArray, expected: tuple[str, list[Any]]) -> str:
    """Returns what differs between an array and its checksums; empty if nothing does."""
    text, parts = expected
    if _jax.kind_of(array) != text:
        return f"is {_jax.kind_of(array)}, but was saved as {text}"
    if isinstance(array, HostArray):
        # For parts that were not saved as they were read the checksums of the files must do.
        saved = {(tuple(starts), tuple(shape)): crc for starts, shape, crc in parts}
        known = [(values, saved.get((at, values.shape))) for at, values in array.shards]
        is_damaged = any(crc not in (None, array_checksum(values)) for values, crc in known)
        return "has other values than were saved" if is_damaged else ""
    if any(array_checksum(array[region(at, shape)]) != crc for at, shape, crc in parts):
        return "has other values than were saved"
    covered = sum(int(np.prod(shape)) for _, shape, _ in parts)
    return "" if covered == array.size else "is not covered by its checksums"


def _problem_of_file(path: Path, size: int, crc: int) -> str:
    try:
        found = _file_checksum(path)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if found[0] != size:
        return f"has {found[0]} bytes instead of {size}"
    return "" if found[1] == crc else "has changed"


def _file_checksum(path: Path, *, is_synced: bool = False) -> tuple[int, int]:
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            size += len(block)
            crc = zlib.crc32(block, crc)
        if is_synced:
            os.fsync(file.fileno())
    return size, crc


def _checksum_of_list(files: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(files, sort_keys=True).encode())


_ITEMS = ("state", "extra")
_ABOUT = Path("about", "metadata")
# How many damaged arrays an error names before it says how many there are besides.
_NAMED = 4


class NotFiniteError(ValueError):
    """A state holds NaN or infinity in its parameters."""


class DamagedCheckpointError(OSError):
    """A checkpoint does not hold what was saved."""


@dataclass(frozen=True)
class Content:
    """Content of a checkpoint on the host: arrays by tree and path, and a text about them."""

    items: dict[str, dict[str, HostArray]]
    about: str
    is_best: bool  # Whether it is the best so far.
    must_be_finite: bool  # Whether its parameters must be.
    is_spread: bool  # Whether each process writes a part.

    @classmethod
    def of(
        cls,
        trees: Mapping[str, Mapping[str, Any]],
        about: Mapping[str, Any],
        *,
        is_best: bool,
        must_be_finite: bool,
        leads: bool,
    ) -> "Content":
        """Returns copies of what this process saves; if it `leads`, of what all hold, too."""
        for leaf in (leaf for tree in trees.values() for leaf in tree.values()):
            if isinstance(leaf, jax.Array) and (leads or is_spread(leaf)):
                leaf.copy_to_host_async()
        items = {
            name: {path: HostArray.of(leaf, has_whole=leads) for path, leaf in tree.items()}
            for name, tree in trees.items()
            if tree
        }
        spread = any(is_spread(leaf) for tree in trees.values() for leaf in tree.values())
        return cls(items, json.dumps(dict(about)), is_best, must_be_finite, spread)


def _check_finite(arrays: Mapping[str, HostArray]) -> None:
    for path, array in arrays.items():
        is_checked = path.startswith("params/") and jnp.issubdtype(array.dtype, jnp.inexact)
        if is_checked and not all(np.isfinite(values).all() for _, values in array.shards):
            raise NotFiniteError(f"{path} holds NaN or infinity")


def write_part(folder: Path, content: Content, *, process: int) -> None:
    """Writes the arrays of this process to the folder of a checkpoint, and their checksums.

    A NotFiniteError names the first parameter with NaN or infinity, if that is to be refused.
    """
    if content.must_be_finite:
        _check_finite(content.items["state"])
    for item, arrays in content.items.items():
        own = {path: array for path, array in arrays.items() if array.shards}
        if own:
            write_arrays(folder / item, own, process=process if content.is_spread else None)
    write_array_checksums(folder, _by_path(content.items), process=process)


def complete(folder: Path, content: Content, target: Path) -> None:
    """Adds what describes the arrays to what all processes wrote; the checkpoint then appears."""
    for item, arrays in content.items.items():
        if content.is_spread:
            merge_arrays(folder / item)
        describe_arrays(folder / item, arrays)
    (folder / _ABOUT).parent.mkdir()
    (folder / _ABOUT).write_text(content.about)
    write_mark(folder, list(content.items), is_best=content.is_best)
    write_file_checksums(folder)
    _sync_folder(folder)
    folder.rename(target)
    _sync_folder(target.parent)


def read_checkpoint(
    folder: Path, wanted: Mapping[str, Regions] | None = None
) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Returns the arrays of a checkpoint by path, by tree, and what describes them.

    Of arrays of the state that are `wanted` in parts, these alone are read. A FileNotFoundError
    says that this process does not see the folder, a DamagedCheckpointError what is damaged.
    """
    if not folder.is_dir():
        raise FileNotFoundError(
            f"Process {jax.process_index()} does not see {folder}: the directory must be on a file "
            "system that all processes share."
        )
    if not any(path.is_file() for path in folder.rglob("*")):
        raise DamagedCheckpointError(
            f"{folder} has lost all of its files, as when a cluster purges old files"
        )
    if irregular := irregular_entries(folder):
        raise DamagedCheckpointError(
            f"{folder} is damaged: {', '.join(irregular[:_NAMED])} in it must be regular files, "
            "but are links, pipes or devices, which lead out of the checkpoint."
        )
    problems = damaged_files(folder)
    items, array_problems = _read_items(folder, wanted or {})
    try:
        about = json.loads(read_regular(folder / _ABOUT))
    except (OSError, ValueError, RecursionError) as error:
        about, problems = {}, problems or [f"{_ABOUT} cannot be read: {error}"]
    if problems or array_problems:
        told = [f"{path} {problem}".strip() for path, problem in array_problems.items()]
        more = [f"{len(told) - _NAMED} more arrays"] if len(told) > _NAMED else []
        raise DamagedCheckpointError(
            f"{folder} is damaged: {'; '.join([*problems, *told[:_NAMED], *more])}"
        )
    return items, about


def _read_items(
    folder: Path, wanted: Mapping[str, Regions]
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """Returns the arrays of a checkpoint, and what is wrong with them, by tree and path."""
    items: dict[str, dict[str, Any]] = {}
    problems: dict[str, str] = {}
    try:
        sums = read_array_checksums(folder)
    except ValueError as error:
        return {}, {"": str(error)}
    for item in _ITEMS:
        if item != "state" and not (folder / item).is_dir():
            continue
        inside = {
            path.removeprefix(f"{item}/"): text
            for path, (text, _) in sums.items()
            if path.startswith(f"{item}/")
        }
        try:
            parts = wanted if item == "state" else {}
            items[item], bad = read_arrays(folder / item, inside, parts)
        except ValueError as error:
            problems[item] = str(error)
            continue
        problems |= {f"{item}/{path}": problem for path, problem in bad.items()}
    return items, problems | _differences(_by_path(items), sums, problems)


def _by_path(items: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {f"{item}/{path}": leaf for item, tree in items.items() for path, leaf in tree.items()}


def _differences(
    found: Mapping[str, Any], sums: Mapping[str, Any], known: Mapping[str, str]
) -> dict[str, str]:
    differences = {}
    for path, expected in sums.items():
        if path in found:
            differences[path] = problem_of_array(found[path], expected)
        elif path not in known and path.split("/")[0] not in known:
            differences[path] = "is missing"
    return {path: problem for path, problem in differences.items() if problem}


def _sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
