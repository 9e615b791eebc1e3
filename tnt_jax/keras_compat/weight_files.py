"""Arrays by path in one file, `.weights.h5` (HDF5) or safetensors, written atomically."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

from tnt_jax.train.checkpoint_checksums import array_checksum

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
    """Writes arrays to an HDF5 file, each at its path below the group `tnt_jax`.

    Args:
        path: File to write.
        arrays: Host or device arrays by path.
        mode: `"w"` for a new file, `"a"` to add to one.
        notes: Text to write along.
        attributes: Texts to write as attributes of the file.
    """
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
    """Returns the arrays that `write_h5` wrote, by path; none for a file of another program.

    Raises:
        ValueError: If a part of the file links elsewhere, for instance to another file, or holds an
            array that tnt_jax did not write.
    """
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


def _check_is_no_link(group: Any, key: str) -> None:
    import h5py

    # A link of any other kind leads out of the group, or out of the file.
    if not isinstance(group.get(key, getlink=True), h5py.HardLink):
        raise ValueError(
            f"{group.file.filename} has a link at {group.name}/{key}. Files of weights hold arrays "
            "only: do not load it."
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
    """Writes arrays to a safetensors file; their names are the paths with dots for slashes.

    The metadata hold a checksum of each.
    """
    from safetensors.numpy import save_file

    tensors = {name.replace("/", "."): np.array(leaf, order="C") for name, leaf in arrays.items()}
    checksums = {name: array_checksum(array) for name, array in tensors.items()}
    about = {"version": 1, "crc32": checksums}
    save_file(tensors, path, metadata={"format": "np", "tnt_jax": json.dumps(about)})


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a safetensors file by name.

    Raises:
        ValueError: If it is damaged.
    """
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
