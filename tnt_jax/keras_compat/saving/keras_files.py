"""Files in Keras's layouts, with the optimizer state where Keras does not look."""

import copy
import json
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tnt_jax.keras_compat.saving import keras_descriptions
from tnt_jax.keras_compat.saving.descriptions import Rebuilder, describe
from tnt_jax.keras_compat.saving.weight_files import (
    H5_ENDING,
    check_links_of,
    read_h5,
    read_h5_notes,
    write_h5,
)
from tnt_jax.log import logger

_NOTES, _ARRAYS = "tnt_jax.json", "tnt_jax.h5"
_KERAS_CONFIG, _KERAS_METADATA = "config.json", "metadata.json"


def describe_model(model: Any, inputs: Any) -> dict[str, Any]:
    """Returns the configuration of a Keras model as JSON values."""
    listed = jax.tree.map(
        lambda x: f"{np.dtype(x.dtype).name} {' '.join(map(str, x.shape))}", inputs
    )
    return {"keras": keras_descriptions.describe(model), "inputs": describe(listed)}


def described_inputs(config: Mapping[str, Any]) -> Any:
    """Returns the inputs that were passed to `describe_model`; None if they are unknown."""

    def struct(text: Any) -> jax.ShapeDtypeStruct:
        try:
            dtype, *shape = text.split()
            return jax.ShapeDtypeStruct(tuple(map(int, shape)), np.dtype(dtype))
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(
                f"Saved inputs are described as 'float32 1 28 28', but these as {text!r:.100}."
            ) from error

    return jax.tree.map(struct, Rebuilder()(config.get("inputs")))


def write(
    model: Any,
    path: Path,
    arrays: Mapping[str, Any],
    notes: Mapping[str, Any],
    compile_config: Mapping[str, Any] | None,
) -> None:
    """Writes a Keras model, or its weights, to a new file that Keras can read.

    Only the weights are written if the name ends in `.weights.h5`. `arrays` and `notes` are added;
    `compile_config` is what `get_compile_config` of Keras returns, None for the model's own.
    """
    if path.name.endswith(H5_ENDING):
        model.save_weights(path)
        write_h5(path, arrays, mode="a")
        return
    if compile_config is not None and path.suffix == ".keras":
        # Keras asks the model. Its own __setattr__ would track the function.
        object.__setattr__(model, "get_compile_config", lambda: compile_config)
    try:
        model.save(path)
    finally:
        vars(model).pop("get_compile_config", None)
    if path.suffix == ".keras":
        add_to_archive(path, arrays, notes)
        return
    training = None if compile_config is None else _legacy(compile_config)
    texts = {} if training is None else {"training_config": json.dumps(training)}
    write_h5(path, arrays, mode="a", notes=json.dumps(dict(notes)), attributes=texts)


def _legacy(compile_config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns `compile_config` as Keras's legacy files hold it; None, logged, if they cannot."""
    import keras

    def named(value: Any) -> Any:
        if isinstance(value, Mapping):
            if value.get("class_name") == "function":
                return value["config"]
            return value if "class_name" in value else {k: named(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [named(each) for each in value]
        return value

    def full_name(loss: Any) -> Any:
        # The reader takes short names such as "mse" for those of metrics.
        try:
            return getattr(keras.losses.get(loss), "__name__", loss)
        except (TypeError, ValueError):  # It is a function of the user.
            return loss

    optimizer = compile_config["optimizer"]
    try:
        keras.optimizers.get(keras.optimizers.deserialize(copy.deepcopy(optimizer)))
    except Exception as error:  # Keras can raise anything.
        logger.info("Keras will open the file without the arguments of compile: %s", error)
        return None
    given = {name: named(compile_config[name]) for name in keras_descriptions.COMPILE_NAMES}
    given["loss"] = jax.tree.map(
        lambda loss: full_name(loss) if isinstance(loss, str) else loss,
        given["loss"],
        is_leaf=lambda x: x is None or "class_name" in x,
    )
    return given | {"optimizer_config": optimizer}


def add_to_archive(path: Path, arrays: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
    """Adds arrays and notes to a zip file, which is created if necessary."""
    extra = path.with_name(path.name + ".extra")
    try:
        write_h5(extra, arrays)
        with zipfile.ZipFile(path, "a") as file:
            file.write(extra, _ARRAYS)
            file.writestr(_NOTES, json.dumps(dict(notes)))
    finally:
        extra.unlink(missing_ok=True)


def holds_keras_model(path: Path) -> bool:
    """Returns whether a path holds a Keras model, and not a checkpoint or a Flax model."""
    if path.is_dir():
        return (path / _KERAS_CONFIG).is_file() and (path / _KERAS_METADATA).is_file()
    if not zipfile.is_zipfile(path):
        return True
    with zipfile.ZipFile(path) as file:
        return _KERAS_CONFIG in file.namelist()


def read_extra(path: Path) -> dict[str, np.ndarray]:
    """Returns the arrays that `write` added to a file; none for files of Keras."""
    if path.suffix == ".json" or path.is_dir():
        return {}
    if not zipfile.is_zipfile(path):
        return read_h5(path)
    with zipfile.ZipFile(path) as file:
        if _ARRAYS not in file.namelist():
            return {}
        with file.open(_ARRAYS) as arrays:
            return read_h5(arrays)


def check_links(path: Path) -> None:
    """Raises a ValueError if the weights of a Keras model have links to somewhere else."""
    import h5py

    # Keras says what is wrong with a file of another kind.
    with suppress(OSError, zipfile.BadZipFile):
        if not zipfile.is_zipfile(path):
            with h5py.File(path, "r") as weights:
                check_links_of(weights)
            return
        with zipfile.ZipFile(path) as archive:
            for name in filter(lambda name: name.endswith(".h5"), archive.namelist()):
                with archive.open(name) as file, h5py.File(file, "r") as weights:
                    check_links_of(weights)


def read_notes(path: Path) -> dict[str, Any]:
    """Returns the notes that `write` added to a file of a whole model; none for files of Keras."""
    if path.is_dir():
        return {}
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as file:
            text = file.read(_NOTES) if _NOTES in file.namelist() else b"{}"
    else:
        text = read_h5_notes(path) or "{}"
    notes = read_json(text)
    if not isinstance(notes, dict):
        raise ValueError(
            f"The notes in {path} must be a JSON object, but are a {type(notes).__name__}."
        )
    return notes


def read_json(text: str | bytes) -> Any:
    """Returns the value of a JSON text."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("This JSON is nested too deeply.") from error


def compile_arguments(model: Any, rebuild: Rebuilder) -> dict[str, Any] | None:
    """Returns what a Keras model was compiled with, as Keras objects; None if it was not."""
    config = model.get_compile_config() if model.compiled else None
    if not config:
        return None
    given = rebuild({"keras": config})
    return {"optimizer": model.optimizer} | {
        name: given.get(name) for name in keras_descriptions.COMPILE_NAMES
    }
