"""How a `tf.data` pipeline is distributed, and warnings, once each, of unexpected behaviour.

This module does not need TensorFlow.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from sys import is_finalizing
from typing import Any, NamedTuple

from tnt_jax.data.layout import RankSlice, describe_sizes
from tnt_jax.job import Slot, once_per_job
from tnt_jax.log import logger


@dataclass(frozen=True)
class Distribution:
    """How a pipeline is distributed.

    Attributes:
        num_padded_rows: Rows that the ranks together add to the last batch; None when unknown.
        before: Operations that run for all rows on every process, in order.
        after: Operations that run for this process's rows.
        notes: What was changed in the pipeline, and why rows are selected at this point.
    """

    rank_slice: RankSlice
    global_batch_size: int | None
    num_batches: int | None
    num_padded_rows: int | None
    before: tuple[str, ...]
    after: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        sizes = describe_sizes(
            self.rank_slice,
            global_batch_size=self.global_batch_size,
            num_batches=self.num_batches,
            num_padded_rows=self.num_padded_rows,
        )
        before, after = (", ".join(names) or "nothing" for names in (self.before, self.after))
        lines = [
            sizes,
            f"Every process runs for all rows: {before}.",
            f"It runs for its own rows: {after}.",
        ]
        return "\n".join([*lines, *self.notes])


class Rebuilt(NamedTuple):
    """A pipeline for one process.

    Its elements are `(number of rows, own rows)` if `is_early`, otherwise whole batches.
    """

    stream: Any
    is_early: bool
    before: list[str]
    after: list[str]
    notes: list[str]
    slowed: list[str]


# The interpreter waits for its thread, and afterwards the executor refuses work: a thread that is
# started then would never run.
_endings = Slot(
    lambda: ThreadPoolExecutor(1, thread_name_prefix="tnt_jax-tf-data-end"),
    close=ThreadPoolExecutor.shutdown,
)


def elements_of(stream: Any) -> Iterator[Any]:
    """Yields the elements of a `tf.data.Dataset` as NumPy arrays.

    An iterator whose pipeline has stages with `AUTOTUNE` waits at its end for the tuner, for up to
    seconds on a busy machine. It ends in a thread, beside whatever comes next.
    """
    held = [stream.as_numpy_iterator()]
    try:
        yield from held[0]
    finally:
        _end(held)


def _end(held: list[Any]) -> None:
    if not is_finalizing():
        with suppress(RuntimeError):  # The interpreter is about to end.
            _endings.get().submit(held.clear)
            return
    held.clear()


@once_per_job
def warn_once(text: str) -> None:
    """Warns once per job: an evaluation after every epoch reads the same data again."""
    logger.warning("%s", text)


def warn_of_parts(rank_slice: RankSlice, python_maps: list[str], disordered: list[str]) -> None:
    """Warns, if several processes read, of maps that run for all rows and of unknown orders."""
    if rank_slice.local_ranks == rank_slice.num_ranks:
        return
    if python_maps:
        warn_once(
            f"Every process runs {', '.join(dict.fromkeys(python_maps))} for all rows, not for "
            f"its own alone, because Python code "
            "(tf.numpy_function, tf.py_function) may depend on how often it ran before. If it "
            "depends on its arguments alone, pass "
            'TfData(dataset, split="before"), or tf.numpy_function(..., stateful=False).'
        )
    if disordered:
        warn_once(
            f"A shuffle without a seed stands before {', '.join(dict.fromkeys(disordered))}, which "
            "is not known, so every process reads in a different order: rows occur twice or never "
            "in an epoch. Give every shuffle a seed."
        )


def warn_of_runs(differences: list[str], slowed: list[str]) -> None:
    """Warns of what breaks the promise of equal elements in every run, and of what was slowed."""
    if differences:
        warn_once(
            "Training is not reproducible, because its data may differ from run to run: "
            f"{'; '.join(differences)}. Give every operation a seed and deterministic=True, draw "
            "with tf.random.stateless_* and a seed from the element (Dataset.enumerate), and leave "
            "TfData's split as it is."
        )
    if slowed:
        warn_once(
            f"To be reproducible, {'; '.join(slowed)}, because in parallel the order of random "
            "draws is not fixed. To run it in parallel, draw with tf.random.stateless_* and a seed "
            "from the element (Dataset.enumerate)."
        )
