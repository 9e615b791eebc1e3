"""Checksums of single files, so that a damaged file is an error rather than other weights.

Archives (`.keras`) have a checksum of each member by themselves. An HDF5 file gets one after the
end that its head states. HDF5 ignores what is there, and removes it when a program changes the
file. Nothing else may be there, so a checksum that was overwritten is noticed. Those of safetensors
are in its metadata, see `weight_files`. Files without checksums, such as those of other programs,
are loaded as they are.
"""

import re
import zipfile
import zlib
from pathlib import Path

from tnt_jax.distributed.runtime import get_process_index
from tnt_jax.keras_compat.file_names import is_file_name

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


def problem_of_path(path: Path) -> Exception | None:
    """Returns what keeps this process from loading a path: it is missing, or a damaged file."""
    try:
        if not path.exists():
            if path.suffix != ".json":  # Keras's sharded weights are loaded, but not saved.
                is_file_name(path, of_keras=True)
            raise FileNotFoundError(
                f"Process {get_process_index()} does not find {path.absolute()}."
            )
        if path.is_file():
            _check_file(path)
    except (OSError, ValueError) as error:
        return error
    return None


def _check_file(path: Path) -> None:
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
        is_damaged = num_bytes != _h5_end(start)
    if is_damaged:
        raise ValueError(
            f"{path} is damaged: its bytes have changed since it was written. Load another copy."
        )


def _h5_end(start: bytes) -> int | None:
    """Returns the size of an HDF5 file as its head states it, or None if the head is damaged."""
    position = _H5_ENDS.get(start[8:9])
    return position and int.from_bytes(start[position : position + 8], "little")


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
