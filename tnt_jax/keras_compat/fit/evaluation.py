"""Evaluation and prediction: runs a stream of batches through compiled steps."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import Any, Literal

from tnt_jax.adapters.base import CallError
from tnt_jax.data.sources import Source
from tnt_jax.data.streams import EpochStream, open_source, open_stream, read_in_lockstep
from tnt_jax.distributed import stopping
from tnt_jax.distributed.stopping import Points, SharedStop
from tnt_jax.keras_compat.callbacks import CallbackList
from tnt_jax.keras_compat.callbacks.callback_list import may_stop_within_epoch
from tnt_jax.keras_compat.compiling.keras_training import check_prediction_methods
from tnt_jax.keras_compat.fit.data_intake import DataArguments, to_batch
from tnt_jax.keras_compat.fit.elastic import Call, why_not_again
from tnt_jax.keras_compat.fit.hooks import CallbackArguments, PhaseHooks
from tnt_jax.keras_compat.fit.preparation import Shared
from tnt_jax.keras_compat.fit.start_check import compare_starts
from tnt_jax.train.contracts import Batch
from tnt_jax.train.execution import IN_FLIGHT, DeviceBatches
from tnt_jax.train.trainer import device_feed, preparation_of, steps_per_program


def evaluate(
    shared: Shared, data: DataArguments, steps: int | None, callbacks: CallbackArguments
) -> dict[str, float]:
    """Returns loss and metrics over `steps` batches, or all, with their own callbacks."""
    call = Call(shared, trains=False)

    def compute() -> dict[str, float]:
        compare_starts("Model.evaluate", shared.core, data, steps=steps)
        source = open_source("Model.evaluate", lambda: shared.source(data))
        call.begin(lambda: _why_not_elastic(shared, data, source))
        shown = callbacks.open("Model.evaluate", steps=steps or source.num_batches)
        with shown as hooks, stopping.ending_call() as points:
            return evaluate_source(
                shared, source, steps, hooks, points, call, fits_memory=data.fits_memory
            )

    if call.has_ended:
        logs = call.value
    else:
        shared.core.require_compiled()
        logs = call.repeat(compute)
    call.report(logs)
    return logs


def _why_not_elastic(shared: Shared, data: DataArguments, source: Source) -> str | None:
    """Returns why a call cannot begin again with other processes, or None."""
    if not shared.state.built:
        return "the model has no variables yet"
    shared.core.trainer.require_state()
    return shared.core.why_not_elastic() or why_not_again(
        source, is_distributed=data.distribute, rows_per_rank=(data.rows_per_rank,)
    )


def evaluate_source(
    shared: Shared,
    source: Source,
    steps: int | None,
    hooks: CallbackList,
    points: Points,
    call: Call,
    *,
    fits_memory: bool = False,
) -> dict[str, float]:
    """Returns loss and metrics over a source; with `fits_memory` in passes that fit a device."""
    trainer = shared.core.trainer
    stream, item = open_stream("Model.evaluate", lambda: source, steps=steps)
    first = to_batch(item)
    if fits_memory:
        shared.core.ask_for_passes()
    shared.prepare(first)
    shared.check_rows(first, train=False)
    if fits_memory:
        group = preparation_of(trainer, to_batch, threaded=True)([item])
        trace = partial(trainer.trace_evaluation, group)
        shared.core.fit_memory("evaluate", first, trace)
    shared.progress.stop_evaluating = False
    hooks.call("on_test_begin", {})
    running = _steps(shared, "test", stream, steps, first, hooks, points, call)
    with running as (feed, phase):
        sums = trainer.evaluate(feed, phase)
        phase.end_group(sums)
        logs = shared.core.logs(sums)
    hooks.call("on_test_end", logs)
    return logs


def predict(
    shared: Shared, data: DataArguments, steps: int | None, callbacks: CallbackArguments
) -> Any:
    """Returns the outputs for `steps` batches, or for all, as host arrays `[examples, ...]`."""
    core, call = shared.core, Call(shared, trains=False)
    if call.has_ended:
        return call.value
    check_prediction_methods(core.module)

    def compute() -> Any:
        compare_starts("Model.predict", core, data, steps=steps)
        stream, item = open_stream("Model.predict", lambda: shared.source(data), steps=steps)
        first = to_batch(item)
        if data.fits_memory:
            core.ask_for_passes()
        shared.build_for(first)
        call.begin(lambda: _why_not_elastic(shared, data, stream.source))
        shared.check_outputs(first)
        if data.fits_memory:
            group = preparation_of(core.trainer, to_batch, threaded=True)([item])
            core.fit_memory("predict", first, partial(core.trainer.trace_prediction, group))
        shared.progress.stop_predicting = False
        shown = callbacks.open("Model.predict", steps=steps or stream.source.num_batches)
        with shown as hooks, stopping.ending_call() as points:
            running = _steps(shared, "predict", stream, steps, first, hooks, points, call)
            with running as (feed, phase):
                hooks.call("on_predict_begin", {})
                try:
                    outputs = core.trainer.predict(feed, phase)
                except CallError as error:
                    # The message says what to do; the traceback does not help.
                    raise CallError(str(error)) from None
                phase.end_group(None)
                hooks.call("on_predict_end", {})
        return outputs

    outputs = call.repeat(compute)
    call.report(None)
    return outputs


@contextmanager
def _steps(
    shared: Shared,
    phase: Literal["test", "predict"],
    stream: EpochStream,
    steps: int | None,
    first: Batch,
    hooks: CallbackList,
    points: Points,
    call: Call,
) -> Iterator[tuple[Iterator[DeviceBatches], PhaseHooks]]:
    """Yields the batches on the devices, and what runs around their steps and may end them."""
    core, compilation = shared.core, shared.core.compilation
    wanted = 1 if compilation is None else compilation.steps_per_execution or 1
    num_steps = steps_per_program(core.trainer, wanted, first)
    what = "evaluate" if phase == "test" else phase
    batches = read_in_lockstep(
        islice(stream.epoch(0), steps), stream.source, where=f"the data to {what}"
    )
    with (
        SharedStop(ahead=IN_FLIGHT + 1, is_watched=may_stop_within_epoch(hooks.callbacks)) as stop,
        device_feed(
            core.trainer,
            batches,
            to_batch,
            threaded=not stream.source.in_memory,
            num_steps=num_steps,
            gives_up=points.gives_up,
        ) as feed,
    ):
        phase_hooks = PhaseHooks(
            phase,
            hooks,
            progress=shared.progress,
            read=core.logs,
            stop=stop,
            note_step=call.note_step,
            num_steps=num_steps,
        )
        yield points.before_each(feed), phase_hooks


def as_returned(
    logs: dict[str, float], return_dict: bool
) -> float | list[float] | dict[str, float]:
    """Returns logs as `evaluate` does: as a dict on request, else as a list or a single value."""
    if return_dict:
        return logs
    values = list(logs.values())
    return values[0] if len(values) == 1 else values
