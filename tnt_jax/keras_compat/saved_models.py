"""Whole models from files, configurations and other models: `tnt_jax.models.load_model` and its like."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flax import traverse_util

from tnt_jax import collectives, runtime
from tnt_jax.checkpoint import Checkpoints
from tnt_jax.keras_compat import keras_files
from tnt_jax.keras_compat.describe import is_linen, rebuild
from tnt_jax.keras_compat.model import Model
from tnt_jax.log import logger


def save_model(
    model: Any, filepath: str | os.PathLike[str], overwrite: bool = True, *, tnt_save_all_devices: bool = False
) -> None:
    """Saves a model, as `model.save` does.

    Args:
        model: A `tnt_jax.Model`, or a Keras model, which is saved as if it were wrapped.
        filepath: Where to; see `Model.save`.
        overwrite: False to refuse an existing path.
        tnt_save_all_devices: Whether every process writes a copy of its own.

    Raises:
        ValueError: If `model` is neither.
    """
    wrapped = model if isinstance(model, Model) else Model(model) if keras_files.is_keras(model) else None
    if wrapped is None:
        raise ValueError(f"save_model needs a tnt_jax.Model or a Keras model, but got {type(model).__name__}.")
    if not wrapped.built:
        wrapped.build(keras_files.inputs_of(wrapped.module) if keras_files.is_keras(wrapped.module) else None)
    wrapped.save(filepath, overwrite, tnt_save_all_devices=tnt_save_all_devices)


def load_model(
    filepath: str | os.PathLike[str], *, module: Any = None, compile: bool = True, custom_objects: Mapping[str, Any] | None = None
) -> Model:
    """Returns a model that `Model.save` wrote, or that Keras wrote to a `.keras` file; every process reads it.

    A compiled model comes back compiled, with the state of its optimizer, so that `fit(initial_epoch=...)` goes on as if it had
    not been interrupted. What cannot be written to a file, such as a loss of your own, is lost: then compile it again and call
    `load_weights(filepath)`, which brings the optimizer's state.

    Args:
        filepath: Directory or file.
        module: The module to load into, for NNX modules and for others whose arguments cannot be written to a file.
        compile: Whether to compile it as it was.
        custom_objects: Classes of your own that a Keras model uses, by name.

    Raises:
        FileNotFoundError: If a process does not see the path.
        ValueError: If the module must be passed, or does not fit.
    """
    path = Path(filepath)
    error = (
        None if path.exists() else FileNotFoundError(f"Process {runtime.get_process_index()} does not find {path.absolute()}.")
    )
    collectives.raise_together(error)
    if path.is_dir():
        return _load_directory(path, module, compile, custom_objects)
    return _load_keras_file(path, compile, custom_objects)


def clone_model(model: Any) -> Model:
    """Returns a model with the same module and fresh weights, not compiled.

    Args:
        model: A `tnt_jax.Model` or a Keras model. An NNX module cannot be initialised again: its clone keeps the weights.

    Raises:
        ValueError: If `model` is neither.
    """
    if not isinstance(model, Model) and not keras_files.is_keras(model):
        raise ValueError(f"clone_model needs a tnt_jax.Model or a Keras model, but got {type(model).__name__}.")
    module = model.module if isinstance(model, Model) else model
    options = model.options if isinstance(model, Model) else {}
    if keras_files.is_keras(module):
        import keras

        return Model(keras.models.clone_model(module), **options)
    if hasattr(module, "clone"):
        return Model(module.clone(), **options)
    from flax import nnx

    return Model(nnx.clone(module), **options)


def model_from_config(config: Mapping[str, Any], *, custom_objects: Mapping[str, Any] | None = None) -> Model:
    """Returns a model from what `Model.get_config` returned, with fresh weights, not compiled.

    Args:
        config: Configuration.
        custom_objects: Classes of your own that a Keras model uses, by name.

    Raises:
        ValueError: If a class cannot be imported.
    """
    if "keras" in config:
        import keras

        with keras.saving.custom_object_scope(dict(custom_objects or {})):
            module = keras.saving.deserialize_keras_object(config["keras"])
    else:
        module = rebuild(config["module"])
    return Model(module, **rebuild(config["options"]))


def model_from_json(text: str, *, custom_objects: Mapping[str, Any] | None = None) -> Model:
    """Returns a model from what `Model.to_json` returned, with fresh weights, not compiled.

    Args:
        text: JSON.
        custom_objects: Classes of your own that a Keras model uses, by name.

    Raises:
        ValueError: If a class cannot be imported.
    """
    return model_from_config(json.loads(text), custom_objects=custom_objects)


def _load_directory(path: Path, module: Any, compile: bool, custom_objects: Mapping[str, Any] | None) -> Model:
    saved = Checkpoints(path).read()
    notes = saved.notes
    if module is not None:
        model = Model(module, **rebuild(notes.get("options", {"dict": []})))
    elif "config" in notes:
        model = model_from_config(notes["config"], custom_objects=custom_objects)
    else:
        why = f" It could not be described: {notes['config_problem']}" if "config_problem" in notes else ""
        raise ValueError(f"{path} does not say which module it holds: pass module=... to load_model.{why}")
    _build(model, saved.arrays)
    if compile and "compile" in notes:
        model.compile(**rebuild(notes["compile"]))
    elif compile and "compile_problem" in notes:
        logger.warning(
            "The model is not compiled: %s Call compile(...), then load_weights(%r).", notes["compile_problem"], str(path)
        )
    model.restore(saved.arrays)
    return model


def _build(model: Model, arrays: Mapping[str, Any]) -> None:
    """Gives a model variables of the right structure."""
    if keras_files.is_keras(model.module):
        inputs = keras_files.inputs_of(model.module)
        if inputs is None:
            raise ValueError(
                f"The Keras model {model.module.name!r} does not know its inputs: call it on a sample, and pass it as module=... "
                "to load_model."
            )
        model.build(inputs)
    elif is_linen(model.module):
        parts = traverse_util.unflatten_dict(dict(arrays), sep="/")
        model.build_from(parts.get("params", {}), parts.get("model_state", {}))
    else:
        model.build(None)


def _load_keras_file(path: Path, compile: bool, custom_objects: Mapping[str, Any] | None) -> Model:
    import keras

    notes = keras_files.read_notes(path)
    keras_model = keras.models.load_model(path, custom_objects=custom_objects, compile=compile and not notes)
    model = Model(keras_model, **rebuild(notes.get("options", {"dict": []})))
    given = rebuild(notes["compile"]) if "compile" in notes else keras_files.compile_arguments(keras_model)
    inputs = keras_files.inputs_of(keras_model)
    if inputs is not None:
        model.build(inputs)
    if compile and given:
        model.compile(**given)
        model.restore(keras_files.read_extra(path))
    return model
