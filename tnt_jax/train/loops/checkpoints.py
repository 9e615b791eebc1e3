"""Checkpoints of custom training loops: the state, and the position in the data."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax import _jax
from tnt_jax.distributed.joining.runtime import init
from tnt_jax.job import Slot
from tnt_jax.settings import Settings
from tnt_jax.train.checkpoints.checkpoint import Checkpoints, OnSaveError
from tnt_jax.train.loops.dataset import DistributedDataset
from tnt_jax.train.state import by_path, check_match

_STATE = TypeVar("_STATE")
# Those of `fit` in the same directory hold other notes.
_PREFIX = "tnt_jax_loop"


class LoopCheckpoints:
    """Checkpoints of a custom training loop, so that it goes on where it was interrupted.

    ```python
    checkpoints = tnt.LoopCheckpoints("runs/loop")
    state = checkpoints.restore(state, dataset)
    while dataset.position["epoch"] < 3:
        for batch in dataset:
            state, metrics = train_step(state, batch, key)
            if batch.step % 100 == 99:
                checkpoints.save(state, dataset)
    checkpoints.save(state, dataset)
    checkpoints.close()
    ```

    All processes make the same calls, and the directory is one that all of them see. A checkpoint
    is complete or does not appear, and what is read is what was saved; see docs/survival.md.

    Args:
        directory: Where the checkpoints are; created by the first `save`.
        max_to_keep: Complete checkpoints that stay, older ones are deleted; all if None.
        on_save_error: What happens if a checkpoint cannot be written. `"warn"`: one warning, and
            the next `save` tries again. `"raise"`: the next call raises, on all processes.

    Attributes:
        notes: JSON values that were saved with the checkpoint that `restore` read.

    Raises:
        ValueError: If `max_to_keep` is below 1, or `on_save_error` is unknown.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        max_to_keep: int | None = 2,
        on_save_error: OnSaveError = "warn",
    ) -> None:
        self._checkpoints = Checkpoints(
            directory, max_to_keep=max_to_keep, on_save_error=on_save_error, prefix=_PREFIX
        )
        self.notes: dict[str, Any] = {}

    def restore(self, state: _STATE, dataset: DistributedDataset) -> _STATE:
        """Returns the state of the newest checkpoint that can be read, and seeks its position.

        Without a checkpoint it returns `state` and leaves the dataset where it is.

        Args:
            state: The state before the first step: its structure, shapes and dtypes are those of
                the result, whose arrays are on the host.
            dataset: What the loop reads. With another global batch it goes on at the same row where
                that is possible, with a warning.

        Raises:
            ValueError: On all processes, if the checkpoint is of another state, or rows of the
                dataset would be lost or seen twice; the message gives both values.
            OSError: On all processes, if there are checkpoints and none of them can be read.
        """
        settings = init().settings
        if _is_trial(settings):
            _loops.get().append(_Loop(self, dataset, jax.tree.structure(state)))
            if settings.record_as not in ("killed", "resumed"):
                return state
            assert settings.checkpoint_dir is not None, "The launcher says where."
            folder = Path(settings.checkpoint_dir) / "verify"
            self._checkpoints = Checkpoints(folder, on_save_error="raise", prefix=_PREFIX)
        saved = self._checkpoints.read_newest_valid()
        if saved is None:
            return state
        expected = _arrays(state)
        check_match(expected, saved.arrays)
        dataset.go_on_from(saved.notes["data"])
        self.notes = saved.notes["user"]
        return _with_arrays(state, [saved.arrays[path] for path in expected])

    def save(
        self, state: Any, dataset: DistributedDataset, *, notes: Mapping[str, Any] | None = None
    ) -> None:
        """Starts a checkpoint, and returns as soon as the arrays are copied to the host.

        Args:
            state: The state that the last step returned: a pytree of arrays, which may hold random
                keys and NNX modules. Parameters under the name `params` must be finite; otherwise
                the checkpoint is refused with a warning.
            dataset: What the loop reads; the position is that after the last batch it gave.
            notes: JSON values to save along, such as the best loss so far.

        Raises:
            LockedError: On all processes, if another job writes to the directory.
            OSError: On all processes, if this or the previous checkpoint could not be written and
                `on_save_error` is `"raise"`.
            TypeError: On all processes, if an array has a dtype that cannot be stored.
            ValueError: On all processes, if two arrays have the same path, or the same name in the
                files, where dots stand for slashes.
        """
        if not _is_trial(init().settings):
            self._save(state, dataset, dict(notes or {}))

    def _save(self, state: Any, dataset: DistributedDataset, notes: dict[str, Any]) -> int | None:
        return self._checkpoints.save(
            _arrays(state),
            step=dataset.position["step"],
            notes={"data": dataset.describe_position(), "user": notes},
        )

    def close(self) -> None:
        """Waits until everything is written, and lets other jobs write to the directory.

        Raises:
            OSError: As `save`.
        """
        self._checkpoints.close()


class _Loop(NamedTuple):
    """A loop that has restored in a process of `tnt-jax`, and the structure of its state."""

    checkpoints: LoopCheckpoints
    dataset: DistributedDataset
    structure: Any


_loops = Slot[list[_Loop]](list)


def is_saving() -> bool:
    """Returns whether a loop has restored under `tnt-jax`, where it would save otherwise."""
    return bool(_loops.get())


def restores(state: Any) -> bool:
    """Returns whether the loop has restored a state of this structure."""
    return bool(_loops.get()) and _loops.get()[-1].structure == jax.tree.structure(state)


def save_recorded(state: Any) -> bool:
    """Saves the state of such a loop; returns whether it was written."""
    checkpoints, dataset, _ = _loops.get()[-1]
    number = checkpoints._save(state, dataset, {})
    checkpoints.close()
    return number is not None


def _is_trial(settings: Settings) -> bool:
    """Returns whether steps are measured or recorded, and nothing is saved where the loop saves."""
    return settings.record_steps is not None or settings.explain_steps is not None


def _arrays(state: Any) -> dict[str, Any]:
    """Returns the arrays of a state by path; random keys as their words."""
    return by_path(
        (jax.tree_util.keystr(path, simple=True, separator="/"), _plain(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    )


def _plain(leaf: Any) -> Any:
    if hasattr(leaf, "dtype"):
        return _jax.key_words(leaf)
    # A Python number becomes, in the first step, an array of this dtype.
    return np.asarray(leaf, jnp.result_type(leaf))


def _with_arrays(state: _STATE, arrays: list[Any]) -> _STATE:
    leaves, structure = jax.tree.flatten(state)
    return structure.unflatten(
        jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
        if _jax.is_key(leaf)
        else array
        for leaf, array in zip(leaves, arrays, strict=True)
    )
