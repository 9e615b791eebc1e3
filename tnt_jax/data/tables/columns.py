"""Columns of a table as inputs, targets and weights; needs NumPy alone, as actors have no JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tnt_jax.data.elements import checksums_of

Names = str | Sequence[str]
# A batch of rows, whose columns are arrays, or one row.
Batch = Mapping[str, Any]


@dataclass(frozen=True)
class ColumnRoles:
    """Which columns are inputs, targets and weights; by default `x`, `y` and `sample_weight`."""

    inputs: Names | None
    targets: Names | None
    sample_weight: str | None

    def element(self, batch: Batch) -> tuple[Any, Any, Any]:
        """Returns `(inputs, targets, sample_weight)` of a batch of columns."""
        targets, weight = self._target_names(batch), self._weight_name(batch)
        inputs = self._inputs(batch, {*_listed(targets), *_listed(weight)})
        return inputs, _pick(batch, "targets", targets), _pick(batch, "sample_weight", weight)

    def names(self, columns: Sequence[str]) -> list[str]:
        """Returns the columns used; none if all may be. A ValueError names one that is missing."""
        table = dict.fromkeys(columns)
        targets, weight = self._target_names(table), self._weight_name(table)
        is_x = self.inputs is None and "x" in table.keys() - {*_listed(targets), *_listed(weight)}
        inputs = "x" if is_x else self.inputs
        roles = {"inputs": inputs, "targets": targets, "sample_weight": weight}
        for role, names in roles.items():
            _pick(table, role, names)
        used = [name for names in roles.values() for name in _listed(names)]
        return list(dict.fromkeys(used)) if inputs is not None else []

    def example(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns a row as `(inputs,)`, `(inputs, targets)` or `(inputs, targets, weight)`."""
        inputs, targets, weight = self.element(row)
        if targets is not None:
            return (inputs, targets) if weight is None else (inputs, targets, weight)
        if self.sample_weight is not None:
            raise ValueError(f"The weights are {self.sample_weight!r}, but there are no targets.")
        return (inputs,)

    def checksums(self, batch: Batch) -> tuple[int, int | None]:
        """Returns checksums of rows and of their targets; see `checksums_of`."""
        names = _listed(self._target_names(batch))
        # A column that is missing is an error of `element`.
        targets = [np.asarray(batch[name]) for name in names if name in batch]
        return checksums_of(map(np.asarray, batch.values()), targets)

    def _inputs(self, batch: Batch, others: set[str]) -> Any:
        if self.inputs is not None:
            return _pick(batch, "inputs", self.inputs)
        rest = {name: column for name, column in batch.items() if name not in others}
        if "x" in rest:
            return rest["x"]
        if self.targets is None and len(rest) > 1:
            raise ValueError(
                f"It is not known which of the columns {_named(batch)} are inputs and which are "
                "targets. Name them: inputs=..., targets=...; or call them x and y."
            )
        if not rest:
            raise ValueError(f"No column is left for the inputs: there are {_named(batch)} alone.")
        return next(iter(rest.values())) if len(rest) == 1 else rest

    def _target_names(self, batch: Batch) -> Names | None:
        return "y" if self.targets is None and "y" in batch else self.targets

    def _weight_name(self, batch: Batch) -> str | None:
        is_there = self.sample_weight is None and "sample_weight" in batch
        return "sample_weight" if is_there else self.sample_weight


def dense(batch: Batch) -> Batch:
    """Returns columns in which each row is an array as one array each, as far as they are not."""
    return {name: dense_column(name, column) for name, column in batch.items()}


def dense_column(name: str, column: np.ndarray) -> np.ndarray:
    """Returns arrays in an array, and arrays in these, as one array."""
    if column.dtype != object or not column.size or not isinstance(column[0], np.ndarray | list):
        return column
    try:
        return np.stack([dense_column(name, np.asarray(row)) for row in column])
    except ValueError as error:
        raise ValueError(
            f"The rows of a batch must have one shape, but those of the column {name!r} differ. "
            "Pad or crop them to one shape in the dataset."
        ) from error


def _pick(batch: Batch, role: str, names: Names | None) -> Any:
    if names is None:
        return None
    for name in _listed(names):
        if name not in batch:
            raise ValueError(
                f"{role} names the column {name!r}, but the columns are {_named(batch)}."
            )
    return batch[names] if isinstance(names, str) else tuple(batch[name] for name in names)


def _listed(names: Names | None) -> list[str]:
    if names is None:
        return []
    return [names] if isinstance(names, str) else list(names)


def _named(batch: Batch) -> str:
    return ", ".join(map(repr, batch))
