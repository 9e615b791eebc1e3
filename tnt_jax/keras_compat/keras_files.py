"""Files in Keras's own layouts for wrapped Keras models, with the state of our optimizer added where Keras does not look."""

import json
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tnt_jax.keras_compat.weight_files import H5_ENDING, read_h5, write_h5

_NOTES, _ARRAYS = "tnt_jax.json", "tnt_jax.h5"


def is_keras(module: Any) -> bool:
    """Tells whether a module is a Keras model, without importing Keras."""
    keras = sys.modules.get("keras")
    return keras is not None and isinstance(module, keras.Model)


def describe_model(model: Any) -> dict[str, Any]:
    """Returns the configuration of a Keras model as JSON values."""
    import keras

    return {"keras": keras.saving.serialize_keras_object(model)}


def write(model: Any, path: Path, arrays: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
    """Writes a Keras model, or its weights if the name ends in `.weights.h5`, to a new file that Keras can read.

    Args:
        model: Model whose variables are up to date.
        path: File to write.
        arrays: Arrays to add: the state of the optimizer.
        notes: JSON values to add.
    """
    if path.name.endswith(H5_ENDING):
        model.save_weights(path)
        write_h5(path, arrays, mode="a")
        return
    model.save(path)
    if path.suffix != ".keras":
        write_h5(path, arrays, mode="a")
        return
    extra = path.with_name(path.name + ".extra")
    try:
        write_h5(extra, arrays)
        with zipfile.ZipFile(path, "a") as file:
            file.write(extra, _ARRAYS)
            file.writestr(_NOTES, json.dumps(dict(notes)))
    finally:
        extra.unlink(missing_ok=True)


def read_weights(model: Any, path: Path) -> list[np.ndarray]:
    """Returns the weights that a file holds for a Keras model; the model itself is given them, too."""
    model.load_weights(path)
    return model.get_weights()


def read_extra(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays that `write` added to a file; none for a file written by Keras alone."""
    if not zipfile.is_zipfile(path):
        return read_h5(path)
    with zipfile.ZipFile(path) as file:
        if _ARRAYS not in file.namelist():
            return {}
        with file.open(_ARRAYS) as arrays:
            return read_h5(arrays)


def read_notes(path: Path) -> dict[str, Any]:
    """Returns the notes that `write` added to a `.keras` file; none for a file written by Keras alone."""
    if not zipfile.is_zipfile(path):
        return {}
    with zipfile.ZipFile(path) as file:
        return json.loads(file.read(_NOTES)) if _NOTES in file.namelist() else {}


def compile_arguments(model: Any) -> dict[str, Any] | None:
    """Returns what a Keras model was compiled with, as Keras objects; None if it was not compiled."""
    import keras

    config = model.get_compile_config() if model.compiled else None
    if not config:
        return None
    given = keras.saving.deserialize_keras_object(config)
    return {name: given.get(name) for name in ("optimizer", "loss", "loss_weights", "metrics", "weighted_metrics")}


def inputs_of(model: Any) -> Any:
    """Returns shapes and dtypes of the inputs of a Keras model, for one row; None if it does not know them."""
    import jax

    if not model.built or getattr(model, "inputs", None) is None:
        return None
    structs = [jax.ShapeDtypeStruct((1, *(size or 1 for size in x.shape[1:])), x.dtype) for x in model.inputs]
    structure = getattr(model, "input", None)
    if isinstance(structure, dict):
        return dict(zip(structure, structs, strict=True))
    return structs[0] if len(structs) == 1 else structs
