"""What checksums of arrays notice, beyond the files in which they lie (`tests/faults/test_files.py`)."""

import numpy as np
import pytest

from tnt_jax.train.checkpoints import files
from tnt_jax.train.checkpoints.files import (
    HostArray,
    array_checksum,
    damaged_files,
    problem_of_array,
    read_array_checksums,
    write_array_checksums,
    write_file_checksums,
)

X = np.arange(12, dtype=np.float32).reshape(4, 3)


@pytest.fixture
def noted(tmp_path):
    """Returns the entry of `X`, of which two processes have saved two rows each."""
    for process, rows in enumerate((slice(0, 2), slice(2, 4))):
        part = HostArray(X.shape, X.dtype, (2, 3), [((rows.start, 0), X[rows])])
        write_array_checksums(tmp_path, {"w": part}, process=process)
    return read_array_checksums(tmp_path)["w"]


def test_shape_and_dtype_belong_to_the_checksum():
    zeros = np.zeros(12, np.float32)
    others = [zeros.reshape(3, 4), zeros.view(np.int32), np.zeros(6, np.float64)]
    assert len({array_checksum(array) for array in (zeros, *others)}) == 4


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (X, ""),
        (X.reshape(3, 4), "is float32[3, 4], but was saved as float32[4, 3]"),
        (X.view(np.int32), "is int32[4, 3], but was saved as float32[4, 3]"),
        (X[::-1], "has other values than were saved"),
        (X + np.eye(4, 3, -2, np.float32), "has other values than were saved"),
    ],
)
def test_a_whole_array_is_compared_with_its_parts(noted, array, expected):
    assert problem_of_array(array, noted) == expected


def test_a_part_that_nobody_noted_is_missing(noted):
    kind, parts = noted
    assert problem_of_array(X, (kind, parts[:1])) == "is not covered by its checksums"


@pytest.mark.parametrize(
    ("start", "values", "expected"),
    [
        (2, X[2:], ""),
        (2, X[:2], "has other values than were saved"),
        # Parts that were not saved like this are compared by the checksums of the files alone.
        (1, X[:2], ""),
    ],
)
def test_an_array_that_was_read_in_part_is_compared_in_part(noted, start, values, expected):
    part = HostArray(X.shape, X.dtype, (2, 3), [((start, 0), values)])
    assert problem_of_array(part, noted) == expected


@pytest.mark.parametrize("place", [0, 5, 11])
def test_each_block_of_a_file_counts(tmp_path, monkeypatch, place):
    monkeypatch.setattr(files, "_BLOCK_BYTES", 4)
    data = bytearray(b"twelve bytes")
    (tmp_path / "checksums").mkdir()
    (tmp_path / "file").write_bytes(data)
    write_file_checksums(tmp_path)
    assert damaged_files(tmp_path) == []
    data[place] ^= 1
    (tmp_path / "file").write_bytes(data)
    assert damaged_files(tmp_path) == ["file has changed"]
