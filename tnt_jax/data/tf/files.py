"""Which files the sources of a `tf.data` pipeline read."""

from itertools import islice
from typing import Any

import tensorflow as tf

from tnt_jax.data.tf import private


def files_of(dataset: Any, *, most: int | None = None) -> list[str]:
    """Returns the existing files that the sources of a pipeline name.

    Args:
        dataset: The pipeline.
        most: Sources with more strings than this are passed over.
    """
    names: list[str] = []
    if type(dataset).__name__ == "TFRecordDatasetV2":
        names = [
            name.decode() for name in private.parameter(dataset, "filenames").as_numpy_iterator()
        ]
    elif not private.inputs(dataset) and any(
        spec.dtype == tf.string for spec in tf.nest.flatten(dataset.element_spec)
    ):
        elements = list(islice(dataset.as_numpy_iterator(), None if most is None else most + 1))
        elements = elements if most is None or len(elements) <= most else []
        strings = (value for element in elements for value in tf.nest.flatten(element))
        names = [
            value.decode() for value in strings if isinstance(value, bytes) and len(value) < 4096
        ]
    found = [name for name in names if tf.io.gfile.exists(name)]
    return list(
        dict.fromkeys(
            [
                *found,
                *(
                    name
                    for source in private.inputs(dataset)
                    for name in files_of(source, most=most)
                ),
            ]
        )
    )
