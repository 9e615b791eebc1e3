"""Saves and loads the state of a `Model`.

A path without a file extension is a checkpoint directory with the whole training state, which
can be read on another number of devices.
"""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tnt_jax.adapters.base import Variables
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.joining import runtime
from tnt_jax.distributed.liveness.phases import calling
from tnt_jax.files import replacing
from tnt_jax.keras_compat.callbacks.backup_and_restore import BACKUP_PREFIX, newest_backup
from tnt_jax.keras_compat.callbacks.base import Scope, check_changes_model, current_scope
from tnt_jax.keras_compat.keras_objects import is_keras
from tnt_jax.keras_compat.saving import keras_descriptions, keras_files
from tnt_jax.keras_compat.saving.descriptions import NotDescribable, describe
from tnt_jax.keras_compat.saving.weight_files import (
    H5_ENDING,
    SAFETENSORS_ENDING,
    add_checksum,
    check_path,
    is_file_name,
    read_h5,
    read_safetensors,
    write_h5,
    write_safetensors,
)
from tnt_jax.keras_compat.state.core import Core
from tnt_jax.keras_compat.state.model_state import OF_OPTIMIZER, ModelState, only
from tnt_jax.log import logger
from tnt_jax.train.checkpoints.checkpoint import STEP_PREFIX, Checkpoints
from tnt_jax.train.checkpoints.directory import OwnFolders
from tnt_jax.train.state import TrainState, state_arrays, without_parts

PathLike = str | os.PathLike[str]


class Saving:
    """Files of a `Model`."""

    _core: Core
    training_state: ModelState

    @calling("Model.save")
    def save(
        self, filepath: PathLike, overwrite: bool = True, *, tnt_save_all_devices: bool = False
    ) -> None:
        """Saves module, arguments of `compile`, variables, optimizer state and number of updates.

        Every process of the job must call it. One copy is written, which any process may read after
        the call. An earlier copy at the same path stays readable until the new one is complete.

        Args:
            filepath: A directory, or a name ending in `.keras` for one file, which Keras can read
                if the model wraps a Keras model.
            overwrite: False to refuse an existing path.
            tnt_save_all_devices: Whether every process writes its own copy, to its own path or a
                local disk.

        Raises:
            FileExistsError: If the path exists and `overwrite` is False.
            ValueError: If the path has an unsupported file extension, such as `.npz` or one of
                weights alone.
        """
        self._save(filepath, overwrite, all_devices=tnt_save_all_devices, with_model=True)

    @calling("Model.save_weights")
    def save_weights(
        self, filepath: PathLike, overwrite: bool = True, *, tnt_save_all_devices: bool = False
    ) -> None:
        """Saves the variables and, except for safetensors, optimizer state and number of updates.

        Args:
            filepath: A directory, or a name ending in `.weights.h5` (for a Keras model in Keras's
                own layout) or `.safetensors` (names are paths with dots, such as
                `params.Dense_0.kernel`).
            overwrite: As in `save`.
            tnt_save_all_devices: As in `save`.

        Raises:
            FileExistsError: If the path exists and `overwrite` is False.
        """
        self._save(filepath, overwrite, all_devices=tnt_save_all_devices, with_model=False)

    @calling("Model.load_weights")
    def load_weights(self, filepath: PathLike, skip_mismatch: bool = False) -> None:
        """Loads variables that `save` or `save_weights` wrote; every process must call it.

        If the model is compiled and the file holds the state of an optimizer of the same kind, this
        state and the number of updates are loaded, too, so that `fit(initial_epoch=...)` continues
        as if it had never been interrupted.

        Args:
            filepath: File or directory; for a Keras model also the `.weights.json` of weights that
                Keras saved with `max_shard_size`.
            skip_mismatch: Whether leaves that are missing or have another shape or dtype keep their
                values, with a warning that names them. In a Keras model, whole layers do.

        Raises:
            FileNotFoundError: If a process does not see the path.
            ValueError: If the file is damaged, or if leaves are missing or superfluous, or have
                another shape or dtype; the message names them.
        """
        check_changes_model("Loading weights")
        path = Path(filepath)
        self.training_state.require_built()
        self.training_state.start_optimizer()
        _call_in_scope(lambda: check_path(path), current_scope())
        if is_keras(self._core.module) and path.is_file() and path.suffix != SAFETENSORS_ENDING:
            keras_files.check_links(path)
            if skip_mismatch:
                self._core.write_back()
            self._core.module.load_weights(path, skip_mismatch=skip_mismatch)
            self.training_state.set_weights(self._core.module.get_weights())
            arrays = keras_files.read_extra(path)
        else:
            arrays = self._read(path)
            self.training_state.replace_variables(
                only(arrays, "params", "model_state"), skip_mismatch=skip_mismatch
            )
        self.training_state.replace_optimizer_state(arrays)

    def get_config(self) -> dict[str, Any]:
        """Returns a description of the wrapped module as JSON values, for `from_config`.

        Raises:
            ValueError: If the module cannot be described, such as an NNX module, which does not
                keep its constructor's arguments.
        """
        options = {"options": describe(self._core.options.saved())}
        if is_keras(self._core.module):
            inputs = self._core.adapter.sample_inputs()
            return keras_files.describe_model(self._core.module, inputs) | options
        return {"module": describe(self._core.module)} | options

    def to_json(self) -> str:
        """Returns `get_config` as JSON, which `tnt_jax.models.model_from_json` reads."""
        return json.dumps(self.get_config())

    def _save(
        self, filepath: PathLike, overwrite: bool, *, all_devices: bool, with_model: bool
    ) -> None:
        path = Path(filepath)
        is_file = is_file_name(path, of_keras=is_keras(self._core.module), with_model=with_model)
        notes = self._description() if with_model else {}
        state = self.training_state.state
        scope: Scope = "per_process" if all_devices else current_scope()

        def check() -> None:
            if path.exists() and not overwrite:
                raise FileExistsError(
                    f"{path} exists already: pass overwrite=True or another path."
                )

        _call_in_scope(check, scope)
        if is_file or scope != "all_processes":
            state = self._core.trainer.gathered_state(alone=scope == "main_process")
        if not is_file:
            checkpoints = Checkpoints(
                path, max_to_keep=1, on_save_error="raise", alone=scope != "all_processes"
            )
            checkpoints.save(state, notes=notes, must_be_finite=False)
            checkpoints.close()
            return
        writes = scope != "all_processes" or runtime.is_master_rank()
        _call_in_scope(lambda: self._write_file(path, state, notes) if writes else None, scope)

    def _start_saving(self, checkpoints: Checkpoints, *, with_model: bool) -> None:
        """Starts a checkpoint in the background, and returns as soon as the arrays are copied."""
        checkpoints.save(
            self.training_state.require_built(), notes=self._description() if with_model else {}
        )

    def _write_file(self, path: Path, state: TrainState, notes: dict[str, Any]) -> None:
        arrays = without_parts(state_arrays(state))
        with replacing(path) as temporary:
            if path.name.endswith(SAFETENSORS_ENDING):
                write_safetensors(temporary, only(arrays, "params", "model_state"))
            elif is_keras(self._core.module):
                self._core.adapter.write_back(
                    Variables(*jax.tree.map(np.array, (state.params, state.model_state)))
                )
                rest = only(arrays, *OF_OPTIMIZER)
                config, compilation = None, self._core.compilation
                if compilation is not None and compilation.arguments.objective is None:
                    optimizer = self.training_state.optimizer
                    config = keras_descriptions.describe_compile(optimizer, compilation.given)
                keras_files.write(self._core.module, temporary, rest, notes, config)
            elif path.name.endswith(H5_ENDING):
                write_h5(temporary, arrays)
            else:
                keras_files.add_to_archive(temporary, arrays, notes)
            if not path.name.endswith(SAFETENSORS_ENDING):
                add_checksum(temporary)

    def _read(self, path: Path) -> dict[str, np.ndarray]:
        if path.is_dir():
            # Those of a `BackupAndRestore` count in a directory that has no others.
            has_others = OwnFolders(path, STEP_PREFIX).complete()
            is_backup = not has_others and newest_backup(path) is not None
            prefix = BACKUP_PREFIX if is_backup else STEP_PREFIX
            alone = current_scope() != "all_processes"
            like = self.training_state.require_built() if self.training_state.built else None
            return Checkpoints(path, alone=alone, prefix=prefix).read(like=like).arrays
        if path.name.endswith(SAFETENSORS_ENDING):
            state = self.training_state.require_built()
            names = {name.replace("/", "."): name for name in state_arrays(state)}
            return {names.get(name, name): leaf for name, leaf in read_safetensors(path).items()}
        return read_h5(path) if path.name.endswith(H5_ENDING) else keras_files.read_extra(path)

    def _description(self) -> dict[str, Any]:
        """Returns what recreates and compiles the model, without parts that cannot be described."""
        notes: dict[str, Any] = {"options": describe(self._core.options.saved())}
        parts: dict[str, Callable[[], Any]] = {"config": self.get_config}
        if (compilation := self._core.compilation) is not None:
            parts["compile"] = lambda: _describe_compile(compilation.given)
        for name, make in parts.items():
            try:
                notes[name] = make()
            except NotDescribable as error:
                notes[f"{name}_problem"] = str(error)
                logger.info(
                    "load_model will need %s: %s",
                    "module=..." if name == "config" else "compile() afterwards",
                    error,
                )
        return notes


def _describe_compile(given: Mapping[str, Any]) -> Any:
    if getattr(given["optimizer"], "_undecayed", ()):
        raise NotDescribable(
            "the optimizer has weights excluded from weight decay, which cannot be written as JSON."
        )
    return describe(dict(given), where="compile")


def _call_in_scope(function: Callable[[], None], scope: Scope) -> None:
    """Calls a function; its error is raised on all processes, if all of them take part."""
    if scope == "all_processes":
        collectives.call_on_all_processes(function)
    else:
        function()
