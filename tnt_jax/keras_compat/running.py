"""What `Model` does between its public methods: reading data, preparing the steps for it, and running epochs."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import jax

from tnt_jax import collectives, runtime, tuning
from tnt_jax.adapters.base import Adapter
from tnt_jax.collectives import raise_together
from tnt_jax.data.dispatch import Reading, as_source, unpack
from tnt_jax.data.layout import micro_batch_size, num_padded_rows
from tnt_jax.data.sources import HostBatch, Source
from tnt_jax.data.stream import EpochStream
from tnt_jax.execution import Placed, choose_num_steps
from tnt_jax.keras_compat.callbacks import CallbackList
from tnt_jax.keras_compat.compiled import CompileArguments, Compiled
from tnt_jax.keras_compat.divergence import Divergence
from tnt_jax.keras_compat.hooks import PhaseHooks
from tnt_jax.keras_compat.inputs import Weighting, to_batch
from tnt_jax.keras_compat.objective import CompiledObjective
from tnt_jax.keras_compat.saving import Start
from tnt_jax.keras_compat.wrapped import take_over_changes
from tnt_jax.log import logger
from tnt_jax.loop import Trainer
from tnt_jax.step import Batch

# With steps_per_execution="auto", steps of the first epoch that compile and warm up, and steps that are then timed.
_WARM_STEPS, _TIMED_STEPS = 4, 12
# What this process has warned of already.
_WARNED: set[str] = set()
# What this process has started already.
_STARTED: list[str] = []


class Plan(NamedTuple):
    """What `fit` is to do.

    Attributes:
        stream: Training data.
        first: First batch of it.
        weighting: From targets and sample weights to the weights to use.
        initial_epoch: Number of epochs that are done already.
        epochs: Number of the last epoch.
        validation: Validation data, or None.
        validation_steps: Batches of an evaluation; all if None.
        validation_freq: Epochs between evaluations, or the epochs, from 1, that one follows.
    """

    stream: EpochStream
    first: HostBatch
    weighting: Weighting | None
    initial_epoch: int
    epochs: int
    validation: Source | None
    validation_steps: int | None
    validation_freq: int | list[int]


class RunningMixin:
    """Reading data, preparing the steps for it and running epochs; `Model` owns the attributes."""

    stop_training: bool
    _adapter: Adapter
    _trainer: Trainer
    _seed: int
    _arguments: CompileArguments | None
    _compiled: Compiled | CompiledObjective | None
    _optimizer: Any
    _transformation: Any
    _start_optimizer: Callable[[], None]
    _steps_per_execution: int | None
    _is_fitting: bool
    _virtual_ranks: int | None
    _take_start: Callable[[int, Batch], Start]
    _use_average: Callable[[], None]
    _reduction_choices: dict[str, Any]

    def _source(
        self,
        x: Any,
        y: Any,
        sample_weight: Any,
        batch_size: int | None,
        micro: int | None,
        *,
        shuffle: bool = False,
        distribute: bool = True,
    ) -> Source:
        reproducible = self._trainer.virtual_ranks is not None
        reading = Reading(self._trainer.place, batch_size, micro, shuffle, self._seed, distribute, reproducible)
        return as_source(x, y, sample_weight, reading)

    def _validation_source(self, data: Any, batch_size: int | None, micro: int | None, *, distribute: bool) -> Source | None:
        if data is None:
            return None
        x, y, weight = unpack(data)
        return self._source(x, y, weight, batch_size, micro, distribute=distribute)

    def _log_plan(self, stream: EpochStream) -> None:
        """Says once how the data is distributed."""
        source, place = stream.source, self._trainer.place
        num_ranks = place.num_ranks
        size, examples, steps = source.global_batch_size, source.num_examples, stream.num_steps
        logger.info(
            "Global batch %s = %s rows on each of %d %s; %s examples, %s steps per epoch; %s padded row(s) per full batch, "
            "%s in the last one; shuffle seed %d.",
            size, None if size is None else micro_batch_size(size, num_ranks), num_ranks, place.kind, examples or "an unknown number of",
            steps or "an unknown number of", None if size is None else num_padded_rows(size, num_ranks),
            num_padded_rows(examples % size or size, num_ranks) if size and examples else "unknown", self._seed,
        )  # fmt: skip

    def _prepare(self, first: HostBatch, weighting: Weighting | None = None) -> None:
        """Creates variables and compiled functions for data like `first`, and checks it against the losses."""
        trainer = self._trainer
        batch = to_batch(first, weighting)
        self._build_for(batch.inputs)
        if self._compiled is not None:
            return
        assert self._arguments is not None
        if self._arguments.objective is not None:
            compiled = CompiledObjective(self._arguments.objective)
        else:
            compiled = Compiled(self._arguments, trainer.output_shapes(batch), batch.targets)
            raise_together(self._problem_of_first_batch(compiled, batch))
        self._start_optimizer()
        trainer.compile(
            compiled.step_parts(self._adapter.apply),
            self._transformation,
            accumulation_steps=self._optimizer.gradient_accumulation_steps or 1,
        )
        self._compiled = compiled
        runtime.log_start_phase("data read and weights made")

    def _build_for(self, inputs: Any) -> None:
        """Creates the variables, if there are none, and takes over what the user has changed in the wrapped object."""
        self._trainer.build(inputs)
        # While fit runs, the wrapped object is behind.
        if not self._is_fitting:
            take_over_changes(self._trainer, inputs)

    def _run_epochs(self, plan: Plan, hooks: CallbackList) -> None:
        """Trains epoch by epoch, with validation and callbacks."""
        self.stop_training = False
        hooks.call("on_train_begin", {})
        logs: dict[str, float] = {}
        divergence = Divergence()
        start = self._take_start(plan.initial_epoch, to_batch(plan.first, plan.weighting))
        plan.stream.seek(start.epoch, start.batch, first_epoch=plan.initial_epoch)
        for epoch in range(start.epoch, plan.epochs):
            hooks.call("on_epoch_begin", epoch, {})
            logs = self._train_epoch(plan.stream, epoch, hooks, plan.weighting, start if epoch == start.epoch else None)
            if plan.validation is not None and _is_due(epoch + 1, plan.validation_freq):
                found = self._evaluate(plan.validation, plan.validation_steps, hooks)
                logs |= {f"val_{name}": value for name, value in found.items()}
            hooks.call("on_epoch_end", epoch, logs)
            if self._virtual_ranks is not None:
                divergence.check(self._trainer.require_state(), stop_training=self.stop_training)
            if self.stop_training:
                break
        self._use_average()
        hooks.call("on_train_end", logs)

    def _end_in_trials(self, first: HostBatch, weighting: Weighting | None) -> None:
        """Does nothing, or, in a job of `tnt-jax tune`, tries ways to sum gradients and ends the program."""
        if self._trainer.runtime.settings.tune_steps is None:
            return
        assert self._compiled is not None
        step = tuning.Step(
            self._compiled.step_parts(self._adapter.apply),
            self._transformation,
            accumulation_steps=self._optimizer.gradient_accumulation_steps or 1,
            num_steps=self._steps_per_execution or 1,
        )
        by_argument = self._reduction_choices["threshold_kb"] is not None
        tuning.tune(self._trainer, step, first, lambda item: to_batch(item, weighting), by_argument=by_argument)
        raise SystemExit

    def _problem_of_first_batch(self, compiled: Compiled, batch: Batch) -> ValueError | None:
        """Returns what is wrong with this process's rows of the first batch, if anything."""
        rows = int(batch.mask.sum()) if batch.mask is not None else len(jax.tree.leaves(batch.inputs)[0])
        outputs = self._trainer.local_outputs(batch) if compiled.looks_at_outputs else None
        try:
            compiled.check_first_batch(outputs, batch.targets, rows=rows)
        except ValueError as error:
            return error
        return None

    def _train_epoch(
        self, stream: EpochStream, epoch: int, hooks: CallbackList, weighting: Weighting | None, start: Start | None
    ) -> dict[str, float]:
        around = PhaseHooks("train", hooks, model=self, read=self._logs)
        execution = _Execution(self._trainer, around, lambda item: to_batch(item, weighting), not stream.source.in_memory)
        if start is not None:
            execution.index, execution.sums = start.batch, start.sums
        batches = stream.epoch(epoch)
        start_s = time.perf_counter()
        if self._steps_per_execution is None:
            self._time_steps(execution, batches, available=stream.num_steps)
        if not self.stop_training:
            execution.run(batches, num_steps=self._steps_per_execution or 1)
        if execution.sums is None:
            raise ValueError(f"The dataset gave no batch in epoch {epoch + 1}. A generator is read once: pass steps_per_epoch.")
        _report_waiting(epoch, execution.input_wait_s, time.perf_counter() - start_s)
        logs = self._logs(execution.sums)
        if not math.isfinite(logs["loss"]):
            logger.warning(
                "The training loss of epoch %d is %s: inputs or weights hold NaN or infinity.", epoch + 1, logs["loss"]
            )
        return logs

    def _time_steps(self, execution: "_Execution", batches: Iterator[HostBatch], *, available: int | None) -> None:
        """Runs the first steps one by one and chooses the number of steps of a program, the same on every process."""
        execution.run(islice(batches, _WARM_STEPS))
        first, start = execution.index, time.perf_counter()
        if not self.stop_training:
            execution.run(islice(batches, _TIMED_STEPS))
        num_timed = execution.index - first
        if num_timed == _TIMED_STEPS:
            step_s = (time.perf_counter() - start) / num_timed
            chosen = collectives.broadcast(choose_num_steps(step_s, available=available))
            self._steps_per_execution = int(chosen)
            logger.info("A step takes %.2g ms; %d step(s) per program.", step_s * 1000, self._steps_per_execution)

    def _logs(self, sums: Any) -> dict[str, float]:
        """Returns the logs for the sums of an epoch so far."""
        assert self._compiled is not None
        return self._compiled.results(sums) | self._adapter.metric_results(sums["metrics"]["model"])

    def _evaluate(self, source: Source, steps: int | None, hooks: CallbackList) -> dict[str, float]:
        stream = EpochStream(source).require_end(steps)
        first = stream.peek(0)
        self._prepare(first)
        num_steps = self._trainer.steps_per_program(self._steps_per_execution or 1, to_batch(first))
        hooks.call("on_test_begin", {})
        around = PhaseHooks("test", hooks, model=self, read=self._logs)
        batches: Iterator[HostBatch] = islice(stream.epoch(0), steps)
        with self._trainer.feed(batches, to_batch, threaded=not source.in_memory, num_steps=num_steps) as feed:
            logs = self._logs(self._trainer.evaluate(feed, around))
        hooks.call("on_test_end", logs)
        return logs


class _Execution:
    """The steps of one epoch, run in parts.

    Attributes:
        sums: Sums of the steps so far, on the devices; None before the first.
        index: Number of steps so far.
        input_wait_s: Seconds spent waiting for the data.
    """

    def __init__(self, trainer: Trainer, hooks: PhaseHooks, unpack: Callable[[HostBatch], Batch], threaded: bool) -> None:
        self.sums: Any = None
        self.index = 0
        self.input_wait_s = 0.0
        self._trainer, self._hooks, self._unpack, self._threaded = trainer, hooks, unpack, threaded

    def run(self, batches: Iterator[HostBatch], *, num_steps: int = 1) -> None:
        """Runs the steps of some batches, `num_steps` in one program, and waits for the last."""
        first = self.index

        def counted(placed: Iterable[Placed]) -> Iterator[Placed]:
            for item in placed:
                self.index += item.num_steps
                yield item
                if not _STARTED:
                    _STARTED.append("training")
                    runtime.log_start_phase("first step compiled and started")

        with self._trainer.feed(batches, self._unpack, threaded=self._threaded, num_steps=num_steps) as feed:
            self.sums = self._trainer.train_epoch(counted(feed), self._hooks, first_index=first, sums=self.sums)
        self.input_wait_s += feed.wait_s
        jax.block_until_ready(self.sums)


def _report_waiting(epoch: int, input_wait_s: float, epoch_s: float) -> None:
    """Says how long the devices waited for data, and once what to do about it if that is more than a tenth of the time."""
    logger.info("Epoch %d: input_wait_s %.2f of %.2f s.", epoch + 1, input_wait_s, epoch_s)
    if input_wait_s > 0.1 * epoch_s and epoch_s > 1 and "input" not in _WARNED:
        _WARNED.add("input")
        logger.warning(
            "Training waits for its data: %.1f of the %.1f s of epoch %d. Prepare it in parallel (dataset.map(..., "
            "num_parallel_calls=tf.data.AUTOTUNE) and prefetch, or more workers), cache it, or decode less per step.",
            input_wait_s, epoch_s, epoch + 1,
        )  # fmt: skip


def _is_due(epoch: int, freq: int | list[int]) -> bool:
    """Tells whether epoch number `epoch`, from 1, is followed by validation."""
    return epoch % freq == 0 if isinstance(freq, int) else epoch in freq


def check_compile_options(run_eagerly: Any, steps_per_execution: Any, jit_compile: Any) -> None:
    """Raises a ValueError if an option of `compile` cannot be followed."""
    if run_eagerly:
        raise ValueError(
            "run_eagerly=True is not possible: a step is one compiled program. Wrap fit in jax.disable_jit() to debug."
        )
    is_number = isinstance(steps_per_execution, int) and steps_per_execution >= 1
    if not is_number and steps_per_execution != "auto":
        raise ValueError(f"steps_per_execution must be a number from 1 on or 'auto', but is {steps_per_execution!r}.")
    if jit_compile not in (True, False, "auto"):
        raise ValueError(f"jit_compile must be True, False or 'auto', but is {jit_compile!r}.")
    if jit_compile is False:
        logger.warning("jit_compile=False has no effect: steps are always compiled.")
