"""`fit` in a process of `tnt-jax explain`: times its steps with one thing after another removed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, islice, repeat
from typing import Any, NoReturn

import jax

from tnt_jax import _jax
from tnt_jax.data.feed import Feed
from tnt_jax.data.sources import HostBatch
from tnt_jax.data.streams import full_batches, read_in_lockstep
from tnt_jax.distributed.host.objects import broadcast_object
from tnt_jax.distributed.liveness import phases
from tnt_jax.keras_compat.callbacks import CallbackList
from tnt_jax.keras_compat.callbacks.base import first_base, flat, unwrapped
from tnt_jax.keras_compat.callbacks.callback_list import overrides
from tnt_jax.keras_compat.fit.data_intake import DataArguments, FitArguments, Plan
from tnt_jax.keras_compat.fit.fit_loop import FitLoop
from tnt_jax.keras_compat.fit.hooks import PhaseHooks
from tnt_jax.keras_compat.fit.trials.timed import check_sums, step_to_tune
from tnt_jax.train.contracts import CountedRows, Hooks
from tnt_jax.train.execution import DeviceBatches, stack
from tnt_jax.train.explaining import (
    FUSED,
    KEPT,
    Explaining,
    Reading,
    Timed,
    local_kinds,
    report,
)
from tnt_jax.train.steps.data_parallel import DataParallelSteps
from tnt_jax.train.steps.global_step import GlobalSteps
from tnt_jax.train.timing import tuning
from tnt_jax.train.trainer import Trainer, device_feed, preparation_of

# They would replace what the user has saved, or begin where a run was interrupted.
_SAVING = ("BackupAndRestore", "ModelCheckpoint")


class ExplainLoop(FitLoop):
    """Times the steps of a `fit` in several ways, and tries what may make them faster."""

    trains = False

    def prepare(self, data: DataArguments, arguments: FitArguments) -> Plan:
        """Does the same as for training, without validation."""
        check_sums(self._core, "explain")
        return super().prepare(data, replace(arguments, validation_data=None))

    def fit(self, plan: Plan) -> NoReturn:
        """Reports to the launcher, on the master, and hands back to the entry of the process."""
        given = flat(self._callbacks.callbacks)
        saving = [c for c in given if first_base(getattr(c, "callback", c), _SAVING) is not None]
        kept = replace(self._callbacks, callbacks=[c for c in given if c not in saving])
        self._plan, self._trainer = plan, self._core.trainer
        self._num_steps = self._core.require_compiled().steps_per_execution or 1
        self._reading = Reading(plan.stream, KEPT * self._num_steps)
        self._index, self._sums = 0, None
        self._counts = {"epochs": plan.arguments.epochs, "steps": plan.stream.num_steps}
        with kept.open("Model.fit", **self._counts) as self._hooks, self._core.fitting():
            measured = self._explained()
        left_out = [type(callback).__name__ for callback in unwrapped(saving)]
        report(measured | {"callbacks_left_out": left_out})

    def _explained(self) -> dict[str, Any]:
        """Returns the times of steps with one thing after another removed, as JSON values."""
        phases.here().epoch = 1
        stream = self._plan.stream
        full = full_batches(stream, first_epoch=self._plan.arguments.initial_epoch)
        read = read_in_lockstep(full, stream.source, where="the explained steps")
        items = self._reading.noted(read)
        kept = list(islice(items, KEPT * self._num_steps))
        self._hooks.call("on_train_begin", {})
        prepare = preparation_of(self._trainer, self._plan.unpack, threaded=True)
        self._hooks.call("on_epoch_begin", 0, {})
        group, counting = prepare(kept[: self._num_steps]), CountedRows()
        self._run(iter([group]), counting)
        explaining = Explaining(self._trainer.runtime, self._num_steps, "fit")
        with self._feed(items) as feed, self._feed(cycle(kept)) as of_kept:
            whole, again = iter(feed), iter(of_kept)
            hooks = self.step_hooks(self._hooks, num_steps=self._num_steps)
            kinds: dict[str, Callable[[int], None]] = {
                "as is": lambda n: self._run(islice(whole, n), hooks),
                "no callbacks": lambda n: self._run(islice(whole, n), counting),
                "kept batches": lambda n: self._run(islice(again, n), counting),
                "placed batches": lambda n: self._run(repeat(group, n), counting),
            }
            kinds |= self._local_kinds(kept)
            timed = explaining.time(kinds, alone=["one rank"])
            explaining.count_faults()
            if timed.is_worth_a_trial("as is", "no callbacks"):
                self._try_without_callbacks(explaining, whole)
            is_free = self._num_steps == 1 and self._trainer.steps.fused is not None
            if is_free and self._reading.is_uniform() and timed.is_of_small_batches():
                self._try_fused(explaining, kept, group)
        traced = self._trainer.trace(group)
        if traced is not None and type(self._trainer.steps) is DataParallelSteps:
            explaining.try_channels_last(traced.jaxpr.jaxpr)
        self._try_sums(explaining, timed, kept)
        return explaining.measured(
            timed,
            self._reading,
            lambda: self._trainer.lower_train_step(self._plan.unpack(kept[0])),
            comparison=self._core.require_compiled().dependence,
        )

    def _feed(self, items: Iterator[HostBatch]) -> Feed:
        return device_feed(
            self._trainer,
            items,
            self._plan.unpack,
            threaded=not self._plan.stream.source.in_memory,
            num_steps=self._num_steps,
        )

    def _run(self, groups: Iterator[DeviceBatches], hooks: Hooks) -> None:
        known = self._core.require_compiled().compiled_kinds

        def announced() -> Iterator[DeviceBatches]:
            for group in groups:
                if isinstance(hooks, PhaseHooks):
                    hooks.announce(group, known)
                self._index += group.num_steps
                yield group

        with phases.in_phase("steps"):
            self._sums = self._trainer.train_epoch(
                announced(), hooks, first_index=self._index, sums=self._sums
            )
            jax.block_until_ready((self._trainer.state, self._sums))

    def _local_kinds(self, kept: Sequence[HostBatch]) -> dict[str, Callable[[int], None]]:
        """Returns what runs steps of one rank that sends nothing; empty if there is none."""
        trainer = self._trainer
        if type(trainer.steps) not in (DataParallelSteps, GlobalSteps):
            return {}
        mesh = _jax.make_data_mesh(trainer.runtime.mesh.local_devices[:1])
        runtime = replace(trainer.runtime, mesh=mesh)
        options = replace(self._core.options, shard_optimizer_state=False, ranks_per_host=1)
        steps = options.steps(runtime, None, dict, whole=isinstance(trainer.steps, GlobalSteps))
        own = Trainer(trainer.adapter, runtime, steps, seed=0)
        self._core.compile_steps(trainer=own)
        own.build_from(trainer.variables())
        prepare = preparation_of(own, self._plan.unpack, threaded=True)

        def run_of(items: list[HostBatch]) -> Callable[[int], None]:
            group = prepare(items)

            def run(programs: int) -> None:
                sums = own.train_epoch(repeat(group, programs), CountedRows())
                jax.block_until_ready((own.state, sums))

            return run

        return local_kinds(kept[: self._num_steps], trainer.rank_slice.local_ranks, run_of)

    def _try_without_callbacks(
        self, explaining: Explaining, whole: Iterator[DeviceBatches]
    ) -> None:
        """Leaves out the callbacks of each class that does something between steps."""
        plain = self._hooks.callbacks
        of_steps = ("on_train_batch_begin", "on_train_batch_end")
        acting = [c for c in plain if any(overrides(c, hook) for hook in of_steps)]
        # The master has callbacks that the others lack, such as the bar.
        names = broadcast_object(sorted({type(callback).__name__ for callback in acting}))
        kinds: dict[str, Callable[[int], None]] = {}
        of_fit = self._callbacks
        seen = {**self._counts, "verbose": of_fit.verbose, "model": of_fit.model}
        for name in ["", *names]:
            others = [callback for callback in plain if type(callback).__name__ != name]
            called = CallbackList(others, **seen) if name else self._hooks
            hooks = self.step_hooks(called, num_steps=self._num_steps)
            kinds[name] = lambda n, hooks=hooks: self._run(islice(whole, n), hooks)
        timed = explaining.time(kinds)
        for name in names:
            explaining.note_trial("callback", name, timed.slowest(""), timed.slowest(name))

    def _try_fused(
        self, explaining: Explaining, kept: Sequence[HostBatch], group: DeviceBatches
    ) -> None:
        """Lets several steps share a program."""
        trainer = self._trainer
        batch = stack([self._plan.unpack(item) for item in kept[:FUSED]])
        rows = sum(item.num_rows for item in kept[:FUSED])
        together = DeviceBatches(trainer.put_stacked(batch), rows, FUSED, kept[0].shards)
        explaining.try_fused(
            lambda n: self._run(repeat(group, n), CountedRows()),
            lambda n: self._run(repeat(together, n), CountedRows()),
        )

    def _try_sums(self, explaining: Explaining, timed: Timed, kept: Sequence[HostBatch]) -> None:
        """Tries other ways to sum gradients, if sums take a share of a step; gives up the state."""
        trainer = self._trainer
        if type(trainer.steps) is not DataParallelSteps or trainer.runtime.num_ranks == 1:
            return
        if not timed.is_worth_a_trial("placed batches", "no sums"):
            return
        step = step_to_tune(self._core)
        candidates = tuning.list_candidates(
            trainer,
            by_argument=self._core.options.fusion_threshold is not None,
            accumulation_steps=step.accumulation_steps,
        )
        state = jax.device_get(trainer.require_state())
        used, *others = tuning.try_candidates(
            trainer, candidates, step, kept[0], self._plan.unpack, steps=explaining.programs
        )
        trainer.set_state(state)
        for candidate, seconds in others:
            explaining.note_trial(
                "sums", candidate.setting, used.seconds, seconds, exact=candidate.is_exact
            )
