"""Training: from the arguments of `fit` to its epochs, in the order in which it happens."""

import gc
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import jax

from tnt_jax.adapters.base import check_trains_the_same
from tnt_jax.data.arguments import is_arrays, takes_batch_size
from tnt_jax.data.elements import unpack
from tnt_jax.data.sources import HostBatch, Source
from tnt_jax.data.streams import EpochStream, Meanwhile, open_source, open_stream, read_in_lockstep
from tnt_jax.distributed import goodput, stopping
from tnt_jax.distributed.elastic import link
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.joining import runtime
from tnt_jax.distributed.liveness import phases
from tnt_jax.distributed.stopping import Points, Preempted, SharedStop
from tnt_jax.job import Slot
from tnt_jax.keras_compat.callbacks import CallbackList, History, SwapEMAWeights
from tnt_jax.keras_compat.callbacks.base import unwrapped
from tnt_jax.keras_compat.callbacks.callback_list import may_stop_within_epoch
from tnt_jax.keras_compat.compiling.compiled import Compiled
from tnt_jax.keras_compat.fit.data_intake import (
    DataArguments,
    FitArguments,
    Plan,
    Unpack,
    carry_out_split,
    class_weighting,
    to_batch,
)
from tnt_jax.keras_compat.fit.elastic import Call, HasEnded, Recovery, why_not_again
from tnt_jax.keras_compat.fit.evaluation import evaluate_source
from tnt_jax.keras_compat.fit.hooks import CallbackArguments, PhaseHooks, Place
from tnt_jax.keras_compat.fit.preparation import Shared
from tnt_jax.keras_compat.fit.resume import (
    count_fit,
    ending_on_request,
    releasing,
    save_and_exit,
)
from tnt_jax.keras_compat.fit.start_check import (
    Divergence,
    compare_sources,
    compare_starts,
    describe_call,
)
from tnt_jax.keras_compat.state.core import Core
from tnt_jax.log import logger
from tnt_jax.sharded.planning import memory_note
from tnt_jax.train.contracts import Batch
from tnt_jax.train.execution import (
    IN_FLIGHT,
    DeviceBatches,
    choose_num_steps,
    described,
    lacks_memory,
)
from tnt_jax.train.trainer import Trainer, device_feed

# What has been in this job already: a step of "training", and a warning of slow "input".
_noted = Slot[set[str]](set, lasts=True)


def _report(epoch: int, input_wait_s: float, epoch_s: float, loss: float) -> None:
    """Tells how long the devices waited for data, and warns of a loss that is no number."""
    logger.info("Epoch %d: input_wait_s %.2f of %.2f s.", epoch + 1, input_wait_s, epoch_s)
    if input_wait_s > 0.1 * epoch_s and epoch_s > 1 and "input" not in _noted.get():
        _noted.get().add("input")
        logger.warning(
            "Training waits for its data: %.1f of the %.1f s of epoch %d. Prepare it in parallel "
            "(dataset.map(..., num_parallel_calls=tf.data.AUTOTUNE) and prefetch, or more "
            "workers), cache it, or decode less per step.",
            input_wait_s,
            epoch_s,
            epoch + 1,
        )
    if not math.isfinite(loss):
        logger.warning(
            "The training loss of epoch %d is %s: inputs or weights hold NaN or infinity, or an "
            "embedding lacks ids of the inputs. compile(on_nan=...) keeps such steps out of the "
            "weights.",
            epoch + 1,
            loss,
        )


# With steps_per_execution="auto", steps of the first epoch that compile and warm up, and steps that
# are then timed.
_WARM_STEPS, _TIMED_STEPS = 4, 12
# Shorter waits for data are not counted: to ask the devices whether they are busy takes time, too.
_SHORTEST_WAIT_S = 1e-4


class FitLoop:
    """One call of `fit`, which trains a model epoch by epoch."""

    # Whether steps are those of training alone: compiled while what precedes them is done, and
    # followed by the end of `fit`, with its state saved, after a signal.
    trains = True

    def __init__(self, shared: Shared, callbacks: CallbackArguments) -> None:
        self._core, self._shared, self._callbacks = shared.core, shared, callbacks
        self._call = Call(shared, trains=True)

    def run(self, data: DataArguments, arguments: FitArguments) -> History:
        """Returns the history; a signal ends it, if a callback can save its state."""
        if self._call.has_ended:
            count_fit(arguments.checkpoint_directory)
            return self._ended()
        callbacks = unwrapped(self._callbacks.callbacks) if self.trains else ()
        with ending_on_request(callbacks) as self._points, releasing(callbacks):
            # Tracing makes many objects that stay, and the collector of garbage in cycles would
            # look through them again and again.
            was_on = gc.isenabled()
            gc.disable()
            try:
                plan = self.prepare(data, arguments)
            finally:
                if was_on:
                    gc.enable()
            return self.fit(plan)

    def _ended(self) -> History:
        """Returns the history of a `fit` that the other processes have ended."""
        history = History()
        history.set_state(self._call.value)
        history.set_model(self._callbacks.model)
        return history

    def prepare(self, data: DataArguments, arguments: FitArguments) -> Plan:
        """Opens the training data and prepares the steps; validation data is opened later."""
        core, shared = self._core, self._shared
        core.require_trainable()
        if data.fits_memory:
            core.ask_for_passes()
        compare_starts("Model.fit", core, data, arguments)
        # Groups of ranks meet here for the first time.
        _ = core.trainer.of_group
        data, arguments = carry_out_split(data, arguments)
        own = link()
        if own is not None and is_arrays(data.x) and data.rows_per_rank is not None:
            # The global batch stays, whatever the number of ranks.
            size = data.rows_per_rank * own.planned * len(runtime.init().local_ranks)
            data = replace(data, batch_size=size, micro_batch_size=None)
        self._data = data
        self._open = partial(
            open_stream,
            "Model.fit",
            partial(shared.source, data, trains=True),
            epoch=arguments.initial_epoch,
            steps_per_epoch=arguments.steps_per_epoch,
            epochs=arguments.epochs,
            validates=arguments.validation_data is not None,
            validation_freq=arguments.validation_freq,
            checkpoint_directory=arguments.checkpoint_directory,
        )
        unpack = partial(to_batch, weighting=class_weighting(arguments.class_weight))
        # A callback that resumes a run may leave no epoch even so.
        has_epochs = arguments.initial_epoch < arguments.epochs
        compiles = self.trains and has_epochs and not data.fits_memory
        with core.trainer.building_meanwhile():
            meanwhile = self._beside_first_batch(unpack, arguments) if compiles else None
            stream, first = self._open(meanwhile=meanwhile)
            plan = Plan(stream, first, unpack, None, arguments)
            batch = unpack(first)
            shared.prepare(batch)
            if arguments.class_weight and isinstance(core.functions, Compiled):
                core.functions.check_classes(arguments.class_weight)
            if not data.fits_memory:
                core.choose_mesh(batch)
            shared.check_rows(batch, train=True, may_run=False, plan=plan)
            if compiles:
                shared.compile_ahead(plan)
        shared.check_rows(batch, train=True)
        if arguments.validation_data is not None:
            shared.check_rows(batch, train=False)
        if data.fits_memory and not runtime.is_to_join():  # It chooses with the others.
            shared.fit_memory(plan)
        return plan

    def _beside_first_batch(self, unpack: Unpack, arguments: FitArguments) -> Meanwhile | None:
        """Returns what prepares the step while the first batch is read; None if nothing can."""
        core = self._core
        is_known = core.require_compiled().functions is not None
        if is_known or core.has_open_mesh or core.fits_memory:
            return None

        def prepare(stream: EpochStream, announced: HostBatch) -> None:
            batch = unpack(announced)
            self._shared.prepare(batch, is_announced=True)
            self._shared.check_rows(batch, train=True, may_run=False)
            self._shared.compile_ahead(Plan(stream, announced, unpack, None, arguments))

        return prepare

    def fit(self, plan: Plan) -> History:
        """Carries out the plan; returns the history, which one of the callbacks keeps."""
        self._shared.log_plan(plan.stream)
        self._shared.resumption.begin(plan.stream, plan.arguments.initial_epoch)
        self._shared.resumption.describe_run(plan, unwrapped(self._callbacks.callbacks))
        self._plan = plan = replace(plan, validation=self._open_validation(plan))
        epochs = range(plan.arguments.initial_epoch, plan.arguments.epochs)
        if self.trains and plan.validation is not None and any(map(plan.validates_after, epochs)):
            self._shared.compile_evaluation_ahead(plan.validation)
        counts = {"epochs": plan.arguments.epochs, "steps": plan.stream.num_steps}
        with self._callbacks.open("Model.fit", **counts) as self._hooks:
            # A callback may call `fit`, which has a history of its own.
            history = self._shared.progress.history
            assert history is not None
            given = partial(describe_call, self._core, self._data, plan.arguments)
            self._recovery = Recovery(self._shared, self._hooks, self._call, given)
            self._call.begin(lambda: self._core.why_not_elastic() or self._why_not_again())
            self._core.prepare_for_loss(goes_on=self._call.can_change)
            try:
                with self._core.fitting(), goodput.training():
                    self._run_epochs()
            except HasEnded:
                return self._ended()
        self._call.report({"epoch": history.epoch, "history": history.history})
        return history

    def _why_not_again(self) -> str | None:
        """Returns why other processes cannot read the data from where training is, or None."""
        arguments = self._plan.arguments
        return why_not_again(
            self._plan.stream.source,
            is_distributed=self._data.distribute and arguments.distribute_validation,
            rows_per_rank=(self._data.rows_per_rank, arguments.validation_micro_batch_size),
        )

    def _open_validation(self, plan: Plan) -> Source | None:
        """Returns the validation data, checked if it is at hand, or None."""
        arguments = plan.arguments
        if arguments.validation_data is None:
            return None
        training = plan.stream.source
        size, micro = arguments.validation_batch_size, arguments.validation_micro_batch_size
        x, y, weight = unpack(arguments.validation_data)
        if size is None and micro is None and takes_batch_size(x):
            size = training.global_batch_size
        held_out = DataArguments(
            x, y, weight, size, micro, distribute=arguments.distribute_validation
        )
        validation = open_source("Model.fit", lambda: self._shared.source(held_out))
        compare_sources("Model.fit", "validation_data", validation)
        self._shared.check_validation(validation)
        return validation

    def _run_epochs(self) -> None:
        """Trains epoch by epoch, from where callbacks resume it; saves and exits on request."""
        plan, hooks, progress = self._plan, self._hooks, self._shared.progress
        progress.stop_training = False
        hooks.call("on_train_begin", {})
        count_fit(plan.arguments.checkpoint_directory)
        start = self._shared.resumption.take(plan.arguments.initial_epoch, plan.unpack(plan.first))
        goodput.account().begin_training(int(self._core.trainer.require_state().step))
        if self._call.joins:
            start = self._go_on(None)
        is_over = False
        try:
            while True:
                try:
                    if not is_over:
                        self._train_from(start)
                    self._core.trainer.of_group.end_training()
                    self._call.end()
                    break
                except Exception as error:
                    if not self._call.is_loss(error):
                        raise
                    start = self._go_on(error)
                    is_over = progress.stop_training and start.batch == 0
        except Preempted:
            save_and_exit(self._shared.resumption.save_now, hooks, progress, self._recovery.logs)
        optimizer = self._shared.state.optimizer
        if optimizer is not None and optimizer.use_ema:
            for callback in hooks.callbacks:
                # It expects no end before the last epoch.
                if isinstance(callback, SwapEMAWeights):
                    callback.swap_out()
            optimizer.use_average()  # Keras does the same.
        hooks.call("on_train_end", self._recovery.logs)

    def _go_on(self, error: Exception | None) -> Place:
        """Returns where training goes on with other processes of an elastic job."""

        def reopen() -> Batch:
            stream, first = self._open()
            plan = replace(self._plan, stream=stream, first=first)
            self._shared.resumption.begin(stream, plan.arguments.initial_epoch)
            self._points = stopping.renewed(self._points)
            self._plan = replace(plan, validation=self._open_validation(plan))
            if self._data.fits_memory:
                self._shared.fit_memory(plan, goes_on=True)
            return plan.unpack(first)

        return self._recovery.go_on(error, reopen)

    def _train_from(self, start: Place) -> None:
        plan, core, hooks, progress = self._plan, self._core, self._hooks, self._shared.progress
        plan.stream.seek(start.epoch, start.batch, first_epoch=plan.arguments.initial_epoch)
        progress.place = start
        divergence = Divergence(forbids_single_stop=core.options.reproducible)
        divergence.check_start(core.trainer.alike_state())
        watches = may_stop_within_epoch(hooks.callbacks)
        ahead = IN_FLIGHT + 1 + core.trainer.of_group.most_apart
        epochs = range(start.epoch, plan.arguments.epochs)
        with SharedStop(ahead=ahead, is_watched=watches) as stop:
            if epochs:
                self._points.pass_one()
            for epoch in epochs:
                self._recovery.begin_epoch(epoch)
                phase_hooks = self.step_hooks(hooks, stop=stop, note_step=self._call.note_step)
                check_trains_the_same(core.adapter)
                begin = start if epoch == start.epoch else None
                with phases.in_phase(""):
                    logs = self._train_epoch(epoch, phase_hooks, begin)
                if logs is None:
                    return
                if plan.validates_after(epoch):
                    logs |= self._validate()
                self._recovery.logs = logs
                hooks.call("on_epoch_end", epoch, logs)
                self._shared.resumption.enter_epoch(epoch + 1)
                progress.stop_training = divergence.check(
                    core.trainer.alike_state(),
                    epoch=epoch + 1,
                    stop_training=progress.stop_training or stop.is_asked,
                )
                if progress.stop_training:
                    return
                self._points.pass_one()

    def step_hooks(
        self, callbacks: CallbackList, kind: type[PhaseHooks] = PhaseHooks, **others: Any
    ) -> PhaseHooks:
        """Returns what is done between the steps of training."""
        core, progress = self._core, self._shared.progress
        given = {"progress": progress, "read": core.training_logs, **others}
        return kind("train", callbacks, before_step=core.read_assigned, **given)

    def _train_epoch(
        self, epoch: int, hooks: PhaseHooks, start: Place | None
    ) -> dict[str, float] | None:
        """Runs an epoch, from `start` on; returns its logs, or None if the data has ended."""
        phases.here().epoch = epoch + 1
        compilation, plan = self._core.require_compiled(), self._plan
        stream, trainer = plan.stream, self._core.trainer.of_group
        steps = _EpochSteps(self._core, plan, hooks, self._points)
        if start is not None:
            steps.index, steps.sums = start.batch, start.sums
        elif kept := jax.tree.leaves(self._shared.progress.place.sums):
            steps.sums = trainer.host_sums(kept, plan.unpack(plan.first))
        batches = read_in_lockstep(
            stream.epoch(epoch),
            stream.source,
            where=f"epoch {epoch + 1}",
            first_step=steps.index + 1,
        )
        start_s = time.perf_counter()
        had_ended = False
        if steps.index > 0:
            # The run that is resumed here may have been asked to end.
            had_ended = collectives.any_process(
                self._shared.progress.stop_training, where="start of the resumed epoch"
            )
            self._shared.progress.stop_training = had_ended
        if compilation.steps_per_execution is None and not had_ended:
            steps.time(batches, available=stream.num_steps)
        if not (had_ended or hooks.is_over):
            steps.run(batches, num_steps=compilation.steps_per_execution or 1)
        if not steps.index and epoch > plan.arguments.initial_epoch:
            logger.warning(
                "The data ended after %d of %d epochs, and training ends with it. A generator is "
                "read once: let it yield steps_per_epoch * epochs batches, or pass data that can "
                "be read again.",
                epoch,
                plan.arguments.epochs,
            )
            return None
        if not steps.index:
            raise ValueError(f"The dataset gave no batch in epoch {epoch + 1}.")
        trainer.end_epoch()
        epoch_s = time.perf_counter() - start_s
        self._shared.progress.epoch_sums = trainer.whole_sums(steps.sums)
        logs = self._core.training_logs(self._shared.progress.epoch_sums)
        _report(epoch, steps.input_wait_s, epoch_s, logs["loss"])
        return logs

    def _validate(self) -> dict[str, float]:
        """Returns the logs of the validation data, under names with `val_`."""
        source, steps = self._plan.validation, self._plan.arguments.validation_steps
        assert source is not None
        with phases.calling("validation"), goodput.phase("validating"):
            found = evaluate_source(
                self._shared, source, steps, self._hooks, self._points, self._call
            )
        return {f"val_{name}": value for name, value in found.items()}


class _EpochSteps:
    """The steps of one epoch, run in parts."""

    def __init__(self, core: Core, plan: Plan, hooks: PhaseHooks, points: Points) -> None:
        self.sums: Any = None
        self.index = 0  # Steps so far.
        self.input_wait_s = 0.0  # The devices had nothing to do but to wait for data.
        self._trainer: Trainer = core.trainer.of_group
        self._compilation = core.require_compiled()
        self._unpack, self._hooks, self._points = plan.unpack, hooks, points
        self._threaded = not plan.stream.source.in_memory
        self._is_stopped = False
        self._has_started = "training" in _noted.get()
        # What is known of the batches that were compiled last, for errors.
        self._described: DeviceBatches | None = None

    def time(self, batches: Iterator[HostBatch], *, available: int | None) -> None:
        """Runs the first steps one by one, and chooses how many a program has on all processes."""
        self.run(islice(batches, _WARM_STEPS))
        first, start = self.index, time.perf_counter()
        if not self._hooks.is_over:
            self.run(islice(batches, _TIMED_STEPS))
        if self.index - first == _TIMED_STEPS:
            step_s = (time.perf_counter() - start) / _TIMED_STEPS
            chosen = int(collectives.broadcast(choose_num_steps(step_s, available=available)))
            self._compilation.steps_per_execution = chosen
            logger.info("A step takes %.2g ms; %d step(s) per program.", step_s * 1000, chosen)

    def run(self, batches: Iterator[HostBatch], *, num_steps: int = 1) -> None:
        """Runs the steps of some batches, `num_steps` in one program, and waits for the last."""
        first, self._hooks.num_steps = self.index, num_steps
        feed = device_feed(
            self._trainer,
            batches,
            self._unpack,
            threaded=self._threaded,
            num_steps=num_steps,
            gives_up=self._points.gives_up,
        )
        try:
            with feed:
                self.sums = self._trainer.train_epoch(
                    self._counted(feed), self._hooks, first_index=first, sums=self.sums
                )
            if not self._is_stopped:
                self._hooks.end_group(self.sums)
            with phases.waiting("last steps of the epoch"):
                jax.block_until_ready(self.sums)
        except jax.errors.JaxRuntimeError as error:
            if lacks_memory(error) and self._described is not None:
                error.add_note(memory_note(self._trainer, self._described))
            raise
        if self._is_stopped:
            raise Preempted

    def _counted(self, groups: Iterable[DeviceBatches]) -> Iterator[DeviceBatches]:
        """Yields and counts steps, and adds up how long devices waited after the first."""
        items = iter(groups)
        while True:
            start = time.perf_counter()
            item = next(items, None)
            waited_s = time.perf_counter() - start
            if waited_s > _SHORTEST_WAIT_S and not self._hooks.is_busy():
                goodput.account().move(waited_s, "data")
                if self._threaded and self._has_started:
                    self.input_wait_s += waited_s
            self._is_stopped = self._points.stops_here()
            if item is None or self._is_stopped:
                return
            self.index += item.num_steps
            if self._hooks.announce(item, self._compilation.compiled_kinds):
                self._described = described(item)
            yield item
            self._hooks.note_step()
            if not self._has_started:
                self._has_started = True
                _noted.get().add("training")
                runtime.log_start_phase("first step compiled and started")
