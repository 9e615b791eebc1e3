"""`fit` in a process of `tnt-jax explain`: times its steps with one thing after another removed."""

import json
import os
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, islice, repeat
from typing import Any, NoReturn

import jax
import numpy as np

from tnt_jax import _jax
from tnt_jax.cluster.devices import machine_id
from tnt_jax.data.permutation import row_order_of
from tnt_jax.data.sources import HostBatch
from tnt_jax.data.streams import read_in_lockstep
from tnt_jax.distributed import goodput
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.host.objects import broadcast_object
from tnt_jax.distributed.joining.runtime import is_master_rank
from tnt_jax.distributed.liveness import phases
from tnt_jax.keras_compat.callbacks import CallbackList
from tnt_jax.keras_compat.callbacks.base import first_base
from tnt_jax.keras_compat.callbacks.callback_list import overrides
from tnt_jax.keras_compat.fit.data_intake import DataArguments, FitArguments, Plan
from tnt_jax.keras_compat.fit.fit_loop import FitLoop
from tnt_jax.keras_compat.fit.hooks import CallbackArguments, PhaseHooks, flat
from tnt_jax.keras_compat.fit.preparation import Shared
from tnt_jax.keras_compat.fit.trials.timed import check_sums, full_batches
from tnt_jax.log import logger, report_to_launcher
from tnt_jax.settings import EXPLAIN_MARK, TrialsDone
from tnt_jax.train.contracts import Hooks
from tnt_jax.train.execution import DeviceBatches, stack
from tnt_jax.train.steps.data_parallel import DataParallelSteps
from tnt_jax.train.steps.global_step import GlobalSteps
from tnt_jax.train.timing import tuning
from tnt_jax.train.timing.timed_steps import CountedCompilations, CountedRows
from tnt_jax.train.timing.turns import time_in_turns
from tnt_jax.train.trainer import Trainer, device_feed, preparation_of

# They would replace what the user has saved, or begin where a run was interrupted.
_SAVING = ("BackupAndRestore", "ModelCheckpoint")
# Of a step, from which something is tried.
_WORTH_A_TRIAL = 0.05
# Steps that share a program where that is tried.
_FUSED = 8
# Batches that are kept in memory where that is tried.
_KEPT = 8
_SMALL_SUM_BYTES = 64 * 1024


class ExplainLoop(FitLoop):
    """Times the steps of a `fit` in several ways, and tries what may make them faster."""

    compiles_ahead = False

    @contextmanager
    def ending_on_request(self, callbacks: CallbackArguments) -> Iterator[None]:
        """Leaves signals as they are: there is nothing to save."""
        yield

    def prepare(self, data: DataArguments, arguments: FitArguments) -> Plan:
        """Does the same as for training, without validation."""
        check_sums(self._core, "explain")
        return super().prepare(data, replace(arguments, validation_data=None))

    def fit(self, plan: Plan, callbacks: CallbackArguments) -> NoReturn:
        """Reports to the launcher, on the master, and hands back to the entry of the process."""
        given = flat(callbacks.callbacks)
        saving = [c for c in given if first_base(getattr(c, "callback", c), _SAVING) is not None]
        kept = replace(callbacks, callbacks=[c for c in given if c not in saving])
        counts = {"epochs": plan.arguments.epochs, "steps": plan.stream.num_steps}
        with kept.open("Model.fit", **counts) as opened, self._core.fitting():
            seen = {**counts, "verbose": callbacks.verbose, "model": callbacks.model}
            measured = _Steps(self._shared, plan, opened, seen).explained()
        measured["hosts"] = len(set(collectives.agree("Model.fit", {}, note=machine_id("net"))))
        measured["callbacks_left_out"] = [type(getattr(c, "callback", c)).__name__ for c in saving]
        if is_master_rank():
            report_to_launcher(f"{EXPLAIN_MARK}{json.dumps(measured)}")
        raise TrialsDone


class _Steps:
    """The steps of a `fit`, with one thing after another removed."""

    def __init__(
        self, shared: Shared, plan: Plan, callbacks: CallbackList, seen: dict[str, Any]
    ) -> None:
        self._core, self._shared, self._plan = shared.core, shared, plan
        # The callbacks, and what they see.
        self._callbacks, self._seen = callbacks, seen
        self._trainer: Trainer = shared.core.trainer
        settings = self._trainer.runtime.settings
        assert settings.explain_steps is not None, "The environment says what to explain."
        self._rounds = settings.explain_rounds
        self._num_steps = shared.core.require_compiled().steps_per_execution or 1
        self._programs = max(settings.explain_steps // self._num_steps, 1)
        source = plan.stream.source
        self._threaded = not source.in_memory
        self._items = read_in_lockstep(full_batches(plan), source, where="the explained steps")
        self._index, self._sums = 0, None
        self._shapes: Counter[str] = Counter()
        self._compiled_s: dict[str, list[float]] = {}

    def explained(self) -> dict[str, Any]:
        """Returns all times and what was tried, as JSON values."""
        phases.here().epoch = 1
        first_s = self._first_batch_s()
        kept = list(islice(self._items, _KEPT * self._num_steps))
        read_s = self._read_s()
        self._callbacks.call("on_train_begin", {})
        self._callbacks.call("on_epoch_begin", 0, {})
        trainer = self._trainer
        with (
            device_feed(trainer, self._noted(), self._plan.unpack, **self._feed()) as feed,
            device_feed(trainer, cycle(kept), self._plan.unpack, **self._feed()) as of_kept,
        ):
            whole, again = iter(feed), iter(of_kept)
            group, counting = self._group(kept), CountedRows()
            hooks = self._hooks(self._callbacks)
            kinds: dict[str, Callable[[int], None]] = {
                "as is": lambda n: self._run(islice(whole, n), hooks, "as is"),
                "no callbacks": lambda n: self._run(islice(whole, n), counting, "no callbacks"),
                "kept batches": lambda n: self._run(islice(again, n), counting),
                "placed batches": lambda n: self._run(repeat(group, n), counting),
            }
            kinds |= self._local_kinds(kept)
            before = _faults()
            seconds = time_in_turns(
                kinds, rounds=self._rounds, programs=self._programs, alone=["one rank"]
            )
            faults = [after - early for early, after in zip(before, _faults(), strict=True)]
            trials = self._trials(seconds, whole, kept, group)
        compile_s = goodput.account().report()["compiling_s"]
        measured = {
            **self._facts(),
            "seconds": {
                name: (times / self._num_steps).tolist() for name, times in seconds.items()
            },
            # Of each round there are two, one of which is not timed, and the first warms up.
            "compiled_s": {
                name: [s / self._programs / self._num_steps for s in all_s[3::2]]
                for name, all_s in self._compiled_s.items()
            },
            "shapes": dict(self._shapes.most_common(8)),
            "num_shapes": len(self._shapes),
            "first_batch_s": first_s,
            "read_s": read_s,
            "compile_s": compile_s,
            "faults": dict(zip(("major", "swapped"), faults, strict=True)),
            "trials": trials,
            "sums": self._describe_sums(kept),
        }
        measured["trials"] += self._tried_sums(seconds, kept)
        return measured

    def _facts(self) -> dict[str, Any]:
        runtime = self._trainer.runtime
        source, first = self._plan.stream.source, self._plan.first
        hosts = collectives.all_gather(np.array(len(os.sched_getaffinity(0))))
        return {
            "ranks": runtime.num_ranks,
            "processes": jax.process_count(),
            "device": runtime.mesh.devices.flat[0].device_kind,
            "platform": runtime.platform,
            "rows": first.num_rows,
            "steps": self._programs * self._num_steps,
            "steps_per_execution": self._num_steps,
            "source": type(source).__name__,
            "in_memory": source.in_memory,
            "cores_of_machine": os.cpu_count(),
            "cores_of_process": hosts.tolist(),
            "cache": jax.config.jax_compilation_cache_dir,  # pyright: ignore
            "batch_bytes": sum(np.asarray(x).nbytes for x in jax.tree.leaves(first.data)),
            "gradient_bytes": sum(x.nbytes for x in jax.tree.leaves(self._state.params)),
        }

    @property
    def _state(self) -> Any:
        return self._trainer.require_state()

    def _feed(self) -> dict[str, Any]:
        return {"threaded": self._threaded, "num_steps": self._num_steps}

    def _noted(self) -> Iterator[HostBatch]:
        """Yields batches, and counts their shapes."""
        for item in self._items:
            shapes = [
                f"{np.asarray(x).dtype}{list(np.shape(x))}" for x in jax.tree.leaves(item.data)
            ]
            self._shapes[", ".join(shapes)] += 1
            yield item

    def _first_batch_s(self) -> float:
        """Returns the seconds until the first batch of another pass over the data.

        Data that can be read once alone gives none.
        """
        source = self._plan.stream.source
        start = time.perf_counter()
        if row_order_of(source).can_go_back:
            next(source.batches(1), None)
        return time.perf_counter() - start

    def _read_s(self) -> float:
        """Returns the seconds in which a batch is read, by one thread that does nothing else."""
        times = []
        for _ in range(_KEPT):
            start = time.perf_counter()
            next(self._items)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def _group(self, kept: Sequence[HostBatch]) -> DeviceBatches:
        prepare = preparation_of(self._trainer, self._plan.unpack, threaded=True)
        return prepare(list(kept[: self._num_steps]))

    def _hooks(self, callbacks: CallbackList) -> PhaseHooks:
        return PhaseHooks(
            "train",
            callbacks,
            progress=self._shared.progress,
            read=self._core.training_logs,
            before_step=self._core.read_assigned,
            num_steps=self._num_steps,
        )

    def _run(self, groups: Iterator[DeviceBatches], hooks: Hooks, kind: str = "") -> None:
        known = self._core.require_compiled().compiled_kinds

        def announced() -> Iterator[DeviceBatches]:
            for group in groups:
                if isinstance(hooks, PhaseHooks):
                    hooks.announce(group, known)
                self._index += group.num_steps
                yield group

        with phases.in_phase("steps"), CountedCompilations() as compiled:
            self._sums = self._trainer.train_epoch(
                announced(), hooks, first_index=self._index, sums=self._sums
            )
            jax.block_until_ready((self._trainer.state, self._sums))
        if kind:
            self._compiled_s.setdefault(kind, []).append(compiled.seconds)

    def _local_kinds(self, kept: Sequence[HostBatch]) -> dict[str, Callable[[int], None]]:
        """Returns what runs steps of one rank that sends nothing; empty if there is none."""
        trainer, compilation = self._trainer, self._core.require_compiled()
        if type(trainer.steps) not in (DataParallelSteps, GlobalSteps):
            return {}
        mesh = _jax.make_data_mesh(trainer.runtime.mesh.local_devices[:1])
        runtime = replace(trainer.runtime, mesh=mesh)
        options = replace(self._core.options, shard_optimizer_state=False, ranks_per_host=1)
        steps = options.steps(runtime, None, dict, whole=isinstance(trainer.steps, GlobalSteps))
        own = Trainer(trainer.adapter, runtime, steps, seed=0)
        assert compilation.transformation is not None
        own.compile(
            self._core.step_parts(),
            compilation.transformation,
            accumulation_steps=compilation.accumulation_steps,
            on_nan=compilation.on_nan,
        )
        own.build_from(trainer.variables())
        prepare = preparation_of(own, self._plan.unpack, threaded=True)
        per_rank = len(jax.tree.leaves(kept[0].data)[0]) // trainer.rank_slice.local_ranks

        def group_of(rows: int) -> DeviceBatches:
            return prepare([_first_rows(item, rows) for item in kept[: self._num_steps]])

        def run_of(group: DeviceBatches) -> Callable[[int], None]:
            def run(programs: int) -> None:
                sums = own.train_epoch(repeat(group, programs), CountedRows())
                jax.block_until_ready((own.state, sums))

            return run

        local = run_of(group_of(per_rank))
        kinds = {"no sums": local}
        if jax.process_count() > 1:
            kinds["one rank"] = local
        if per_rank > 1:
            kinds["half the rows"] = run_of(group_of(per_rank // 2))
        return kinds

    def _trials(
        self,
        seconds: dict[str, np.ndarray],
        whole: Iterator[DeviceBatches],
        kept: Sequence[HostBatch],
        group: DeviceBatches,
    ) -> list[dict[str, Any]]:
        """Tries what may help against what takes a share of a step."""
        slowest = {name: np.nanmax(times, axis=1) for name, times in seconds.items()}
        step = float(np.median(slowest["as is"]))
        share_of_host = float(np.median(slowest["as is"] - slowest["no callbacks"])) / step
        share_of_host = float(collectives.broadcast(np.array(share_of_host)))
        found = []
        if share_of_host > _WORTH_A_TRIAL:
            found += self._without_callbacks(whole)
        is_free = self._num_steps == 1 and self._trainer.steps.fused is not None
        if is_free and len({_signature(item) for item in kept}) == 1:
            found.append(self._fused(kept, group))
        return found

    def _without_callbacks(self, whole: Iterator[DeviceBatches]) -> list[dict[str, Any]]:
        """Leaves out the callbacks of each class that does something between steps."""
        plain = self._callbacks.callbacks
        acting = [c for c in plain if any(overrides(c, hook) for hook in _BATCH_HOOKS)]
        # The master has callbacks that the others lack, such as the bar.
        names = broadcast_object(sorted({type(callback).__name__ for callback in acting}))
        kinds = {"": lambda n: self._run(islice(whole, n), self._hooks(self._callbacks))}
        for name in names:
            others = [callback for callback in plain if type(callback).__name__ != name]
            hooks = self._hooks(CallbackList(others, **self._seen))
            kinds[name] = lambda n, hooks=hooks: self._run(islice(whole, n), hooks)
        times = time_in_turns(kinds, rounds=self._rounds, programs=self._programs)
        return [self._trial("callback", name, times[""], times[name]) for name in names]

    def _fused(self, kept: Sequence[HostBatch], group: DeviceBatches) -> dict[str, Any]:
        """Lets several steps share a program."""
        trainer = self._trainer
        batch = stack([self._plan.unpack(item) for item in kept[:_FUSED]])
        rows = sum(item.num_rows for item in kept[:_FUSED])
        together = DeviceBatches(trainer.put_stacked(batch), rows, _FUSED, kept[0].shards)
        programs = max(self._programs // _FUSED, 1)
        kinds = {
            "one": lambda n: self._run(repeat(group, n * _FUSED), CountedRows()),
            "several": lambda n: self._run(repeat(together, n), CountedRows()),
        }
        times = time_in_turns(kinds, rounds=self._rounds, programs=programs)
        return self._trial("fused", str(_FUSED), times["one"] / _FUSED, times["several"] / _FUSED)

    def _tried_sums(
        self, seconds: dict[str, np.ndarray], kept: Sequence[HostBatch]
    ) -> list[dict[str, Any]]:
        """Tries other ways to sum gradients, if sums take a share of a step; gives up the state."""
        trainer, compilation = self._trainer, self._core.require_compiled()
        if type(trainer.steps) is not DataParallelSteps or trainer.runtime.num_ranks == 1:
            return []
        slowest = {name: np.nanmax(times, axis=1) for name, times in seconds.items()}
        share = float(
            np.median(slowest["placed batches"] - slowest["no sums"]) / np.median(slowest["as is"])
        )
        if float(collectives.broadcast(np.array(share))) <= _WORTH_A_TRIAL:
            return []
        assert compilation.transformation is not None
        step = tuning.Step(
            self._core.step_parts(),
            compilation.transformation,
            compilation.accumulation_steps,
            self._num_steps,
        )
        candidates = tuning.list_candidates(
            trainer,
            by_argument=self._core.options.fusion_threshold is not None,
            accumulation_steps=compilation.accumulation_steps,
        )
        state = jax.device_get(trainer.require_state())
        trials = tuning.try_candidates(
            trainer, candidates, step, kept[0], self._plan.unpack, steps=self._programs
        )
        trainer.set_state(state)
        used = trials[0].seconds
        return [
            {"what": "sums", "name": c.setting, "exact": c.is_exact, "before": used, "after": s}
            for c, s in trials[1:]
        ]

    def _trial(self, what: str, name: str, before: Any, after: Any) -> dict[str, Any]:
        lists = [(np.nanmax(x, axis=1) / self._num_steps).tolist() for x in (before, after)]
        return {"what": what, "name": name, "exact": True, "before": lists[0], "after": lists[1]}

    def _describe_sums(self, kept: Sequence[HostBatch]) -> dict[str, int]:
        """Returns how many sums the compiled step has, how many are small, and their bytes."""
        if self._trainer.runtime.num_ranks == 1:
            return {"number": 0, "small": 0, "bytes": 0}
        described = collectives.describe(self._trainer, self._plan.unpack(kept[0]))
        sizes = [entry[1] for entry in described.compiled]
        small = sum(size < _SMALL_SUM_BYTES for size in sizes)
        return {"number": len(sizes), "small": small, "bytes": sum(sizes)}


_BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end")


def _first_rows(item: HostBatch, rows: int) -> HostBatch:
    mask = None if item.mask is None else item.mask[:rows]
    return HostBatch(jax.tree.map(lambda x: x[:rows], item.data), mask, rows)


def _signature(item: HostBatch) -> str:
    return str([(np.shape(x), np.asarray(x).dtype) for x in jax.tree.leaves(item.data)])


def _faults() -> tuple[int, int]:
    """Returns the pages that this process has read from disk, and that the machine swapped in."""
    swapped = 0
    try:
        with open("/proc/vmstat") as file:
            swapped = sum(int(line.split()[1]) for line in file if line.startswith("pswpin "))
    except OSError as error:  # Not Linux's, or not mounted.
        logger.info("Pages that are swapped in are not counted: %s.", error)
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt, swapped
