"""Evaluation and prediction: runs a stream of batches through compiled steps."""

from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

from tnt_jax.adapters.base import CallError
from tnt_jax.data.sources import Source
from tnt_jax.data.streams import read_in_lockstep
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.stopping import preemption
from tnt_jax.distributed.stopping.preemption import Points
from tnt_jax.distributed.stopping.shared_stop import SharedStop, shared_stop
from tnt_jax.keras_compat.callbacks import CallbackList
from tnt_jax.keras_compat.callbacks.callback_list import may_stop_within_epoch
from tnt_jax.keras_compat.compiling.keras_training import check_prediction_methods
from tnt_jax.keras_compat.fit.data_intake import DataArguments, to_batch
from tnt_jax.keras_compat.fit.hooks import CallbackArguments, PhaseHooks
from tnt_jax.keras_compat.fit.preparation import Shared
from tnt_jax.keras_compat.fit.start_check import compare_starts
from tnt_jax.train.execution import IN_FLIGHT
from tnt_jax.train.trainer import device_feed, steps_per_program


def evaluate(
    shared: Shared, data: DataArguments, steps: int | None, callbacks: CallbackArguments
) -> dict[str, float]:
    """Returns loss and metrics over `steps` batches, or all, with their own callbacks."""
    shared.core.require_compiled()
    compare_starts("Model.evaluate", shared.core, data, steps=steps)
    source = collectives.call_on_all_processes(lambda: shared.intake.source(data))
    num_steps = steps or source.num_batches
    shown = callbacks.open("Model.evaluate", steps=num_steps)
    with shown as hooks, preemption.ending_call() as points:
        return evaluate_source(shared, source, steps, hooks, points)


def evaluate_source(
    shared: Shared, source: Source, steps: int | None, hooks: CallbackList, points: Points
) -> dict[str, float]:
    """Returns loss and metrics over a source, as for the validation data of `fit`."""
    compilation = shared.core.require_compiled()
    trainer = shared.core.trainer
    stream, first = shared.intake.open("Model.evaluate", source, steps=steps)
    shared.preparation.prepare(first)
    shared.preparation.check_rows(first, train=False)
    num_steps = steps_per_program(trainer, compilation.steps_per_execution or 1, to_batch(first))
    shared.progress.stop_evaluating = False
    hooks.call("on_test_begin", {})
    batches = read_in_lockstep(
        islice(stream.epoch(0), steps), stream.source, where="the data to evaluate"
    )
    with (
        _stopping(hooks) as stop,
        device_feed(
            trainer,
            batches,
            to_batch,
            threaded=not source.in_memory,
            num_steps=num_steps,
            gives_up=points.gives_up,
        ) as feed,
    ):
        phase_hooks = PhaseHooks(
            "test",
            hooks,
            progress=shared.progress,
            read=shared.core.logs,
            stop=stop,
            num_steps=num_steps,
        )
        sums = trainer.evaluate(points.before_each(feed), phase_hooks)
        phase_hooks.end_group(sums)
        logs = shared.core.logs(sums)
    hooks.call("on_test_end", logs)
    return logs


def predict(
    shared: Shared, data: DataArguments, steps: int | None, callbacks: CallbackArguments
) -> Any:
    """Returns the outputs for `steps` batches, or for all, as host arrays `[examples, ...]`."""
    check_prediction_methods(shared.core.module)
    compilation = shared.core.compilation
    trainer = shared.core.trainer
    compare_starts("Model.predict", shared.core, data, steps=steps)
    stream, item = shared.intake.open("Model.predict", data, steps=steps)
    first = to_batch(item)
    source = stream.source
    shared.builder.build_for(first)
    shared.preparation.check_outputs(first)
    wanted = 1 if compilation is None else compilation.steps_per_execution or 1
    num_steps = steps_per_program(trainer, wanted, first)
    batches = read_in_lockstep(islice(stream.epoch(0), steps), source, where="the data to predict")
    shown = callbacks.open("Model.predict", steps=steps or source.num_batches)
    shared.progress.stop_predicting = False
    with (
        shown as hooks,
        preemption.ending_call() as points,
        _stopping(hooks) as stop,
        device_feed(
            trainer,
            batches,
            to_batch,
            threaded=not source.in_memory,
            num_steps=num_steps,
            gives_up=points.gives_up,
        ) as feed,
    ):
        hooks.call("on_predict_begin", {})
        phase_hooks = PhaseHooks(
            "predict", hooks, progress=shared.progress, read=dict, stop=stop, num_steps=num_steps
        )
        try:
            outputs = trainer.predict(points.before_each(feed), phase_hooks)
        except CallError as error:
            # The message says what to do; the traceback does not help.
            raise CallError(str(error)) from None
        phase_hooks.end_group(None)
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
