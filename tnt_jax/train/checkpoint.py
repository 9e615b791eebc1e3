"""Checkpoints through Orbax: the whole training state and the position in the data.

They are atomic and written in the background.

```python
checkpoints = Checkpoints("runs/a", max_to_keep=2)
# Returns when the arrays are copied; writing goes on.
checkpoints.save(trainer.state, position=Position(epoch=3, batch=0))
checkpoints.wait()

saved = Checkpoints("runs/a").read()
trainer.set_state(with_arrays(trainer.state, saved.arrays))
```

A checkpoint is a folder such as `tnt_jax_step_120`. It appears when it is complete, and an older
one is deleted after that: whenever a process dies, the last complete checkpoint can be read, on any
number of devices and processes. Whatever else lies in the directory is neither read nor removed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import flax.traverse_util
import jax
import numpy as np

from tnt_jax.distributed import collectives
from tnt_jax.distributed.runtime import barrier, init, is_master_rank
from tnt_jax.distributed.stall import in_phase
from tnt_jax.job import Slot
from tnt_jax.train.checkpoint_folders import MARK, OwnFolders
from tnt_jax.train.state import TrainState
from tnt_jax.train.state_arrays import is_array, state_arrays, without_accumulated

if TYPE_CHECKING:
    # Importing Orbax takes longer than everything else: only who saves or restores pays for it.
    import orbax.checkpoint as ocp


def _close_all(managers: dict[tuple[Path, str], Any]) -> None:
    with ExitStack() as closing:
        for manager in managers.values():
            closing.callback(manager.close)


# Managers by directory and prefix: a run that ended by an exception may still write where the next
# one begins.
_open_managers = Slot[dict[tuple[Path, str], Any]](dict, close=_close_all)


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

    In a job of several processes all of them create the object and call its methods together, and
    write one copy together: the directory must be on a file system that all of them see.

    Args:
        directory: Where the checkpoints are; created by the first `save`.
        max_to_keep: Complete checkpoints that stay, older ones are deleted; all if None.
        alone: Whether this process acts by itself, without the others.
        prefix: What the names of the folders begin with. Checkpoints with different prefixes do not
            see each other.

    Raises:
        ValueError: If `max_to_keep` is below 1.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_to_keep: int | None = 1,
        alone: bool = False,
        prefix: str = "tnt_jax_step",
    ) -> None:
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(f"max_to_keep must be at least 1, but is {max_to_keep}.")
        self.directory = Path(directory).absolute()
        self._max_to_keep = max_to_keep
        self._alone = alone
        self._folders = OwnFolders(prefix)
        self._is_clean = False
        self._lazy_manager: ocp.CheckpointManager | None = None

    @in_phase("save")
    def save(
        self,
        state: TrainState,
        *,
        position: Position | None = None,
        extra: Mapping[str, Any] | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> int:
        """Starts a checkpoint and returns its number, as soon as the arrays are copied to the host.

        An earlier `save` that is still being written is waited for first. The number is that of the
        last update, or the next free one.

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
        self._clean()
        number = self._free_number(manager, int(state.step))
        position_note = None if position is None else [position.epoch, position.batch]
        trees = {"state": state_arrays(state), "extra": dict(extra or {})}
        if self._alone:
            trees["state"] = without_accumulated(trees["state"])
            trees = jax.tree.map(np.array, trees)
        saves = {name: ocp.args.PyTreeSave(_nest(tree)) for name, tree in trees.items() if tree}
        notes_save = ocp.args.JsonSave({"position": position_note, "notes": dict(notes or {})})
        manager.save(
            number,
            args=ocp.args.Composite(**saves, about=notes_save),
            custom_metadata=MARK,
            force=True,
        )
        return number

    def newest(self, *, before: int | None = None) -> int | None:
        """Returns the number of the newest complete checkpoint, or None.

        After `save` it is that of the checkpoint being written.

        Args:
            before: Look among those of smaller numbers only.
        """
        manager = self._manager() if self.directory.is_dir() else None
        numbers = (
            []
            if manager is None
            else [number for number in manager.all_steps() if before is None or number < before]
        )
        number = self._agreed(max(numbers, default=-1))
        return None if number < 0 else number

    def shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns shape and dtype of the newest checkpoint's arrays by path.

        Raises:
            FileNotFoundError: If there is no checkpoint.
        """
        metadata = self._manager().item_metadata(self._existing())["state"]
        tree = metadata.tree if hasattr(metadata, "tree") else metadata
        return {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            for path, leaf in state_arrays(tree).items()
        }

    @in_phase("save")
    def read(self, number: int | None = None) -> Saved:
        """Returns a checkpoint, in full on every process.

        Args:
            number: Number of the checkpoint; the newest by default.

        Raises:
            FileNotFoundError: If there is no checkpoint, or if a process does not see it.
        """
        import orbax.checkpoint as ocp

        number, manager = self._existing(number), self._manager()
        about = manager.restore(number, args=ocp.args.Composite(about=ocp.args.JsonRestore()))[
            "about"
        ]
        extra = (
            self._read_tree("extra", number) if (self._folder(number) / "extra").is_dir() else {}
        )
        position = None if about["position"] is None else Position(*about["position"])
        return Saved(number, self._read_tree("state", number), extra, position, about["notes"])

    @in_phase("save")
    def wait(self) -> None:
        """Waits until everything is written.

        Raises:
            OSError: If a checkpoint could not be written.
        """
        if (manager := self._open_manager()) is not None:
            manager.wait_until_finished()

    def close(self) -> None:
        """Waits until everything is written and frees the threads that write."""
        if (manager := self._open_manager()) is not None:
            del _open_managers.get()[self._key]
            manager.close()
        self._lazy_manager = None

    def remove_all(self) -> None:
        """Removes all checkpoints with this prefix, and the directory if it is empty then.

        In a job of several processes all of them call it, unless they act alone.
        """
        self.close()
        if not self._alone:
            barrier()
        if self._alone or is_master_rank():
            self._folders.remove_all(self.directory)

    @property
    def _key(self) -> tuple[Path, str]:
        return self.directory, self._folders.prefix

    def _folder(self, number: int) -> Path:
        return self.directory / self._folders.build_name(number)

    def _agreed(self, number: int) -> int:
        """Returns the master's number on every process."""
        return number if self._alone else int(collectives.broadcast(np.int64(number)))

    def _free_number(self, manager: ocp.CheckpointManager, wanted: int) -> int:
        """Returns `wanted`, or the first number after all existing ones if that is higher.

        Checkpoints that are being written count, whoever made them.
        """
        latest = manager.latest_step()
        taken = max(-1 if latest is None else latest, self._folders.taken(self.directory))
        return max(wanted, self._agreed(taken) + 1)

    def _clean(self) -> None:
        """Removes what an interrupted run left, before the first checkpoint of this one."""
        if not self._is_clean and (self._alone or is_master_rank()):
            self._folders.remove_unfinished(self.directory)
        self._is_clean = True

    def _existing(self, number: int | None = None) -> int:
        """Returns `number`, by default that of the newest checkpoint, if every process sees it.

        If any process does not, all of them raise.
        """
        number = self.newest() if number is None else number
        error = None
        if number is None:
            error = FileNotFoundError(f"There is no complete checkpoint in {self.directory}.")
        elif not self._folder(number).is_dir():
            error = FileNotFoundError(
                f"Process {jax.process_index()} does not see {self._folder(number)}: the "
                f"directory must be on a file system that all "
                "processes share."
            )
        if self._alone and error is not None:
            raise error
        if not self._alone:
            collectives.raise_on_all_processes(error)
        assert number is not None
        return number

    def _read_tree(self, item: str, number: int) -> dict[str, np.ndarray]:
        import orbax.checkpoint as ocp

        manager = self._manager()
        metadata = manager.item_metadata(number)[item]
        tree = metadata.tree if hasattr(metadata, "tree") else metadata
        arguments = jax.tree.map(
            lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree, is_leaf=is_array
        )
        restored = manager.restore(
            number,
            args=ocp.args.Composite(**{item: ocp.args.PyTreeRestore(restore_args=arguments)}),
        )
        return {path: np.asarray(leaf) for path, leaf in state_arrays(restored[item]).items()}

    def _open_manager(self) -> ocp.CheckpointManager | None:
        """Returns the own manager, unless another object or the end of the job has closed it."""
        is_open = _open_managers.get().get(self._key) is self._lazy_manager
        return self._lazy_manager if is_open else None

    def _manager(self) -> ocp.CheckpointManager:
        if (manager := self._open_manager()) is not None:
            return manager
        self._lazy_manager = self._make_manager()
        return self._lazy_manager

    def _make_manager(self) -> ocp.CheckpointManager:
        import orbax.checkpoint as ocp

        init()
        here = jax.process_index()
        # Two directories may be written at once, each with barriers of its own.
        prefix = hashlib.sha256(str(self._key).encode()).hexdigest()[:16]
        together = ocp.options.MultiprocessingOptions(barrier_sync_key_prefix=prefix)
        alone = ocp.options.MultiprocessingOptions(
            primary_host=here,
            active_processes={here},
            barrier_sync_key_prefix=f"alone_{here}_{prefix}",
        )
        options = ocp.CheckpointManagerOptions(
            max_to_keep=self._max_to_keep,
            step_name_format=self._folders,  # pyright: ignore[reportArgumentType]
            multiprocessing_options=alone if self._alone else together,
            create=not self._alone,
        )
        managers = _open_managers.get()
        if self._key in managers:
            managers.pop(self._key).close()
        if self._alone:
            self.directory.mkdir(parents=True, exist_ok=True)
        managers[self._key] = ocp.CheckpointManager(
            self.directory, options=options, item_handlers=_handlers(options)
        )
        return managers[self._key]


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
