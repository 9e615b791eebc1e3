"""Folders of Parquet or Arrow files, whose rows are read by number.

train = arrow_files("data/train", inputs="image", targets="label")
model.fit(RandomAccess(train, batch_size=256, num_workers=8), epochs=90)
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from tnt_jax.data.tables.columns import ColumnRoles, Names, dense_column
from tnt_jax.data.tables.rows import Rows, refuse_nulls, rows_of_columns


class _ArrowFiles:
    """Row groups of Parquet files, and Arrow files; the last one that was read stays in memory."""

    def __init__(self, dataset: Any, names: Sequence[str]) -> None:
        self._names = list(names) or None
        pieces = [piece for file in dataset.get_fragments() for piece in _pieces(file)]
        self._pieces = [piece for piece, _ in pieces]
        # Where each piece begins, and at last the number of rows.
        self._starts = np.cumsum([0, *(num_rows for _, num_rows in pieces)])
        self._last: tuple[int, Any] | None = None

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_last": None}

    def rows(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        asked = np.asarray(indices)
        owners = np.searchsorted(self._starts, asked, side="right") - 1
        found: list[dict[str, Any]] = [{}] * len(asked)
        for piece in np.unique(owners):
            places = np.flatnonzero(owners == piece)
            table = self._read(int(piece)).take(asked[places] - self._starts[piece])
            refuse_nulls(table, asked[places].tolist(), f"the table ({self._pieces[piece].path})")
            columns = {name: _as_numpy(name, table[name]) for name in table.column_names}
            for place, row in zip(places, rows_of_columns(columns, len(places)), strict=True):
                found[place] = row
        return found

    def _read(self, piece: int) -> Any:
        last = self._last  # Another thread may replace it.
        if last is None or last[0] != piece:
            try:
                table = self._pieces[piece].to_table(columns=self._names)
            except Exception as error:
                error.add_note(f"This happened in {self._pieces[piece].path}.")
                raise
            last = self._last = (piece, table)
        return last[1]


def _pieces(file: Any) -> list[tuple[Any, int]]:
    """Returns the parts of a file that are read as a whole, with the number of rows of each."""
    if not hasattr(file, "split_by_row_group"):
        return [(file, file.count_rows())]
    # `count_rows` of a row group counts those of its file.
    groups = file.split_by_row_group()
    return [(group, sum(info.num_rows for info in group.row_groups)) for group in groups]


def _as_numpy(name: str, column: Any) -> Any:
    whole = column.combine_chunks()
    if hasattr(whole, "to_numpy_ndarray"):  # A column of tensors of one shape.
        return whole.to_numpy_ndarray()
    rows = whole.to_numpy(zero_copy_only=False)
    # A list is an array, but a list of lists is an array of arrays.
    are_lists = rows.dtype == object and len(rows) and isinstance(rows[0], np.ndarray)
    return [dense_column(name, row) for row in rows] if are_lists else rows


def arrow_files(
    paths: str | os.PathLike[str] | Sequence[str],
    *,
    format: str = "parquet",
    inputs: Names | None = None,
    targets: Names | None = None,
    sample_weight: str | None = None,
) -> Rows:
    """Returns the rows of Parquet or Arrow files as examples `(inputs, targets, sample_weight)`.

    The rows are those of the files in the order of their names. Each process reads the row groups
    that hold its own rows. To shuffle, use Arrow files, or Parquet with small row groups: a row
    group is read as a whole.

    Args:
        paths: A folder, a file, or a sequence of files, which are read in this order.
        format: `"parquet"`; `"arrow"` for Arrow's own files (also called Feather).
        inputs: As in `tnt_jax.data.columns`.
        targets: As in `tnt_jax.data.columns`.
        sample_weight: As in `tnt_jax.data.columns`.

    Raises:
        ModuleNotFoundError: If pyarrow is not installed.
        FileNotFoundError: If there is nothing at a path.
        ValueError: If there is no file, or a name is that of no column; when rows are read, if a
            value is null.
    """
    try:
        from pyarrow import dataset as arrow
        from pyarrow import fs
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("arrow_files needs pyarrow: pip install pyarrow.") from error
    given = os.fspath(paths) if isinstance(paths, str | os.PathLike) else list(paths)
    found = arrow.dataset(given, format=format, filesystem=fs.LocalFileSystem(use_mmap=True))
    if not found.files:
        raise ValueError(f"arrow_files() needs one file at least, but there is none in {given!r}.")
    roles = ColumnRoles(inputs, targets, sample_weight)
    return Rows(_ArrowFiles(found, roles.names(found.schema.names)), roles)
