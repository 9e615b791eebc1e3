"""Evaluation and prediction: runs a stream of batches through compiled steps."""

from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

from tnt_jax.adapters.base import CallError
from tnt_jax.data.lockstep import read_in_lockstep
from tnt_jax.data.sources import Source
from tnt_jax.distributed import collectives, preemption
from tnt_jax.distributed.preemption import Points
from tnt_jax.distributed.shared_stop import SharedStop, shared_stop
from tnt_jax.keras_compat.building import Builder
from tnt_jax.keras_compat.callbacks import CallbackList
from tnt_jax.keras_compat.callbacks.agreement import may_stop_within_epoch
from tnt_jax.keras_compat.core import Core
from tnt_jax.keras_compat.data_intake import DataArguments, DataIntake
from tnt_jax.keras_compat.hooks import CallbackArguments, PhaseHooks
from tnt_jax.keras_compat.inputs import to_batch
from tnt_jax.keras_compat.keras_training import check_prediction_methods
from tnt_jax.keras_compat.preparation import Preparation
from tnt_jax.keras_compat.progress import Progress
from tnt_jax.keras_compat.start_check import compare_starts
from tnt_jax.train.device_feed import device_feed
from tnt_jax.train.execution import IN_FLIGHT
from tnt_jax.train.outputs import steps_per_program


class Evaluator:
    """Computes loss and metrics over data.

    Args:
        core: What the parts of the model share.
        intake: What opens data.
        preparation: What makes the steps ready for it.
        progress: What callbacks read.
    """

    def __init__(
        self, core: Core, intake: DataIntake, preparation: Preparation, progress: Progress
    ) -> None:
        self._core = core
        self._intake = intake
        self._preparation = preparation
        self._progress = progress

    def evaluate(
        self, data: DataArguments, steps: int | None, callbacks: CallbackArguments
    ) -> dict[str, float]:
        """Returns loss and metrics over `steps` batches, or all, with their own callbacks."""
        self._core.require_compiled()
        compare_starts("Model.evaluate", self._core, data, steps=steps)
        source = collectives.call_on_all_processes(lambda: self._intake.source(data))
        num_steps = steps or source.num_batches
        shown = callbacks.open(in_training=False, steps=num_steps)
        with shown as hooks, preemption.ending_call() as points:
            return self.evaluate_source(source, steps, hooks, points)

    def evaluate_source(
        self, source: Source, steps: int | None, hooks: CallbackList, points: Points
    ) -> dict[str, float]:
        """Returns loss and metrics over a source, as for the validation data of `fit`.

        Raises:
            Preempted: If all processes stop at one of the points.
        """
        compilation = self._core.require_compiled()
        trainer = self._core.trainer
        stream, first = self._intake.open("Model.evaluate", source, steps=steps)
        self._preparation.prepare(first)
        self._preparation.check_rows(first, train=False)
        num_steps = steps_per_program(
            trainer, compilation.steps_per_execution or 1, to_batch(first)
        )
        self._progress.stop_evaluating = False
        hooks.call("on_test_begin", {})
        batches = read_in_lockstep(
            islice(stream.epoch(0), steps), stream.source, where="the data to evaluate"
        )
        with _stopping(hooks) as stop, device_feed(
            trainer, batches, to_batch, threaded=not source.in_memory, num_steps=num_steps,
            gives_up=points.gives_up,
        ) as feed:  # fmt: skip
            phase_hooks = PhaseHooks(
                "test", hooks, progress=self._progress, read=self._core.logs, stop=stop
            )
            logs = self._core.logs(trainer.evaluate(points.before_each(feed), phase_hooks))
        hooks.call("on_test_end", logs)
        return logs


class Predictor:
    """Computes the outputs of a model for data.

    Args:
        core: What the parts of the model share.
        intake: What opens data.
        builder: What creates the variables.
        preparation: What makes the steps ready for it.
        progress: What callbacks read.
    """

    def __init__(
        self,
        core: Core,
        intake: DataIntake,
        builder: Builder,
        preparation: Preparation,
        progress: Progress,
    ) -> None:
        self._core = core
        self._intake = intake
        self._builder = builder
        self._preparation = preparation
        self._progress = progress

    def predict(self, data: DataArguments, steps: int | None, callbacks: CallbackArguments) -> Any:
        """Returns the outputs for `steps` batches, or for all, as host arrays `[examples, ...]`."""
        check_prediction_methods(self._core.module)
        compilation = self._core.compilation
        trainer = self._core.trainer
        compare_starts("Model.predict", self._core, data, steps=steps)
        stream, item = self._intake.open("Model.predict", data, steps=steps)
        first = to_batch(item)
        source = stream.source
        self._builder.build_for(first)
        self._preparation.check_outputs(first)
        wanted = 1 if compilation is None else compilation.steps_per_execution or 1
        num_steps = steps_per_program(trainer, wanted, first)
        batches = read_in_lockstep(
            islice(stream.epoch(0), steps), source, where="the data to predict"
        )
        shown = callbacks.open(in_training=False, steps=steps or source.num_batches)
        self._progress.stop_predicting = False
        with (
            shown as hooks,
            preemption.ending_call() as points,
            _stopping(hooks) as stop,
            device_feed(
                trainer, batches, to_batch, threaded=not source.in_memory, num_steps=num_steps,
                gives_up=points.gives_up,
            ) as feed,
        ):  # fmt: skip
            hooks.call("on_predict_begin", {})
            phase_hooks = PhaseHooks(
                "predict", hooks, progress=self._progress, read=dict, stop=stop
            )
            try:
                outputs = trainer.predict(points.before_each(feed), phase_hooks)
            except CallError as error:
                # The message says what to do; the traceback does not help.
                raise CallError(str(error)) from None
            hooks.call("on_predict_end", {})
        return outputs


def _stopping(hooks: CallbackList) -> AbstractContextManager[SharedStop]:
    """Returns the context in which callbacks may end an evaluation or prediction early."""
    return shared_stop(ahead=IN_FLIGHT + 1, is_watched=may_stop_within_epoch(hooks.callbacks))


def as_returned(
    logs: dict[str, float], return_dict: bool
) -> float | list[float] | dict[str, float]:
    """Returns logs as `evaluate` does: as a dict on request, else as a list or a single value."""
    if return_dict:
        return logs
    values = list(logs.values())
    return values[0] if len(values) == 1 else values
