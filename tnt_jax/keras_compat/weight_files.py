"""Arrays by path in one file: HDF5 with the ending `.weights.h5`, or safetensors; written whole or not at all."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np

H5_ENDING, SAFETENSORS_ENDING = ".weights.h5", ".safetensors"
# Group that holds our arrays, beside what Keras puts into its own files.
_GROUP = "tnt_jax"


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a path to write to that takes the place of `path` when the block ends without an error.

    Until then a file at `path` stays as it is, whenever the process dies.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory; a file is to be written there. Choose another name.")
    # Keras looks at the ending of a name.
    temporary = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_h5(path: Path, arrays: Mapping[str, Any], *, mode: str = "w") -> None:
    """Writes arrays to an HDF5 file, each at its path below the group `tnt_jax`.

    Args:
        path: File to write.
        arrays: Host or device arrays by path.
        mode: `"w"` for a new file, `"a"` to add to one.
    """
    import h5py

    with h5py.File(path, mode) as file:
        for name, leaf in arrays.items():
            array = np.asarray(leaf)
            # HDF5 knows no bfloat16: its bits are kept.
            is_known = array.dtype.kind in "biufc"
            stored = file.create_dataset(f"{_GROUP}/{name}", data=array if is_known else array.view(f"u{array.itemsize}"))
            stored.attrs["dtype"] = array.dtype.name


def read_h5(path: Path | IO[bytes]) -> dict[str, np.ndarray]:
    """Returns the arrays that `write_h5` wrote, by path; none for a file of another program."""
    import h5py

    arrays: dict[str, np.ndarray] = {}

    def visit(name: str, node: Any) -> None:
        if isinstance(node, h5py.Dataset):
            arrays[name] = np.asarray(node[()]).view(np.dtype(node.attrs["dtype"]))

    with h5py.File(path, "r") as file:
        if _GROUP in file:
            file[_GROUP].visititems(visit)  # pyright: ignore[reportAttributeAccessIssue]
    return arrays


def write_safetensors(path: Path, arrays: Mapping[str, Any]) -> None:
    """Writes arrays to a safetensors file; their names are the paths with dots for slashes."""
    from safetensors.numpy import save_file

    tensors = {name.replace("/", "."): np.array(leaf, order="C") for name, leaf in arrays.items()}
    save_file(tensors, path, metadata={"format": "np", "tnt_jax": json.dumps({"version": 1})})


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays of a safetensors file by name."""
    from safetensors.numpy import load_file

    return load_file(path)
