"""Arrays by path in one file, `.weights.h5` (HDF5) or safetensors, written atomically.

Checksums make a damaged file an error rather than other weights. Archives (`.keras`) have their
own. An HDF5 file gets one after the end that its head states: HDF5 ignores what is there, and
removes it when a program changes the file. Files without checksums are loaded as they are.
"""

import json
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from tnt_jax.distributed.joining.runtime import get_process_index
from tnt_jax.train.checkpoints.files import array_checksum

H5_ENDING, SAFETENSORS_ENDING = ".weights.h5", ".safetensors"
# The group with tnt_jax's arrays, beside the contents of Keras's own files.
_GROUP = "tnt_jax"
# An array beside that group, with text in UTF-8.
_NOTES = "tnt_jax_notes"
_MOST_GROUPS = 100
# How many damaged arrays an error names.
_NAMED = 4
# An array that is larger than this, and than this many times its stored bytes, is meant to exhaust
# memory: tnt_jax stores every byte.
_MANY_BYTES, _LARGEST_RATIO = 2**30, 1000


def write_h5(
    path: Path,
    arrays: Mapping[str, Any],
    *,
    mode: str = "w",
    notes: str = "",
    attributes: Mapping[str, str] | None = None,
) -> None:
    """Writes arrays to an HDF5 file, each at its path below the group `tnt_jax`."""
    import h5py

    with h5py.File(path, mode) as file:
        file.attrs.update(attributes or {})
        if notes:
            # An array, because an attribute holds at most 64 KiB.
            stored = file.create_dataset(_NOTES, data=np.frombuffer(notes.encode(), np.uint8))
            stored.attrs["dtype"] = "uint8"
        for name, leaf in arrays.items():
            array = np.asarray(leaf)
            # HDF5 has no bfloat16: its bits are stored.
            is_known = array.dtype.kind in "biufc"
            stored = file.create_dataset(
                f"{_GROUP}/{name}", data=array if is_known else array.view(f"u{array.itemsize}")
            )
            stored.attrs["dtype"] = array.dtype.name


def read_h5(path: Path | IO[bytes]) -> dict[str, np.ndarray]:
    """Returns the arrays that `write_h5` wrote, by path; none for a file of another program."""
    import h5py

    with h5py.File(path, "r") as file:
        # `in file` would follow links.
        return dict(_arrays_below(file, _GROUP, "")) if _GROUP in file.keys() else {}  # noqa: SIM118


def _arrays_below(group: Any, key: str, prefix: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yields path and array of the entry at a key of a group, and of all entries below."""
    import h5py

    _check_is_no_link(group, key)
    node = group[key]
    if prefix.count("/") > _MOST_GROUPS:
        raise ValueError(
            f"{group.file.filename} has more than {_MOST_GROUPS} nested groups: do not load it."
        )
    if isinstance(node, h5py.Group):
        for name in node:
            yield from _arrays_below(node, str(name), f"{prefix}{name}/")
    else:
        yield prefix.removesuffix("/"), _array(node)


def check_links_of(file: Any) -> None:
    """Raises a ValueError if an open HDF5 file has links, which Keras 3.12 would follow."""
    import h5py

    # HDF5 takes no error of what it calls.
    found = file.visititems_links(
        lambda path, link: None if isinstance(link, h5py.HardLink) else path
    )
    if found is not None:
        _check_is_no_link(file, found)


def _check_is_no_link(group: Any, key: str) -> None:
    import h5py

    link = group.get(key, getlink=True)
    # A link of any other kind leads out of the group, or out of the file.
    if not isinstance(link, h5py.HardLink):
        raise ValueError(
            f"{group.file.filename} has a link ({type(link).__name__}) at {group.name}/{key}. "
            "Files of weights hold arrays only: do not load it."
        )


def _array(node: Any) -> np.ndarray:
    import h5py

    where = f"{node.file.filename} has at {node.name}"
    if not isinstance(node, h5py.Dataset) or node.external or node.is_virtual:
        raise ValueError(
            f"{where} what is stored in other files. Files of weights hold arrays only: do not "
            "load it."
        )
    if node.nbytes > max(_MANY_BYTES, _LARGEST_RATIO * node.id.get_storage_size()):
        raise ValueError(
            f"{where} an array of {node.nbytes} bytes, of which {node.id.get_storage_size()} are "
            "stored: do not load it."
        )
    name = node.attrs.get("dtype")
    if not isinstance(name, str) or node.dtype.kind not in "biufc" or name == "object":
        raise ValueError(
            f"{where} no array that this library wrote, but one of dtype {node.dtype} and mark "
            f"{name!r}."
        )
    return np.asarray(node[()]).view(np.dtype(name))


def read_h5_notes(path: Path) -> str:
    """Returns the notes that `write_h5` wrote, empty if there are none."""
    import h5py

    with h5py.File(path, "r") as file:
        if _NOTES not in file.keys():  # noqa: SIM118 (`in file` follows links)
            return ""
        _check_is_no_link(file, _NOTES)
        return bytes(_array(file[_NOTES])).decode()


def write_safetensors(path: Path, arrays: Mapping[str, Any]) -> None:
    """Writes arrays by dotted path to a safetensors file, with checksums in its metadata."""
    from safetensors.numpy import save_file

    tensors = {name.replace("/", "."): np.array(leaf, order="C") for name, leaf in arrays.items()}
    checksums = {name: array_checksum(array) for name, array in tensors.items()}
    about = {"version": 1, "crc32": checksums}
    save_file(tensors, path, metadata={"format": "np", "tnt_jax": json.dumps(about)})


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a safetensors file by name."""
    from safetensors import SafetensorError, safe_open
    from safetensors.numpy import load_file

    try:
        with safe_open(path, framework="np") as file:
            noted = (file.metadata() or {}).get("tnt_jax", "{}")
        arrays = load_file(path)
        checksums = json.loads(noted).get("crc32", {})
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged, or no safetensors file: {error}.") from error
    different = [
        name
        for name in sorted(checksums.keys() | arrays.keys())
        if name not in arrays or checksums.get(name) != array_checksum(arrays[name])
    ]
    if checksums and different:
        raise ValueError(
            f"{path} is damaged: {', '.join(different[:_NAMED])} in it changed since it was "
            "written. Load another copy."
        )
    return arrays


# Letters after a dot are a file extension; `run.v2` and `epoch-0.93` are names of directories.
_EXTENSION = re.compile(r"\.([a-z]+|h(df)?5)", re.IGNORECASE)


def is_file_name(path: Path, *, of_keras: bool, with_model: bool = False) -> bool:
    """Returns whether a path is that of one file rather than of a directory."""
    is_weights = path.name.endswith((H5_ENDING, SAFETENSORS_ENDING))
    is_model = not is_weights and path.name.endswith((".keras", *((".h5",) if of_keras else ())))
    if is_model or (is_weights and not with_model):
        return True
    if _EXTENSION.fullmatch(path.suffix):
        whole = ".keras or .h5" if of_keras else ".keras"
        raise ValueError(
            f"{path} has an unsupported file extension. A whole model is a directory, a name "
            f"without an extension, or a file ending in {whole}; weights (save_weights) are a file "
            f"ending in {H5_ENDING} or {SAFETENSORS_ENDING}."
        )
    return False


_END = b"\ntnt_jax crc32 %08x\n"
_END_PATTERN = re.compile(rb"\ntnt_jax crc32 ([0-9a-f]{8})\n")
_BLOCK_BYTES = 2**20
_ARCHIVE_START, _H5_START = b"PK\x03\x04", b"\x89HDF\r\n\x1a\n"
# Where the head of an HDF5 file states its end, in 8 bytes, by the version of the head: "HDF5 File
# Format Specification Version 3.0", II.A. h5py writes version 0.
_H5_ENDS = {b"\0": 40, b"\1": 44, b"\2": 28, b"\3": 28}


def add_checksum(path: Path) -> None:
    """Appends a checksum to a file, unless it is an archive."""
    if not zipfile.is_zipfile(path):
        with path.open("ab") as file:
            file.write(_END % _checksum(path, path.stat().st_size))


def check_path(path: Path) -> None:
    """Raises an error if this process cannot load a path: it is missing, or a damaged file."""
    if not path.exists():
        if path.suffix != ".json":  # Keras's sharded weights are loaded, but not saved.
            is_file_name(path, of_keras=True)
        raise FileNotFoundError(f"Process {get_process_index()} does not find {path.absolute()}.")
    if not path.is_file():
        return
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(max(_H5_ENDS.values()) + 8)
        file.seek(max(0, num_bytes - len(_END % 0)))
        end = file.read()
    is_damaged = path.suffix in (".h5", ".keras")  # Unless its start says that it is one.
    if start.startswith(_ARCHIVE_START):
        return _check_archive(path)
    if found := _END_PATTERN.fullmatch(end):
        is_damaged = int(found[1], 16) != _checksum(path, num_bytes - len(end))
    elif start.startswith(_H5_START):
        position = _H5_ENDS.get(start[8:9])  # None if the head is damaged.
        is_damaged = position is None or num_bytes != int.from_bytes(
            start[position : position + 8], "little"
        )
    if is_damaged:
        raise ValueError(
            f"{path} is damaged: its bytes have changed since it was written. Load another copy."
        )


def _check_archive(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as file:
            # Without its last bytes an archive is empty.
            damaged = file.testzip() if file.namelist() else "the list of members"
    except Exception as error:  # What is raised depends on the byte that is damaged.
        raise ValueError(
            f"{path} is damaged: {type(error).__name__}: {error}. Load another copy."
        ) from error
    if damaged is not None:
        raise ValueError(f"{path} is damaged: {damaged} in it has changed. Load another copy.")


def _checksum(path: Path, num_bytes: int) -> int:
    crc = 0
    with path.open("rb") as file:
        while num_bytes and (block := file.read(min(_BLOCK_BYTES, num_bytes))):
            crc = zlib.crc32(block, crc)
            num_bytes -= len(block)
    return crc
