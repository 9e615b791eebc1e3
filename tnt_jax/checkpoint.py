"""Checkpoints through Orbax: the whole training state and the position in the data, atomic and written in the background.

```python
checkpoints = Checkpoints("runs/a", max_to_keep=2)
checkpoints.save(trainer.state, position=Position(epoch=3, batch=0))  # Returns when the arrays are copied; writing goes on.
checkpoints.wait()

saved = Checkpoints("runs/a").read()
trainer.set_state(with_arrays(trainer.state, saved.arrays))
```

A checkpoint directory holds numbered checkpoints. A number appears when its checkpoint is complete, and an older one is deleted
after that: whenever a process dies, the last complete checkpoint can be read, on any number of devices and processes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flax.traverse_util
import jax
import numpy as np

from tnt_jax import collectives
from tnt_jax.runtime import init
from tnt_jax.state import TrainState

if TYPE_CHECKING:
    # Importing Orbax takes longer than everything else: only who saves or restores pays for it.
    import orbax.checkpoint as ocp

# How many leaves an error names before it says how many there are besides.
_NAMED_LEAVES = 8
_ACCUMULATED = ("accumulated/", "residual/")
# Managers by directory: a run that ended by an exception may still write where the next one begins.
_open_managers: dict[Path, ocp.CheckpointManager] = {}


@dataclass(frozen=True)
class Position:
    """Where training goes on in the data.

    Attributes:
        epoch: Number of the epoch, from 0.
        batch: Batches of that epoch that are done.
    """

    epoch: int
    batch: int


@dataclass(frozen=True)
class Saved:
    """What a checkpoint holds.

    Attributes:
        number: Number of the checkpoint.
        arrays: Host arrays by path, such as `params/Dense_0/kernel`; see `state_arrays`.
        extra: Further host arrays by path.
        position: Position in the data, or None.
        notes: JSON values that were saved along.
    """

    number: int
    arrays: dict[str, np.ndarray]
    extra: dict[str, np.ndarray]
    position: Position | None
    notes: dict[str, Any]


class Checkpoints:
    """A directory of numbered checkpoints.

    In a job of several processes all of them create the object and call its methods together, and write one copy together: the
    directory must be on a file system that all of them see.

    Args:
        directory: Where the checkpoints are; created by the first `save`.
        max_to_keep: Complete checkpoints that stay; older ones are deleted.
        alone: Whether this process acts by itself, without the others.

    Raises:
        ValueError: If `max_to_keep` is below 1.
    """

    def __init__(self, directory: str | os.PathLike[str], *, max_to_keep: int = 1, alone: bool = False) -> None:
        if max_to_keep < 1:
            raise ValueError(f"max_to_keep must be at least 1, but is {max_to_keep}.")
        self.directory = Path(directory).absolute()
        self._max_to_keep, self._alone = max_to_keep, alone
        self._lazy_manager: ocp.CheckpointManager | None = None

    def save(
        self,
        state: TrainState,
        *,
        position: Position | None = None,
        extra: Mapping[str, Any] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> int:
        """Starts a checkpoint and returns its number, as soon as the arrays are copied to the host.

        An earlier `save` that is still being written is waited for first. The number is that of the last update, or the next free one.

        Args:
            state: State to save.
            position: Position in the data.
            extra: Further arrays by path.
            notes: JSON values to save along.

        Raises:
            OSError: If this or an earlier checkpoint could not be written.
        """
        import orbax.checkpoint as ocp

        manager = self._manager()
        newest = self.newest()
        number = max(int(state.step), -1 if newest is None else newest + 1)
        position_note = None if position is None else [position.epoch, position.batch]
        trees = {"state": state_arrays(state), "extra": dict(extra or {})}
        if self._alone:
            trees["state"] = without_accumulated(trees["state"])
            trees = jax.tree.map(np.array, trees)
        saves = {name: ocp.args.PyTreeSave(_nest(tree)) for name, tree in trees.items() if tree}
        notes_save = ocp.args.JsonSave({"position": position_note, "notes": dict(notes or {})})
        manager.save(number, args=ocp.args.Composite(**saves, about=notes_save), force=True)
        return number

    def newest(self) -> int | None:
        """Returns the number of the newest complete checkpoint (of the one being written, after `save`), or None."""
        manager = self._manager() if self.directory.is_dir() else None
        latest = None if manager is None else manager.latest_step()
        number = -1 if latest is None else latest
        number = number if self._alone else int(collectives.broadcast(np.int64(number)))
        return None if number < 0 else number

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of the newest checkpoint's arrays by path.

        Raises:
            FileNotFoundError: If there is no checkpoint.
        """
        metadata = self._manager().item_metadata(self._existing())["state"]
        tree = metadata.tree if hasattr(metadata, "tree") else metadata
        return {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in _flatten(tree).items()}

    def read(self) -> Saved:
        """Returns the newest checkpoint, in full on every process.

        Raises:
            FileNotFoundError: If there is no checkpoint, or if a process does not see it.
        """
        import orbax.checkpoint as ocp

        number, manager = self._existing(), self._manager()
        about = manager.restore(number, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
        extra = self._read_tree("extra") if (self.directory / str(number) / "extra").is_dir() else {}
        position = None if about["position"] is None else Position(*about["position"])
        return Saved(number, self._read_tree("state"), extra, position, about["notes"])

    def wait(self) -> None:
        """Waits until everything is written.

        Raises:
            OSError: If a checkpoint could not be written.
        """
        if self._lazy_manager is not None:
            self._lazy_manager.wait_until_finished()

    def close(self) -> None:
        """Waits until everything is written and frees the threads that write."""
        if self._lazy_manager is not None:
            self._lazy_manager.close()
            if _open_managers.get(self.directory) is self._lazy_manager:
                del _open_managers[self.directory]
            self._lazy_manager = None

    def _existing(self) -> int:
        """Returns the number of the newest checkpoint, or raises on every process if any does not see it."""
        number = self.newest()
        error = None
        if number is None:
            error = FileNotFoundError(f"There is no complete checkpoint in {self.directory}.")
        elif not (self.directory / str(number)).is_dir():
            error = FileNotFoundError(
                f"Process {jax.process_index()} does not see checkpoint {number} in {self.directory}: the directory must be on a file "
                "system that all processes share."
            )
        if self._alone and error is not None:
            raise error
        if not self._alone:
            collectives.raise_together(error)
        assert number is not None
        return number

    def _read_tree(self, item: str) -> dict[str, np.ndarray]:
        import orbax.checkpoint as ocp

        number, manager = self._existing(), self._manager()
        metadata = manager.item_metadata(number)[item]
        tree = metadata.tree if hasattr(metadata, "tree") else metadata
        arguments = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree, is_leaf=_is_leaf)
        restored = manager.restore(number, args=ocp.args.Composite(**{item: ocp.args.PyTreeRestore(restore_args=arguments)}))
        return {path: np.asarray(leaf) for path, leaf in _flatten(restored[item]).items()}

    def _manager(self) -> ocp.CheckpointManager:
        if self._lazy_manager is None:
            import orbax.checkpoint as ocp

            init()
            here = jax.process_index()
            # Two directories may be written at once, each with barriers of its own.
            prefix = hashlib.sha256(str(self.directory).encode()).hexdigest()[:16]
            together = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=prefix)
            alone = ocp.options.MultiprocessingOptions(
                primary_host=here, active_processes={here}, barrier_sync_key_prefix=f"alone_{here}_{prefix}"
            )
            options = ocp.CheckpointManagerOptions(
                max_to_keep=self._max_to_keep,
                cleanup_tmp_directories=True,
                multiprocessing_options=alone if self._alone else together,
                create=not self._alone,
            )
            if self.directory in _open_managers:
                _open_managers.pop(self.directory).close()
            if self._alone:
                self.directory.mkdir(parents=True, exist_ok=True)
            self._lazy_manager = ocp.CheckpointManager(self.directory, options=options, item_handlers=_handlers(options))
            _open_managers[self.directory] = self._lazy_manager
        return self._lazy_manager


def state_arrays(state: TrainState) -> dict[str, Any]:
    """Returns the arrays of a state by path, such as `params/Dense_0/kernel`.

    Args:
        state: State of host or device arrays.
    """
    return _flatten(state)


def with_arrays(state: TrainState, arrays: Mapping[str, Any]) -> TrainState:
    """Returns a state like `state` with other arrays.

    Args:
        state: State whose structure is kept.
        arrays: Arrays by path, as `state_arrays` returns them.

    Raises:
        ValueError: If a path is missing or too many, or a shape or dtype differs; the message names the leaves.
    """
    expected = _flatten(state)
    arrays = _for_ranks(arrays, expected)
    check_match(expected, arrays)
    return jax.tree.structure(state).unflatten([arrays[path] for path in expected])


def without_accumulated(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arrays without what the ranks have accumulated since the last update, of which each process holds its part only."""
    return {path: leaf for path, leaf in arrays.items() if not path.startswith(_ACCUMULATED)}


def check_match(expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Checks that arrays have the paths, shapes and dtypes of others.

    Args:
        expected: Arrays of the model by path.
        found: Arrays of the file by path.

    Raises:
        ValueError: If they do not; the message names the leaves.
    """
    missing = [path for path in expected if path not in found]
    unknown = [path for path in found if path not in expected]
    different = [
        f"{path} (file: {_kind(found[path])}, model: {_kind(leaf)})"
        for path, leaf in expected.items()
        if path in found and _kind(found[path]) != _kind(leaf)
    ]
    parts = [
        f"{what}: {_listed(paths)}"
        for what, paths in (("not in the file", missing), ("not in the model", unknown), ("different", different))
        if paths
    ]
    if parts:
        raise ValueError(
            f"What was saved does not fit the model. Leaves {'; '.join(parts)}. Load it into the model that was saved."
        )


def _for_ranks(arrays: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arrays with accumulated gradients `[ranks, ...]` for another number of ranks: only their sum matters."""
    found = dict(arrays)
    for path, leaf in expected.items():
        if not path.startswith(_ACCUMULATED):
            continue
        saved = found.get(path)
        if saved is None:
            found[path] = np.zeros(leaf.shape, leaf.dtype)
        elif saved.shape[0] != leaf.shape[0] and saved.shape[1:] == leaf.shape[1:]:
            found[path] = np.zeros(leaf.shape, leaf.dtype)
            found[path][0] = np.sum(saved, axis=0)
    return found


def _kind(leaf: Any) -> str:
    return f"{np.dtype(leaf.dtype).name}{list(leaf.shape)}"


def _listed(paths: list[str]) -> str:
    more = f" and {len(paths) - _NAMED_LEAVES} more" if len(paths) > _NAMED_LEAVES else ""
    return ", ".join(paths[:_NAMED_LEAVES]) + more


def _flatten(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_leaf)
    flat = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    assert len(flat) == len(leaves), "Two leaves have the same path."
    return flat


def _is_leaf(node: Any) -> bool:
    # Orbax describes an array by an object that older JAX versions take for a container.
    return hasattr(node, "shape") and hasattr(node, "dtype")


def _nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    return flax.traverse_util.unflatten_dict(dict(flat), sep="/")


def _handlers(options: ocp.CheckpointManagerOptions) -> dict[str, ocp.CheckpointHandler]:
    import orbax.checkpoint as ocp

    multiprocessing = options.multiprocessing_options
    return {
        "state": ocp.PyTreeCheckpointHandler(multiprocessing_options=multiprocessing),
        "extra": ocp.PyTreeCheckpointHandler(multiprocessing_options=multiprocessing),
        "about": ocp.JsonCheckpointHandler(multiprocessing_options=multiprocessing),
    }
