"""Checksums of single files, so that a damaged file is an error rather than other weights.

Archives (`.keras`) have a checksum of each member by themselves. An HDF5 file gets one at its end,
which HDF5 ignores, and removes when a program changes the file. Those of safetensors are in its
metadata, see `weight_files`. Files without checksums, such as those of other programs, are loaded
as they are.
"""

import re
import zipfile
import zlib
from pathlib import Path

from tnt_jax.distributed.runtime import get_process_index

_END = b"\ntnt_jax crc32 %08x\n"
_END_PATTERN = re.compile(rb"\ntnt_jax crc32 ([0-9a-f]{8})\n")
_BLOCK_BYTES = 2**20
_ARCHIVE_START = b"PK\x03\x04"


def add_checksum(path: Path) -> None:
    """Appends a checksum to a file, unless it is an archive."""
    if not zipfile.is_zipfile(path):
        with path.open("ab") as file:
            file.write(_END % _checksum(path, path.stat().st_size))


def problem_of_path(path: Path) -> Exception | None:
    """Returns what keeps this process from loading a path: it is missing, or a damaged file."""
    if not path.exists():
        return FileNotFoundError(f"Process {get_process_index()} does not find {path.absolute()}.")
    try:
        if path.is_file():
            _check_file(path)
    except (OSError, ValueError) as error:
        return error
    return None


def _check_file(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(4)
        file.seek(max(0, path.stat().st_size - len(_END % 0)))
        end = file.read()
    if start == _ARCHIVE_START:
        _check_archive(path)
    elif (found := _END_PATTERN.fullmatch(end)) and (
        int(found[1], 16) != _checksum(path, path.stat().st_size - len(end))
    ):
        raise ValueError(
            f"{path} is damaged: its bytes have changed since it was written. Load another copy."
        )


def _check_archive(path: Path) -> None:
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
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
