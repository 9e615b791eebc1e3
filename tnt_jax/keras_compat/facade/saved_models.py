"""Whole models from files, configurations and other models, such as `load_model`."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from flax import traverse_util

from tnt_jax.adapters.base import Variables
from tnt_jax.distributed.host import collectives
from tnt_jax.keras_compat.facade.model import Model
from tnt_jax.keras_compat.keras_objects import is_keras
from tnt_jax.keras_compat.saving import keras_files
from tnt_jax.keras_compat.saving.descriptions import (
    Rebuilder,
    construct,
    described_arguments,
    is_linen,
    model_around,
    model_from,
)
from tnt_jax.keras_compat.saving.weight_files import check_path
from tnt_jax.log import logger
from tnt_jax.train.checkpoints.checkpoint import Checkpoints


def save_model(
    model: Any,
    filepath: str | os.PathLike[str],
    overwrite: bool = True,
    *,
    tnt_save_all_devices: bool = False,
) -> None:
    """Saves a `tnt_jax.Model`, or a Keras model as if it were wrapped, as `Model.save` does.

    Raises:
        ValueError: If `model` is neither, or has no variables and does not know its inputs.
    """
    wrapped = _wrapped(model, "save_model")
    if not wrapped.built:
        wrapped.build(None)
    wrapped.save(filepath, overwrite, tnt_save_all_devices=tnt_save_all_devices)


def load_model(
    filepath: str | os.PathLike[str],
    *,
    module: Any = None,
    compile: bool = True,
    custom_objects: Mapping[str, Any] | None = None,
    trust: bool = False,
) -> Model:
    """Returns a model that `Model.save` wrote, or that Keras wrote, also unzipped.

    Every process must call it.

    A compiled model is restored as compiled, with its optimizer state, so that
    `fit(initial_epoch=...)` continues as if it had never been interrupted. Objects that cannot be
    written to a file, such as functions defined inside functions, are lost: then compile the model
    again and call `load_weights(filepath)`, which restores the optimizer state.

    A file cannot choose which code runs: it may only name model components of Flax, JAX, Optax,
    Keras and tnt_jax (docs/saving.md). Pass your own classes and functions in `custom_objects`.

    Args:
        filepath: Directory or file.
        module: The module to load into, for NNX modules and for others whose arguments cannot be
            written to a file.
        compile: Whether to compile it as it was.
        custom_objects: Your own classes and functions that the model uses, by name: `{"Net": Net}`.
        trust: Whether to import everything else that the file names, and to load a Keras file with
            `safe_mode=False`. Both run code that the file chooses: use it only for files whose
            author you trust.

    Raises:
        FileNotFoundError: If a process does not see the path.
        ValueError: If the file is damaged or has unknown names, or the module must be passed or
            does not fit.
    """
    rebuild = Rebuilder(custom_objects=custom_objects, trust=trust)
    path = Path(filepath)
    collectives.call_on_all_processes(lambda: check_path(path))
    if keras_files.holds_keras_model(path):
        return _load_keras_file(path, compile, rebuild)
    if path.is_dir():
        saved = Checkpoints(path).read()
        notes, arrays = saved.notes, saved.arrays
    else:
        notes, arrays = keras_files.read_notes(path), keras_files.read_extra(path)
    if module is not None:
        model = model_around(module, notes.get("options", {"dict": []}), rebuild, Model)
    elif "config" in notes:
        model = model_from(notes["config"], rebuild, Model)
    else:
        why = ""
        if "config_problem" in notes:
            why = f" It could not be described: {notes['config_problem']}"
        raise ValueError(
            f"{path} does not say which module it holds: pass module=... to load_model.{why}"
        )
    _build(model, arrays, notes)
    if compile:
        _compile(model, path, notes, rebuild)
    model.training_state.restore(arrays)
    return model


def clone_model(model: Any) -> Model:
    """Returns a model with the same module, or Keras model, and fresh weights, not compiled.

    An NNX module cannot be initialized again: its clone keeps the weights.
    """
    wrapped = _wrapped(model, "clone_model")
    module, options = wrapped.module, wrapped.options
    if is_keras(module):
        import keras

        return Model(keras.models.clone_model(module), **options)
    if hasattr(module, "clone"):
        return Model(module.clone(), **options)
    from flax import nnx

    return Model(nnx.clone(module), **options)


def model_from_config(
    config: Mapping[str, Any],
    *,
    custom_objects: Mapping[str, Any] | None = None,
    trust: bool = False,
) -> Model:
    """Returns a model from a result of `Model.get_config`, with fresh weights, not compiled.

    `custom_objects` and `trust` are those of `load_model`.

    Raises:
        ValueError: If the configuration names what is not known, or is none.
    """
    return Model.from_config(config, custom_objects, trust=trust)


def model_from_json(
    text: str, *, custom_objects: Mapping[str, Any] | None = None, trust: bool = False
) -> Model:
    """Returns a model from a result of `Model.to_json`; otherwise as `model_from_config`."""
    rebuild = Rebuilder(custom_objects=custom_objects, trust=trust, caller="model_from_json")
    return model_from(keras_files.read_json(text), rebuild, Model)


def _wrapped(model: Any, function: str) -> Model:
    if isinstance(model, Model):
        return model
    if is_keras(model):
        return Model(model)
    raise ValueError(
        f"{function} needs a tnt_jax.Model or a Keras model, but got {type(model).__name__}."
    )


def _compile(model: Model, path: Path, notes: Mapping[str, Any], rebuild: Rebuilder) -> None:
    """Compiles a model as its notes say, or warns that they could not say how."""
    if "compile" in notes:
        given = described_arguments(rebuild(notes["compile"]), model.compile)
        construct(model.compile, "compile", [], given)
    elif "compile_problem" in notes:
        logger.warning(
            "The model is not compiled: %s Call compile(...), then load_weights(%r).",
            notes["compile_problem"],
            str(path),
        )


def _build(model: Model, arrays: Mapping[str, Any], notes: Mapping[str, Any]) -> None:
    if is_keras(model.module):
        inputs = _inputs_of(model, notes)
        if inputs is None:
            raise ValueError(
                f"The Keras model {model.module.name!r} does not know its inputs: call it on a "
                "sample, and pass it as module=... to load_model."
            )
        model._trainer.build(inputs)
    elif is_linen(model.module):
        parts = traverse_util.unflatten_dict(dict(arrays), sep="/")
        variables = Variables(parts.get("params", {}), parts.get("model_state", {}))
        model._trainer.build_from(variables)
    else:
        model.build(None)


def _inputs_of(model: Model, notes: Mapping[str, Any]) -> Any:
    """Returns what to build a Keras model with, by itself or its file, or None."""
    inputs = model._core.adapter.sample_inputs()
    if not jax.tree.leaves(inputs):
        described = keras_files.described_inputs(notes.get("config", {}))
        # A model that was saved before it was called names none.
        return described if jax.tree.leaves(described) else inputs
    return inputs


def _load_keras_file(path: Path, compile: bool, rebuild: Rebuilder) -> Model:
    import keras

    keras_files.check_links(path)
    notes = keras_files.read_notes(path)
    custom_objects, trust = rebuild.custom_objects, rebuild.trust
    keras_model = keras.models.load_model(
        path, custom_objects=custom_objects, compile=compile and not notes, safe_mode=not trust
    )
    model = model_around(keras_model, notes.get("options", {"dict": []}), rebuild, Model)
    inputs = _inputs_of(model, notes)
    if inputs is not None:
        model._trainer.build(inputs)
    if not compile:
        return model
    _compile(model, path, notes, rebuild)
    if not notes and (given := keras_files.compile_arguments(keras_model, rebuild)):
        model.compile(**given)
    model.training_state.restore(keras_files.read_extra(path))
    return model
