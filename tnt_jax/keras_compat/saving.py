"""Saving and loading: what `Model` offers for weights and files, and the functions of `tnt_jax.models`.

A path that ends in `.weights.h5` or `.safetensors` is one file, `.keras` the file of a wrapped Keras model; any other path is an Orbax
directory with the whole training state, which can be read on another number of devices.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from tnt_jax import _jax, collectives, runtime
from tnt_jax.adapters.base import Adapter, Variables
from tnt_jax.checkpoint import Checkpoints, Position, check_match, state_arrays, with_arrays, without_accumulated
from tnt_jax.keras_compat import keras_files
from tnt_jax.keras_compat.callbacks.placement import Company, check_changes_model, company
from tnt_jax.keras_compat.describe import NotDescribable, describe
from tnt_jax.keras_compat.optimizer_view import OptimizerView
from tnt_jax.keras_compat.weight_files import (
    H5_ENDING,
    SAFETENSORS_ENDING,
    read_h5,
    read_safetensors,
    replacing,
    write_h5,
    write_safetensors,
)
from tnt_jax.keras_compat.wrapped import write_back
from tnt_jax.log import logger
from tnt_jax.loop import Trainer
from tnt_jax.state import TrainState
from tnt_jax.step import Batch

PathLike = str | os.PathLike[str]


class Start(NamedTuple):
    """Where `fit` begins.

    Attributes:
        epoch: First epoch.
        batch: Batches of it that are done.
        sums: Sums of those batches, on the devices; None if there are none.
    """

    epoch: int
    batch: int
    sums: Any


class SavingMixin:
    """Weights, files and the settable optimizer of a `Model`."""

    module: Any
    _adapter: Adapter
    _trainer: Trainer
    options: dict[str, Any]
    _is_fitting: bool
    _given: Mapping[str, Any] | None
    _optimizer: Any
    _transformation: Any

    @property
    def built(self) -> bool:
        """Whether the model has variables."""
        return self._trainer.state is not None

    @property
    def optimizer(self) -> OptimizerView | None:
        """The optimizer: `learning_rate` can be read and set, `iterations` read; None before `compile`."""
        return None if self._given is None else OptimizerView(self._optimizer, self._trainer, self._start_optimizer)

    def get_weights(self) -> list[np.ndarray]:
        """Returns copies of all arrays: in Keras's order for a Keras model, else parameters before model state.

        Raises:
            RuntimeError: If the model has no variables yet.
        """
        state = self._built_state()
        leaves = jax.tree.leaves((state.params, state.model_state))
        return [np.array(leaves[index]) for index in self._order_of_weights(state)]

    def set_weights(self, weights: list[np.ndarray]) -> None:
        """Replaces all arrays, on every process by those of the master; the optimizer's state stays.

        Args:
            weights: Arrays as `get_weights` returns them.

        Raises:
            RuntimeError: If the model has no variables yet.
            ValueError: If the number of arrays or a shape differs.
        """
        check_changes_model("Setting weights")
        state = self._built_state()
        leaves, structure = jax.tree.flatten((state.params, state.model_state))
        order = self._order_of_weights(state)
        shapes = [leaves[index].shape for index in order]
        if [np.shape(weight) for weight in weights] != shapes:
            given = [np.shape(weight) for weight in weights]
            raise ValueError(f"set_weights needs {len(shapes)} arrays of the shapes {shapes}, but got {len(given)}: {given}.")
        hosts = [np.asarray(weight, leaves[index].dtype) for index, weight in zip(order, weights, strict=True)]
        if company() == "together":
            hosts = collectives.broadcast(hosts)
        for index, host in zip(order, hosts, strict=True):
            leaves[index] = _jax.place(host, leaves[index].sharding)
        params, model_state = structure.unflatten(leaves)
        self._trainer.state = replace(state, params=params, model_state=model_state)
        if not self._is_fitting:
            write_back(self._trainer)

    def save(self, filepath: PathLike, overwrite: bool = True, *, tnt_save_all_devices: bool = False) -> None:
        """Saves the model: variables, optimizer state, number of updates, and what is needed to make and compile it again.

        Every process of the job calls it; one copy is written, and when it returns any process may read it. An earlier copy at the
        same path stays readable until the new one is complete.

        Args:
            filepath: A directory, or a name ending in `.keras` for a wrapped Keras model.
            overwrite: False to refuse an existing path.
            tnt_save_all_devices: Whether every process writes a copy of its own, to a path of its own or a local disk.

        Raises:
            FileExistsError: If the path exists and `overwrite` is False.
            RuntimeError: If the model has no variables yet.
        """
        self._save(filepath, overwrite, all_devices=tnt_save_all_devices, notes=self._description())

    def save_weights(self, filepath: PathLike, overwrite: bool = True, *, tnt_save_all_devices: bool = False) -> None:
        """Saves variables, and but for safetensors also optimizer state and number of updates; otherwise like `save`.

        Args:
            filepath: A directory, or a name ending in `.weights.h5` (for a Keras model in Keras's own layout) or `.safetensors`
                (names are paths with dots, such as `params.Dense_0.kernel`).
            overwrite: As in `save`.
            tnt_save_all_devices: As in `save`.

        Raises:
            FileExistsError: If the path exists and `overwrite` is False.
            RuntimeError: If the model has no variables yet.
        """
        self._save(filepath, overwrite, all_devices=tnt_save_all_devices, notes={})

    def load_weights(self, filepath: PathLike) -> None:
        """Loads variables that `save` or `save_weights` wrote; every process reads the file.

        If the model is compiled and the file holds the state of an optimizer of the same kind, that is loaded, too, with the number
        of updates, so that `fit(initial_epoch=...)` goes on as if it had not been interrupted.

        Args:
            filepath: File or directory.

        Raises:
            FileNotFoundError: If a process does not see the path.
            RuntimeError: If the model has no variables yet.
            ValueError: If leaves are missing, too many, or of another shape or dtype; the message names them.
        """
        check_changes_model("Loading weights")
        path, error = Path(filepath), None
        self._built_state()
        self._start_optimizer()
        if not path.exists():
            error = FileNotFoundError(f"Process {runtime.get_process_index()} does not find {path.absolute()}.")
        self._together(error)
        if keras_files.is_keras(self.module) and path.is_file() and path.suffix != SAFETENSORS_ENDING:
            self.set_weights(keras_files.read_weights(self.module, path))
            arrays = keras_files.read_extra(path)
        else:
            arrays = self._read(path)
            self._set_arrays(_only(arrays, "params", "model_state"), "params", "model_state")
        self._set_optimizer_state(_only(arrays, "opt_state", "step"))

    def get_config(self) -> dict[str, Any]:
        """Returns a description of the wrapped module as JSON values, for `from_config`.

        Raises:
            ValueError: If the module cannot be described, as an NNX module, whose constructor's arguments are lost.
        """
        if keras_files.is_keras(self.module):
            return keras_files.describe_model(self.module) | {"options": describe(self.options)}
        return {"module": describe(self.module), "options": describe(self.options)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        """Returns a model from what `get_config` returned, with fresh weights, not compiled."""
        from tnt_jax.keras_compat.saved_models import model_from_config

        return model_from_config(config)

    def to_json(self) -> str:
        """Returns a description of the wrapped module as JSON, for `tnt_jax.models.model_from_json`.

        Raises:
            ValueError: If the module cannot be described.
        """
        return json.dumps(self.get_config())

    def restore(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replaces every part of the training state that `arrays` hold, by path; before `build` as soon as the model is built.

        Args:
            arrays: Arrays of a checkpoint; the state of an optimizer is for a compiled model.
        """
        if not self.built:
            self._waiting = arrays
            return
        self._start_optimizer()
        weights = _only(arrays, "params", "model_state")
        if weights:
            self._set_arrays(weights, "params", "model_state")
        self._set_optimizer_state(_only(arrays, "opt_state", "step"))

    def build_from(self, params: Any, model_state: Any) -> None:
        """Creates the state from host arrays in the form in which a checkpoint holds them, for a Flax module."""
        self._trainer.build_from(Variables(params, model_state))

    def start_saving(self, checkpoints: Checkpoints, *, whole: bool) -> None:
        """Starts a checkpoint in the background, and returns as soon as the arrays are copied.

        Args:
            checkpoints: Where to.
            whole: Whether to add what is needed to make and compile the model again.
        """
        checkpoints.save(self._built_state(), notes=self._description() if whole else {})

    def set_state(self, state: TrainState) -> None:
        """Replaces the whole training state by one of the same structure."""
        self._trainer.set_state(state)

    @property
    def state(self) -> TrainState:
        """The whole training state, on the devices.

        Raises:
            RuntimeError: If the model has no variables yet.
        """
        self._start_optimizer()
        return self._built_state()

    def resume_at(self, position: Position, sums: list[np.ndarray]) -> None:
        """Lets the `fit` that runs begin at a position instead of `initial_epoch`; to be called in `on_train_begin`.

        Args:
            position: Where to go on.
            sums: Leaves of `epoch_sums` at that position; empty at the beginning of an epoch.
        """
        self._resumed = (position, sums)

    def adopt_master_state(self) -> None:
        """Replaces the training state and the first epoch by the master's, on every process."""
        state = self._trainer.whole_state()
        arrays = {path: np.asarray(leaf) for path, leaf in without_accumulated(state_arrays(state)).items()}
        arrays = collectives.broadcast(arrays)
        self._trainer.set_state(with_arrays(state, arrays))
        epoch = int(collectives.broadcast(np.int64(-1 if self._initial_epoch is None else self._initial_epoch)))
        self._initial_epoch = None if epoch < 0 else epoch

    # The name by which Keras's BackupAndRestore says where training goes on.
    _initial_epoch: int | None = None
    _resumed: tuple[Position, list[np.ndarray]] | None = None
    _waiting: Mapping[str, np.ndarray] | None = None

    def _take_start(self, initial_epoch: int, first: Batch) -> Start:
        """Returns where `fit` begins; what callbacks asked for counts once."""
        resumed, self._resumed = self._resumed, None
        epoch, self._initial_epoch = self._initial_epoch or initial_epoch, None
        if resumed is None:
            return Start(epoch, 0, None)
        position, leaves = resumed
        return Start(position.epoch, position.batch, self._trainer.host_sums(leaves, first) if leaves else None)

    def _use_average(self) -> None:
        """Ends training with the averaged weights of an optimizer with `use_ema=True`, as Keras does."""
        if self.optimizer is not None and self.optimizer.use_ema:
            self.optimizer.use_average()

    def _save(self, filepath: PathLike, overwrite: bool, *, all_devices: bool, notes: dict[str, Any]) -> None:
        state, path = self.state, Path(filepath)
        who: Company = "each" if all_devices else company()
        exists = path.exists() and not overwrite
        self._together(FileExistsError(f"{path} exists already: pass overwrite=True or another path.") if exists else None, who)
        is_file = _is_file_name(path, self.module)
        if is_file or who != "together":
            state = self._trainer.whole_state(alone=who == "master")
        if not is_file:
            checkpoints = Checkpoints(path, alone=who != "together")
            checkpoints.save(state, notes=notes)
            checkpoints.close()
            return
        error = None
        if who != "together" or runtime.is_master_rank():
            try:
                self._write_file(path, state, notes)
            except Exception as raised:  # Raised below, on every process.
                error = raised
        self._together(error, who)

    def _write_file(self, path: Path, state: TrainState, notes: dict[str, Any]) -> None:
        arrays = without_accumulated(state_arrays(state))
        with replacing(path) as temporary:
            if path.name.endswith(SAFETENSORS_ENDING):
                write_safetensors(temporary, _only(arrays, "params", "model_state"))
            elif keras_files.is_keras(self.module):
                self._adapter.write_back(Variables(*jax.tree.map(np.array, (state.params, state.model_state))))
                keras_files.write(self.module, temporary, _only(arrays, "opt_state", "step"), notes)
            else:
                write_h5(temporary, arrays)

    def _read(self, path: Path) -> dict[str, np.ndarray]:
        if path.is_dir():
            return Checkpoints(path, alone=company() != "together").read().arrays
        if path.name.endswith(SAFETENSORS_ENDING):
            names = {name.replace("/", "."): name for name in state_arrays(self._built_state())}
            return {names.get(name, name): leaf for name, leaf in read_safetensors(path).items()}
        return read_h5(path)

    def _set_arrays(self, arrays: Mapping[str, np.ndarray], *parts: str) -> None:
        """Replaces the named parts of the state by host arrays, which must fit."""
        state = self._built_state()
        current = state_arrays(state)
        check_match(_only(current, *parts), arrays)
        placed = {path: _jax.place(leaf, current[path].sharding) for path, leaf in arrays.items()}
        self._trainer.state = with_arrays(state, {**current, **placed})
        if "params" in parts and not self._is_fitting:
            write_back(self._trainer)

    def _set_optimizer_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        if self._given is None or not arrays:
            return
        try:
            self._set_arrays(arrays, "opt_state", "step")
        except ValueError as error:
            logger.warning("The optimizer starts afresh, because its state was saved by another one. %s", error)

    def _built_state(self) -> TrainState:
        return self._trainer.require_state()

    def _start_optimizer(self) -> None:
        if self._given is not None:
            if self._transformation is None:
                self._transformation = self._optimizer.transformation()
            steps = self._optimizer.gradient_accumulation_steps or 1
            self._trainer.use_optimizer(self._transformation, accumulation_steps=steps)
        if self._waiting is not None and self.built:
            arrays, self._waiting = self._waiting, None
            self.restore(arrays)

    def _order_of_weights(self, state: TrainState) -> list[int]:
        """Returns for each array of `get_weights` its number among the leaves of parameters and model state."""
        leaves, structure = jax.tree.flatten((state.params, state.model_state))
        numbers = structure.unflatten([np.int64(index) for index in range(len(leaves))])
        exported = self._adapter.export(Variables(*numbers))
        return [int(number) for number in exported] if isinstance(exported, list) else list(range(len(leaves)))

    def _description(self) -> dict[str, Any]:
        """Returns what is needed to make and compile the model again; parts that cannot be described are left out, with a warning."""
        notes: dict[str, Any] = {"options": describe(self.options)}
        parts: dict[str, Callable[[], Any]] = {"config": self.get_config}
        if self._given is not None:
            parts["compile"] = lambda: _describe_compile(self._given or {})
        for name, make in parts.items():
            try:
                notes[name] = make()
            except NotDescribable as error:
                notes[f"{name}_problem"] = str(error)
                logger.info("load_model will need %s: %s", "module=..." if name == "config" else "compile() afterwards", error)
        return notes

    def _together(self, error: Exception | None, who: Company | None = None) -> None:
        """Raises an error, on every process if all of them are here; waits for them."""
        if (who or company()) == "together":
            collectives.raise_together(error)
        elif error is not None:
            raise error


def _describe_compile(given: Mapping[str, Any]) -> Any:
    if getattr(given["optimizer"], "_undecayed", ()):
        raise NotDescribable("the optimizer has weights excluded from weight decay, which cannot be written as JSON.")
    return describe(dict(given), where="compile")


def _is_file_name(path: Path, module: Any) -> bool:
    endings = (H5_ENDING, SAFETENSORS_ENDING, *((".keras", ".h5") if keras_files.is_keras(module) else ()))
    return path.name.endswith(endings)


def _only(arrays: Mapping[str, Any], *parts: str) -> dict[str, Any]:
    return {path: leaf for path, leaf in arrays.items() if path.split("/")[0] in parts}
