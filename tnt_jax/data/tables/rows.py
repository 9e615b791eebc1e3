"""The rows of a table as examples: its columns become inputs, targets and weights by their names.

train = columns(datasets.load_dataset("parquet", data_files=files, split="train"), targets="label")
model.fit(RandomAccess(train, batch_size=256, shuffle=True, num_workers=8), epochs=90)

Hugging Face's library is not imported: the type of an object tells.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from tnt_jax.data.elements import is_of_library
from tnt_jax.data.tables.columns import ColumnRoles, Names, dense


class Table(Protocol):
    """Rows by number, each a dict of the columns."""

    def __len__(self) -> int:
        """Returns the number of rows."""
        ...

    def rows(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Returns the rows at these numbers, in their order."""
        ...


class Rows:
    """Examples of a table by number, for `tnt_jax.data.RandomAccess` or `fit` itself."""

    def __init__(self, table: Table, roles: ColumnRoles) -> None:
        self._table = table
        self._roles = roles

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"There is no row {index}: there are {len(self)} rows.")
        return self.__getitems__([index % len(self)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Any, ...]]:
        """Returns several examples, which are read by one call."""
        examples = []
        for index, row in zip(indices, self._table.rows(indices), strict=True):
            try:
                examples.append(self._roles.example(row))
            except ValueError as error:
                error.add_note(f"This happened in row {index}.")
                raise
        return examples


class _Dicts:
    """A random-access dataset whose examples are dicts."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def rows(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        return [self._dataset[index] for index in indices]


class _HuggingFace(_Dicts):
    """A `datasets.Dataset`, of which the columns with roles alone are read."""

    def __init__(self, dataset: Any, names: Sequence[str]) -> None:
        chosen = dataset.select_columns(list(names)) if names else dataset
        has_format = chosen.format["type"] is not None
        super().__init__(chosen if has_format else chosen.with_format("numpy"))
        columns = map(chosen.data.column, chosen.column_names)
        self._tables = chosen.with_format("arrow") if any(x.null_count for x in columns) else None

    def rows(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        if self._tables is not None:
            refuse_nulls(self._tables[list(indices)], indices, "the dataset")
        return rows_of_columns(self._dataset[list(indices)], len(indices))


def refuse_nulls(table: Any, indices: Sequence[int], where: str) -> None:
    """Raises a ValueError if a row of an Arrow table, which has this index, lacks a value."""
    for name in table.column_names:
        if table[name].null_count:
            row = indices[int(np.argmax(table[name].is_null()))]
            raise ValueError(
                f"The column {name!r} is null in row {row} of {where}, but a batch holds numbers "
                "alone. Fill a value in, or leave the row out."
            )


def rows_of_columns(columns: dict[str, Any], num_rows: int) -> list[dict[str, Any]]:
    """Returns columns, each of them `num_rows` values, as rows."""
    return [{name: column[row] for name, column in columns.items()} for row in range(num_rows)]


def columns(
    dataset: Any,
    *,
    inputs: Names | None = None,
    targets: Names | None = None,
    sample_weight: str | None = None,
) -> Rows:
    """Returns the rows of a table as examples `(inputs, targets, sample_weight)`.

    Args:
        dataset: A `datasets.Dataset` of Hugging Face, of which each process reads its own rows
            alone; or another dataset with `__len__` and `__getitem__` whose examples are dicts.
        inputs: Column with the inputs, or a sequence of columns for several inputs. By default the
            column `x` if there is one, else the only column or a dict of all columns that are
            neither targets nor weights.
        targets: Column with the targets, or a sequence of columns for several outputs; by default
            the column `y` if there is one.
        sample_weight: Column with the weights of rows; by default the column `sample_weight` if
            there is one.

    Raises:
        TypeError: If rows cannot be read by number, as in a stream.
        ValueError: If a name is that of no column, or a value is null, when rows are read.
    """
    roles = ColumnRoles(inputs, targets, sample_weight)
    if is_hugging_face(dataset, "Dataset"):
        return Rows(_HuggingFace(dataset, roles.names(dataset.column_names)), roles)
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise TypeError(
            f"columns() takes a dataset whose rows have numbers, but a {type(dataset).__name__} "
            "has no __len__ and __getitem__. Pass a stream to tnt_jax.data.stream_columns."
        )
    return Rows(_Dicts(dataset), roles)


def is_hugging_face(x: Any, name: str) -> bool:
    """Returns whether `x` is of a class of Hugging Face's `datasets`, `Dataset` for instance."""
    return is_of_library(x, "datasets", name)


class ColumnStream:
    """Global batches of a stream of rows, the same on every process; see `stream_columns`."""

    def __init__(self, stream: Any, batch_size: int, roles: ColumnRoles, drop: bool) -> None:
        self._stream = stream.with_format("numpy")
        self._batch_size = batch_size
        self._roles = roles
        self._drops_remainder = drop

    def batches_of_epoch(self, epoch: int) -> Iterator[tuple[Any, Any, Any]]:
        """Returns the batches in the order that a shuffled stream has in an epoch."""
        self._stream.set_epoch(epoch)
        return iter(self)

    def __iter__(self) -> Iterator[tuple[Any, Any, Any]]:
        for batch in self._stream.iter(self._batch_size, drop_last_batch=self._drops_remainder):
            arrays = {name: np.asarray(column) for name, column in batch.items()}
            yield self._roles.element(dense(arrays))


def stream_columns(
    stream: Any,
    batch_size: int,
    *,
    inputs: Names | None = None,
    targets: Names | None = None,
    sample_weight: str | None = None,
    drop_remainder: bool = False,
) -> ColumnStream:
    """Returns global batches of a stream of Hugging Face's `datasets`.

    A stream has no row numbers: each process reads all rows, and keeps its own. Where the data is
    on a disk, `columns` of a `datasets.Dataset` reads the own rows alone.

    Args:
        stream: A `datasets.IterableDataset`. If it is shuffled with a seed, each epoch has an order
            of its own.
        batch_size: Rows of the global batch.
        inputs: As in `columns`.
        targets: As in `columns`.
        sample_weight: As in `columns`.
        drop_remainder: Whether an incomplete last batch is dropped.

    Raises:
        TypeError: If `stream` is something else.
        ValueError: If the batch size is below 1.
    """
    if not is_hugging_face(stream, "IterableDataset"):
        raise TypeError(
            f"stream_columns() takes a datasets.IterableDataset, but got a {type(stream).__name__}."
        )
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, but is {batch_size}.")
    roles = ColumnRoles(inputs, targets, sample_weight)
    # A stream that was mapped may not know its columns.
    names = roles.names(stream.column_names) if stream.column_names else []
    chosen = stream.select_columns(names) if names else stream
    return ColumnStream(chosen, batch_size, roles, drop_remainder)
