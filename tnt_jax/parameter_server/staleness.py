"""When a gradient may be applied, so that none is staler than a bound; and how stale they were.

The staleness of a gradient is the number of updates between the variables that it was computed with
and the variables that it changes.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class StalenessBound:
    """Decides which gradients may start and be applied.

    Gradients under way can all be applied within the bound if it holds when they are applied in the
    order in which they began (the earliest deadline first). Every start and every update keeps this
    true, so that nobody waits for ever.

    Attributes:
        bound: Largest staleness; None for any.
    """

    bound: int | None

    def may_start(self, version: int, under_way: Sequence[int]) -> bool:
        """Returns whether a gradient of the variables at `version` may begin.

        Args:
            version: Number of updates so far.
            under_way: Version of each gradient that was begun and not applied.
        """
        return self._can_finish(version, [*under_way, version])

    def may_apply(self, version: int, others: Sequence[int]) -> bool:
        """Returns whether an update may be made at `version`.

        Args:
            version: Number of updates so far.
            others: Version of each other gradient under way.
        """
        return self._can_finish(version + 1, others)

    def _can_finish(self, version: int, begun: Sequence[int]) -> bool:
        if self.bound is None:
            return True
        return all(
            version + place - start <= self.bound for place, start in enumerate(sorted(begun))
        )


@dataclass
class Statistics:
    """What happened since a parameter server was started.

    Attributes:
        updates: Updates of the variables: the version of the latest gradient.
        examples: Examples whose gradients were applied.
        staleness: How many gradients had which staleness.
        examples_by_worker: Examples whose gradients were applied, by worker.
        busy_s: Seconds in which each worker was given work.
        training_s: Seconds in which training ran.
        dropped: Results of backup workers, or of workers that they were faster than.
        repeated_batches: Batches, or shares of them, done again because a worker was lost.
        lost_workers: Workers that died or did not answer, and were replaced.
        lost_servers: Servers that died and came back from their checkpoint.
        lost_updates: Updates of a server's variables that were lost with it.
        redone_updates: Updates that were made again after a server was lost.
    """

    updates: int = 0
    examples: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    examples_by_worker: Counter[int] = field(default_factory=Counter)
    busy_s: dict[int, float] = field(default_factory=dict)
    training_s: float = 0.0
    dropped: int = 0
    repeated_batches: int = 0
    lost_workers: int = 0
    lost_servers: int = 0
    lost_updates: int = 0
    redone_updates: int = 0

    @property
    def mean_staleness(self) -> float:
        """Mean staleness of the gradients that were applied; 0 before the first."""
        total = sum(self.staleness.values())
        return sum(size * count for size, count in self.staleness.items()) / total if total else 0.0

    @property
    def examples_per_s(self) -> float:
        """Examples per second of training."""
        return self.examples / self.training_s if self.training_s else 0.0

    @property
    def updates_per_s(self) -> float:
        """Updates per second of training."""
        return self.updates / self.training_s if self.training_s else 0.0

    def summary(self) -> str:
        """Returns the numbers in one line, for a log."""
        histogram = ", ".join(f"{size}: {self.staleness[size]}" for size in sorted(self.staleness))
        rates = ", ".join(
            f"{worker}: {self.examples_by_worker[worker] / self.busy_s[worker]:.0f}"
            for worker in sorted(self.busy_s)
            if self.busy_s[worker]
        )
        return (
            f"version {self.updates}, {self.examples_per_s:.0f} examples/s, "
            f"{self.updates_per_s:.1f} updates/s; gradients by staleness {{{histogram}}}; "
            f"examples/s of workers while busy {{{rates}}}; {self.dropped} dropped, "
            f"{self.repeated_batches} done again, {self.lost_updates} updates lost"
        )
