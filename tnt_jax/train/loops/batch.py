"""A global batch on the devices, as a custom training loop gets it."""

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from tnt_jax import _jax
from tnt_jax.train.contracts import Batch


@dataclass(frozen=True, eq=False)
class DistributedBatch:
    """One global batch, or several stacked ones, of a `DistributedDataset`.

    Of stacked batches every array has a leading dimension more, `[steps, rows, ...]`.

    Attributes:
        inputs: Pytree of arrays `[rows, ...]`, sharded by row; padding stands at the end of each
            process's or of all rows.
        targets: Pytree of arrays `[rows, ...]`, or None.
        weight: Sample weights `[rows]` or `[rows, ...]`, or None.
        mask: float32 `[rows]`, 1 for real rows and 0 for padding; None when no row is padding.
        num_rows: Real rows of the global batch; of stacked batches, of each.
        epoch: Number of the epoch, from 0.
        index: Number of the batch, or of the first one, in the epoch, from 0.
        step: Number of the batch, or of the first one, since the dataset's beginning, from 0.
        num_steps: Stacked batches; None of one that is not stacked.
        real_rows: Where the real rows stand: one range, or one for each process's shard.
        reading: What `tnt-jax explain` knows of where it comes from; otherwise None.
    """

    inputs: Any
    targets: Any
    weight: Any
    mask: Any
    num_rows: int
    epoch: int
    index: int
    step: int
    num_steps: int | None
    real_rows: tuple[slice, ...]
    reading: Any = field(default=None, repr=False)

    @property
    def arrays(self) -> Batch:
        """Arrays of the batch that a program takes."""
        return Batch(self.inputs, self.targets, self.weight, self.mask)

    def without_padding(self, rows: Any) -> Any:
        """Returns the real rows of arrays that a step returned by row.

        They are on the host, in the order of the dataset.

        Args:
            rows: Pytree of arrays `[rows, ...]`, in full on every process, such as `tnt.reduce(x,
                "concat")` gives them; of stacked batches `[steps, rows, ...]`.
        """
        dim = 0 if self.num_steps is None else 1
        num_real = sum(part.stop - part.start for part in self.real_rows)

        def cut(x: jax.Array) -> np.ndarray:
            whole = np.asarray(_jax.local_copy(x))
            if whole.shape[dim] == num_real:  # The step was given no padding.
                return whole
            parts = [whole[(slice(None),) * dim + (part,)] for part in self.real_rows]
            return np.concatenate(parts, axis=dim)

        return jax.tree.map(cut, rows)
