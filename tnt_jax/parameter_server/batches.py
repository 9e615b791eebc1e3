"""Batches as the coordinator gives them to workers, and what their results add up to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tnt_jax.parameter_server.coordinator import Work
from tnt_jax.parameter_server.worker import Order, Report
from tnt_jax.parameter_server.worker_programs import Share
from tnt_jax.train.contracts import Batch

Counts = Callable[[Batch], list[np.ndarray]]


@dataclass(eq=False)
class GlobalBatch:
    """A global batch of training.

    Attributes:
        batch: All its rows, padding included.
        index: Its number in the epoch.
        num_rows: Real rows.
        step: Its number since the beginning of training, known once it is begun.
    """

    batch: Batch
    index: int
    num_rows: int
    step: int = 0

    @property
    def what(self) -> str:
        """What messages call it."""
        return f"batch {self.index + 1} of the epoch (step {self.step + 1})"

    def work(self) -> Work:
        """Returns the work of one worker on all of the batch."""
        order = Order(self.step, None, True, self.num_rows)
        return Work("compute", (order, self.batch), self.what, self.num_rows)

    def shares(self, num_shares: int, ranks_per_share: int, counts: Counts) -> list[Work]:
        """Returns the work on each share of the batch, of equally many rows with padding.

        Args:
            num_shares: Number of shares.
            ranks_per_share: Ranks of each worker.
            counts: Returns the divisors of the loss of the batch.
        """
        if num_shares == 1:
            return [self.work()]
        divisors = tuple(counts(self.batch))
        size = len(jax.tree.leaves(self.batch.inputs)[0]) // num_shares
        works = []
        for number in range(num_shares):
            rows = slice(number * size, (number + 1) * size)
            part = jax.tree.map(lambda x, rows=rows: x[rows], self.batch)
            share = Share(np.int32(number * ranks_per_share), np.float32(1 / num_shares), divisors)
            real = size if part.mask is None else int(part.mask.sum())
            order = Order(self.step, share, True, self.num_rows)
            what = f"share {number + 1} of {num_shares} of {self.what}"
            works.append(Work("compute", (order, part), what, real))
        return works


class EpochSums:
    """The sums over an epoch that its logs are computed from.

    Args:
        sums: Those of the steps before, or None.
    """

    def __init__(self, sums: Any) -> None:
        self.sums = None if sums is None else jax.tree.map(np.asarray, sums)

    def add(self, reports: Sequence[Report]) -> None:
        """Adds a global batch: the reports of its shares, in order.

        As in Keras, the loss of a batch is weighted by its rows.
        """
        rows = np.float32(sum(report.rows for report in reports))
        loss, losses, increments = (
            jax.tree.map(lambda *parts: sum(parts[1:], start=parts[0]), *each)
            for each in zip(
                *((report.loss, report.losses, report.increments) for report in reports),
                strict=True,
            )
        )
        added = {
            "loss": (np.float32(loss) * rows, rows),
            "losses": [(np.float32(value) * rows, rows) for value in losses],
            "metrics": increments,
        }
        self.add_sums(added)

    def add_sums(self, added: Any) -> None:
        """Adds the sums of other batches."""
        if self.sums is None:
            self.sums = added
        else:
            self.sums = jax.tree.map(lambda x, y: np.asarray(x + y, x.dtype), self.sums, added)

    def on_device(self) -> Any:
        """Returns the sums as JAX arrays, or None before the first batch."""
        return None if self.sums is None else jax.device_put(self.sums)
