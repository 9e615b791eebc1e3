"""A custom loop in a process of `tnt-jax explain`: times its steps, as `fit` times its own."""

import linecache
import sys
import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from itertools import count, cycle, islice
from types import FrameType
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from tnt_jax import _jax
from tnt_jax.data.feed import Feed
from tnt_jax.data.sources import HostBatch
from tnt_jax.distributed.liveness import phases
from tnt_jax.distributed.sums.reduction import list_thresholds
from tnt_jax.job import Slot
from tnt_jax.train.explaining import (
    FUSED,
    KEPT,
    Explaining,
    Timed,
    local_kinds,
    report,
    turns,
)
from tnt_jax.train.loops.checkpoints import is_saving
from tnt_jax.train.loops.dataset import DistributedBatch, ExplainedReading, put_batches
from tnt_jax.train.loops.engine import Engine

_explained = Slot[list["ExplainedSteps"]](list)


def explained_if_asked(engine: Engine) -> "Engine | ExplainedSteps":
    """Returns what runs a step: the engine, or what explains the first step that trains."""
    is_asked = engine.runtime.settings.explain_steps is not None and engine.trains
    if not is_asked or _explained.get():
        return engine
    _explained.get().append(ExplainedSteps(engine))
    return _explained.get()[0]


class ExplainedSteps:
    """Runs the steps of a custom loop, and between them those that lack something.

    The loop stays as it is. Where it has made so many steps as are timed, its next call runs the
    other kinds first, and goes on from the state that they leave.
    """

    def __init__(self, engine: Engine) -> None:
        self.runtime = engine.runtime
        self._engine, self._runs = engine, _Runs(engine, None, None)
        # Steps that the loop is to make before the next of other kinds.
        self._left = 0
        self._course: Generator[int, None, NoReturn] | None = None

    def run(
        self, state: Any, batch: DistributedBatch, key: Any, *, stacked: bool
    ) -> tuple[Any, Any]:
        """Makes a step of the loop; see `Engine.run`."""
        if self._course is None:
            self._course, self._runs.key = self._explain(batch), key
        if self._left == 0:
            self._runs.state = jax.block_until_ready(state)
            self._left = next(self._course)
            state = self._runs.state
        self._left -= 1
        return self._engine.run(state, batch, key, stacked=stacked)

    def _explain(self, batch: DistributedBatch) -> Generator[int, None, NoReturn]:
        """Yields how many steps the loop is to make; reports, and ends the script, at last."""
        data: ExplainedReading = batch.reading
        data.is_explained = True
        yield KEPT
        num_steps = batch.num_steps or 1
        explaining = Explaining(self.runtime, num_steps, self._engine.name)
        kept = cycle(data.reading.kept)
        groups = iter(lambda: list(islice(kept, num_steps)), [])
        put = put_batches(self.runtime.mesh, stacked=batch.num_steps is not None)
        one = put(next(groups))
        threaded = not data.reading.source.in_memory
        with Feed(groups, put, threaded=threaded) as of_kept:
            further = iter(lambda: next(data.batches, None), None)  # What the loop would get next.
            kinds: dict[str, Callable[[int], None] | None] = {
                "as is": None,
                "no callbacks": self._runs.over(further),
                "kept batches": self._runs.over(iter(of_kept)),
                "placed batches": self._runs.over(_again(one)),
            }
            kinds |= self._local_kinds(data.reading.kept, batch.num_steps)
            rounds, programs = explaining.rounds, explaining.programs
            timed = yield from turns(kinds, rounds=rounds, programs=programs, alone=["one rank"])
            explaining.count_faults()
        line = None
        if timed.is_worth_a_trial("as is", "no callbacks"):
            with SampledLines() as lines:
                yield explaining.programs
            line = lines.most()
        is_free = batch.num_steps is None and data.reading.is_uniform()
        if is_free and timed.is_of_small_batches():
            stack = put_batches(self.runtime.mesh, stacked=True)(data.reading.kept[:FUSED])
            explaining.try_fused(self._runs.over(_again(one)), self._runs.over(_again(stack)))
        if self._engine.comparison is None:
            explaining.try_channels_last(self._traced(one).jaxpr.jaxpr)
        self._try_sums(explaining, timed, one)
        measured = explaining.measured(
            timed, data.reading, self._traced(one).lower, comparison=self._engine.comparison
        )
        left_out = ["LoopCheckpoints"] if is_saving() else []
        report(measured | {"callbacks_left_out": left_out, "line": line})

    def _traced(self, batch: DistributedBatch, engine: Engine | None = None) -> Any:
        return (engine or self._engine).trace(self._runs.state, batch, self._runs.key)

    def _local_kinds(
        self, kept: Sequence[HostBatch], num_steps: int | None
    ) -> dict[str, Callable[[int], None]]:
        """Returns what runs steps of one rank that sends nothing."""
        mesh = _jax.make_data_mesh(self.runtime.mesh.local_devices[:1])
        put = put_batches(mesh, stacked=num_steps is not None)
        state = jax.tree.map(jnp.copy, self._runs.state)
        engine = self._engine.on(replace(self.runtime, mesh=mesh))
        runs = _Runs(engine, state, self._runs.key)

        def run_of(items: list[HostBatch]) -> Callable[[int], None]:
            return runs.over(_again(put(items)))

        return local_kinds(kept[: num_steps or 1], len(self.runtime.local_ranks), run_of)

    def _try_sums(self, explaining: Explaining, timed: Timed, batch: DistributedBatch) -> None:
        """Tries other buckets of gradients, if sums take a share of a step."""
        runtime = self.runtime
        if self._engine.comparison or runtime.num_ranks == 1:
            return
        if not timed.is_worth_a_trial("placed batches", "no sums"):
            return
        nbytes = sum(x.nbytes for x in jax.tree.leaves(self._runs.state))
        programs = {self._traced(batch).lower().as_text(): ("", self._engine)}
        for kb, reduction in list_thresholds(runtime.platform, runtime.num_ranks, nbytes):
            engine = self._engine.on(runtime, reduction)
            text = self._traced(batch, engine).lower().as_text()
            programs.setdefault(text, (f"--fusion-threshold {kb}", engine))
        kinds = {name: self._runs.over(_again(batch), engine) for name, engine in programs.values()}
        tried = explaining.time(kinds)
        for setting in tried.seconds:
            if setting:
                explaining.note_trial("sums", setting, tried.slowest(""), tried.slowest(setting))


class _Runs:
    """Runs programs of an engine, one after the other, from a state on."""

    def __init__(self, engine: Engine, state: Any, key: Any) -> None:
        self.state, self.key = state, key
        self._engine = engine

    def over(
        self, batches: Iterator[DistributedBatch], engine: Engine | None = None
    ) -> Callable[[int], None]:
        """Returns what runs so many programs on the next batches to their end."""
        engine = engine or self._engine

        def run(programs: int) -> None:
            done = 0
            for batch in islice(batches, programs):
                stacked = batch.num_steps is not None
                self.state, _ = engine.run(self.state, batch, self.key, stacked=stacked)
                done += 1
            if done < programs:
                raise ValueError(
                    "The data has ended before all steps were timed: a generator is read once. "
                    "Pass data that can be read again, or name fewer --steps."
                )
            jax.block_until_ready(self.state)

        return run


def _again(batch: DistributedBatch) -> Iterator[DistributedBatch]:
    """Returns a batch again and again, as if further ones had its rows."""
    return (replace(batch, step=step) for step in count(batch.step, batch.num_steps or 1))


_EVERY_S = 0.002
# Of the samples, so that a line is the one.
_MOST = 0.5


class SampledLines:
    """Samples, within a block, where the main thread is in the body of its loop."""

    def __init__(self) -> None:
        self._lines: Counter[tuple[str, int]] = Counter()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="tnt_jax-lines", daemon=True)

    def __enter__(self) -> "SampledLines":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def most(self) -> dict[str, Any] | None:
        """Returns the line in which most samples are, as JSON values; None if there is none."""
        if not self._lines:
            return None
        (file, number), samples = self._lines.most_common(1)[0]
        if samples < _MOST * self._lines.total():
            return None
        return {"file": file, "number": number, "text": linecache.getline(file, number).strip()}

    def _sample(self) -> None:
        main = threading.main_thread().ident
        while not self._stopped.wait(_EVERY_S):
            frame = sys._current_frames().get(main or 0)
            if phases.here().doing[0] == "loop" and (line := _line_of(frame)) is not None:
                self._lines[line] += 1


def _line_of(frame: FrameType | None) -> tuple[str, int] | None:
    """Returns file and line of the innermost call that is in no library."""
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_jax.LIBRARIES):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None
