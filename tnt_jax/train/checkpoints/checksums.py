"""Checksums of what a checkpoint holds, written with it and compared when it is read.

There are two kinds, both CRC-32, which notices each error of up to 32 bits in a row: one of each
array (with its shape and dtype) from memory to memory, and one of each file, which says which file
is damaged. They lie in the folder `checksums` of the checkpoint:

    arrays_0.json   {"state/params/w": ["float32[4, 3]", [[[0, 0], [4, 3], 123456]]]}
    files.json      {"crc32": 98765, "files": {"state/_METADATA": [2188, 4567]}}

`files.json` has a checksum of its own.
"""

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tnt_jax import _jax
from tnt_jax.files import read_regular
from tnt_jax.train.checkpoints.arrays import HostArray, region

FOLDER = "checksums"
_FILES = "files.json"
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
    target = folder / FOLDER / _FILES
    with target.open("w") as file:
        json.dump({"crc32": _checksum_of_list(files), "files": files}, file)
        file.flush()
        os.fsync(file.fileno())


def has_checksums(folder: Path) -> bool:
    """Returns whether a checkpoint was written with checksums."""
    return (folder / FOLDER / _FILES).is_file()


def damaged_files(folder: Path) -> list[str]:
    """Returns what is wrong with the files of a checkpoint, which has no irregular entries."""
    try:
        noted = json.loads(read_regular(folder / FOLDER / _FILES))
        files = {name: (int(size), int(crc)) for name, (size, crc) in noted["files"].items()}
        is_whole = noted["crc32"] == _checksum_of_list(noted["files"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return [f"{FOLDER}/{_FILES} cannot be read ({type(error).__name__}: {error})"]
    if not is_whole:
        return [f"{FOLDER}/{_FILES} has changed"]
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
    """Returns what differs between an array and its checksums; empty if nothing does.

    Of an array that was read in part those parts are compared that were saved as they were read;
    for the others the checksums of the files must do.
    """
    text, parts = expected
    if _jax.kind_of(array) != text:
        return f"is {_jax.kind_of(array)}, but was saved as {text}"
    if isinstance(array, HostArray):
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
