"""`fit` in a process of `tnt-jax verify`: trains for a few steps, and records each of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from tnt_jax.data.sources import Source
from tnt_jax.keras_compat.callbacks import BackupAndRestore, Callback, CallbackList
from tnt_jax.keras_compat.callbacks.base import first_base, unwrapped
from tnt_jax.keras_compat.fit.data_intake import DataArguments, FitArguments, Plan
from tnt_jax.keras_compat.fit.fit_loop import FitLoop
from tnt_jax.keras_compat.fit.hooks import PhaseHooks
from tnt_jax.keras_compat.fit.resume import RATE_CALLBACKS
from tnt_jax.keras_compat.fit.trials.timed import scaled
from tnt_jax.keras_compat.state.core import Core
from tnt_jax.settings import TrialsDone
from tnt_jax.train.checkpoints.checkpoint import Position
from tnt_jax.train.execution import DeviceBatches
from tnt_jax.train.health.recording import Recorder, changed_by_rounding, rounding_unit
from tnt_jax.train.state import state_arrays
from tnt_jax.train.steps.step import own_statistics

# Without an end: it is asked for a backup.
_NEVER = 1 << 30


class RecordedLoop(FitLoop):
    """Trains for a few steps, one at a time, and ends the script.

    Callbacks that only set the learning rate take part; all others, and validation, are left out.
    """

    trains = False

    def prepare(self, data: DataArguments, arguments: FitArguments) -> Plan:
        """Does the same as for training, with the global batch of the lowest number of ranks."""
        arguments = replace(arguments, validation_data=None)
        plan = super().prepare(scaled(self._core, data), arguments)
        self._core.require_compiled().steps_per_execution = 1
        problem = None
        if self._recorder.kind == "passes":
            self._core.ask_for_passes()
            problem = self._core.compute_in_two_passes(plan.unpack(plan.first))
        elif self._recorder.kind == "sharded":
            problem = self._core.shard_optimizer_state()
        if problem is not None:
            self._recorder.leave_out(f"{problem}.")
        return replace(plan, arguments=replace(plan.arguments, validation_data=None))

    def fit(self, plan: Plan) -> NoReturn:
        """Trains, and hands back to the entry of the process."""
        given = unwrapped(self._callbacks.callbacks)
        kept = [callback for callback in given if first_base(callback, RATE_CALLBACKS) is not None]
        arguments = plan.arguments
        is_last = arguments.epochs == arguments.initial_epoch + 1
        first = _first_batch(plan.stream.source, self._recorder.steps, is_last=is_last)
        if first and plan.stream.steps_per_epoch is None:
            kept.append(_StartAt(first))
        if self._recorder.kind in ("killed", "resumed"):
            folder = self._core.trainer.runtime.settings.checkpoint_dir
            assert folder is not None, "The launcher says where."
            verify = Path(folder) / "verify"
            kept.append(BackupAndRestore(verify, _NEVER, delete_checkpoint=False))
        self._callbacks = replace(self._callbacks, callbacks=kept, verbose=0)
        super().fit(plan)
        raise TrialsDone

    def step_hooks(self, callbacks: CallbackList, **others: Any) -> PhaseHooks:
        """Returns what records each step."""
        return super().step_hooks(
            callbacks,
            _RecordingHooks,
            core=self._core,
            recorder=self._recorder,
            save_now=lambda: self._shared.resumption.save_now,
            **others,
        )

    @cached_property
    def _recorder(self) -> Recorder:
        trainer = self._core.trainer
        return Recorder(trainer.runtime, trainer.gather)


class _StartAt(Callback):
    """Begins training at a later batch of the first epoch."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self._batch = batch

    def on_train_begin(self, logs: Any = None) -> None:
        resumption = self.model.resumption
        position = resumption.reached()
        rows = {"rows": self._batch * (position.data["global_batch_size"] or 0)}
        epoch = position.position.epoch
        resumption.resume_at(Position(epoch, self._batch), position.data | rows, [])


@dataclass(eq=False, kw_only=True)
class _RecordingHooks(PhaseHooks):
    """Records what is trained between the hooks of the callbacks."""

    core: Core
    recorder: Recorder
    save_now: Callable[[], Any]

    def announce(self, group: DeviceBatches, known: set[Any]) -> bool:
        """Notes the rows of the next step, and does the same as for training."""
        self._group = group
        self.recorder.note_batch(group.batch, group.real_rows)
        return super().announce(group, known)

    def on_batch_begin(self, index: int) -> None:
        """Records the state before the first step."""
        super().on_batch_begin(index)
        trainer = self.core.trainer
        if self.recorder.has_begun:
            return
        lowered = trainer.lower(self._group)
        text = "" if lowered is None else lowered.as_text()
        arrays, state = self._arrays(), trainer.require_state()
        unit = rounding_unit(arrays, text, trainer.runtime.platform)
        # The step has been traced.
        facts = {"trained_by": "fit", "own_statistics": own_statistics()}
        self.recorder.begin(int(state.step), arrays, unit=unit, **facts)
        if self.recorder.kind == "rounded":
            params = changed_by_rounding(state.params, unit)
            trainer.state = replace(state, params=params)

    def on_batch_end(self, index: int, sums: Any, num_rows: int) -> bool:
        """Records the state after a step; saves and dies in the middle, if that is wanted."""
        is_over = super().on_batch_end(index, sums, num_rows)
        step = int(self.core.trainer.require_state().step)
        place = {"epoch": self.progress.place.epoch, "batch": index, "num_rows": num_rows}
        self.recorder.end_step(step, self._arrays(), self._logs(sums), **place)
        self.recorder.end_killed(lambda: self.save_now()())
        return is_over

    def _arrays(self) -> dict[str, Any]:
        state = self.core.trainer.require_state()
        return state_arrays({"params": state.params, "model_state": state.model_state})


def _first_batch(source: Source, steps: int, *, is_last: bool) -> int:
    """Returns the batch to begin with, so that the end of the epoch is among the steps; else 0."""
    number, size, rows = source.num_batches, source.global_batch_size, source.num_examples
    if not source.in_memory or not (number and size and rows):
        return 0
    if rows % size == 0 or number <= steps:
        return 0
    return number - (steps if is_last else -(-steps // 2))
