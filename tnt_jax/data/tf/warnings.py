"""Warnings, once each, about `tf.data` pipelines with unexpected behaviour.

This module does not need TensorFlow.
"""

from tnt_jax.data.layout import RankSlice
from tnt_jax.job import once_per_job
from tnt_jax.log import logger


@once_per_job
def warn_once(text: str) -> None:
    """Warns once per job: an evaluation after every epoch reads the same data again."""
    logger.warning("%s", text)


def warn_of_parts(rank_slice: RankSlice, python_maps: list[str], disordered: list[str]) -> None:
    """Warns, if several processes read, of operations that run for all rows or in different orders.

    Args:
        rank_slice: The process's part of the data axis.
        python_maps: Names of maps that run for all rows because they call Python code.
        disordered: Names of unknown operations after a shuffle without a seed.
    """
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
