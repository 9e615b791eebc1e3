"""What `tnt-jax explain` measures of steps: of those of `fit`, and of those of custom loops.

Several kinds of steps are timed in turns, so that a disturbance of the machine meets all alike.
"""

import json
import os
import resource
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tnt_jax import _jax
from tnt_jax.cluster.devices import machine_id
from tnt_jax.data.permutation import row_order_of
from tnt_jax.data.sources import HostBatch
from tnt_jax.data.streams import EpochStream
from tnt_jax.distributed import goodput
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.joining.runtime import Runtime, is_master_rank
from tnt_jax.log import logger, report_to_launcher
from tnt_jax.settings import EXPLAIN_MARK, TrialsDone
from tnt_jax.train.execution import signature


def channels_first(jaxpr: Any) -> list[Any]:
    """Returns convolutions, of a model and of gradients by its inputs, with channels first."""
    found = []
    for equation in _jax.convolutions_in(jaxpr):
        numbers = equation.params["dimension_numbers"]
        is_first = all(spec[:2] == (0, 1) for spec in (numbers.lhs_spec, numbers.out_spec))
        if is_first and len(numbers.lhs_spec) > 2:
            found.append(equation)
    return found


def run_alone(equations: Sequence[Any], mesh: Mesh, *, last: bool) -> Callable[[int], None]:
    """Returns what computes convolutions with channels first, or last, so many times."""
    programs = [
        with_channels_last(x) if last else (x.params, [v.aval.shape for v in x.invars])
        for x in equations
    ]
    operands = [
        [jnp.ones(shape, x.aval.dtype) for shape, x in zip(shapes, equation.invars, strict=True)]
        for (_, shapes), equation in zip(programs, equations, strict=True)
    ]

    def compute(operands: Any) -> list[jax.Array]:
        return [
            jax.lax.conv_general_dilated(*pair, **params)
            for pair, (params, _) in zip(operands, programs, strict=True)
        ]

    jitted = jax.jit(compute, compiler_options=_jax.convolution_options(mesh))

    def run(times: int) -> None:
        for _ in range(times):
            jax.block_until_ready(jitted(operands))

    return run


def with_channels_last(equation: Any) -> tuple[dict[str, Any], list[tuple[int, ...]]]:
    """Returns parameters and shapes of operands of a convolution with its channels last."""
    (batch, channels, *space), kernel = (x.aval.shape for x in equation.invars)
    outputs, inputs, *window = equation.params["dimension_numbers"].rhs_spec
    # The dimensions of space, inputs, outputs, as in Flax and Keras.
    of_kernel = (*(kernel[dim] for dim in window), kernel[inputs], kernel[outputs])
    numbers = _jax.features_last(len(kernel))
    shapes = [(batch, *space, channels), of_kernel]
    return equation.params | {"dimension_numbers": numbers}, shapes


_WARM_PROGRAMS = 2


class CountedCompilations:
    """Counts the programs that are compiled within a block, and the seconds that it takes."""

    def __init__(self) -> None:
        self.number, self.seconds = 0, 0.0

    def __enter__(self) -> "CountedCompilations":
        jax.monitoring.register_event_duration_secs_listener(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        jax.monitoring.unregister_event_duration_listener(self._note)

    def _note(self, event: str, duration_secs: float, **_: Any) -> None:
        self.number += event.endswith("backend_compile_duration")
        if event.startswith("/jax/core/compile/"):
            self.seconds += duration_secs


# Of a step, what half of the rows save where batches are not small. The launcher asks for a ratio
# above 0.75 in nearly all rounds; this lets all that may pass.
_HALF_SAVES = 0.3
# Share of a step from which something is tried.
_WORTH_A_TRIAL = 0.05


class Timed(NamedTuple):
    """What a program of each kind takes, by name."""

    seconds: dict[str, np.ndarray]  # `[rounds, processes]`.
    compiled_s: dict[str, np.ndarray]  # In which this process compiled, `[rounds]`.

    def slowest(self, kind: str) -> np.ndarray:
        """Returns the seconds of a program of a kind on the slowest process, `[rounds]`."""
        return np.nanmax(self.seconds[kind], axis=1)

    def share(self, kind: str, without: str, *, of: str) -> float:
        """Returns by which share one kind takes longer than another, at process 0's median."""
        longer = np.median(self.slowest(kind) - self.slowest(without))
        return float(collectives.broadcast(longer / np.median(self.slowest(of))))

    def is_worth_a_trial(self, kind: str, without: str) -> bool:
        """Returns whether one kind takes so much longer than another that something is tried."""
        return self.share(kind, without, of="as is") > _WORTH_A_TRIAL

    def is_of_small_batches(self) -> bool:
        """Returns whether a step takes nearly as long with half of its rows; all must ask.

        Only then is it worth a trial to let several steps share a program.
        """
        if "half the rows" not in self.seconds:
            return False
        return self.share("no sums", "half the rows", of="no sums") < _HALF_SAVES


def turns(
    kinds: Mapping[str, Callable[[int], None] | None],
    *,
    rounds: int,
    programs: int,
    alone: Collection[str] = (),
) -> Generator[int, None, Timed]:
    """Returns what a program of each kind takes; yields how many programs others are to run.

    All processes must call it with the same kinds, in the same order. A kind runs a number of
    programs to their end; None if the caller runs them before it goes on, such as a custom training
    loop. In each of the `rounds`, and one before that warms up, so many `programs` are timed after
    two that are not. Kinds that process 0 runs `alone` have NaN of the others, which wait.
    """
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    compiled_s: dict[str, list[float]] = {name: [] for name in kinds}
    order = list(kinds.items())
    for round in range(rounds + 1):
        for name, run in order:
            collectives.barrier()
            own = in_compiler = float("nan")
            if name not in alone or jax.process_index() == 0:
                yield from _run(run, _WARM_PROGRAMS)
                with CountedCompilations() as compiled:
                    start = time.perf_counter()
                    yield from _run(run, programs)
                    own = (time.perf_counter() - start) / programs
                in_compiler = compiled.seconds / programs
            if round:
                seconds[name].append(own)
                compiled_s[name].append(in_compiler)
        order.reverse()  # So that what a machine does over time meets all kinds alike.
    collectives.barrier()
    return Timed(
        {
            name: collectives.all_gather(np.array(own)).swapaxes(0, 1)
            for name, own in seconds.items()
        },
        {name: np.array(own) for name, own in compiled_s.items()},
    )


def _run(run: Callable[[int], None] | None, programs: int) -> Generator[int, None, None]:
    if run is None:
        yield programs
    else:
        run(programs)


def run_to_end(course: Generator[int, None, Timed]) -> Timed:
    """Returns the result of `turns` in which all kinds run by themselves."""
    try:
        next(course)
    except StopIteration as end:
        return end.value
    raise AssertionError("A kind is left to the caller.")


FUSED = 8
"""Steps that share a program where that is tried."""
KEPT = 8
"""Programs whose batches are kept in memory where that is tried."""
_SMALL_SUM_BYTES = 64 * 1024


class Reading:
    """What is noted of the batches of a stream: their shapes; the first `keep` of them are kept."""

    def __init__(self, stream: EpochStream, keep: int) -> None:
        self.source, self._steps_of_epoch = stream.source, stream.num_steps
        self.kept: list[HostBatch] = []
        self._keep = keep
        self._seconds: list[float] = []
        self._shapes: Counter[str] = Counter()

    def noted(self, items: Iterator[HostBatch]) -> Iterator[HostBatch]:
        """Yields batches as they are."""
        start = time.perf_counter()
        for item in items:
            self._seconds.append(time.perf_counter() - start)
            if len(self.kept) < self._keep:
                self.kept.append(item)
            leaves = jax.tree.leaves(item.data)
            shapes = [f"{np.asarray(x).dtype}{list(np.shape(x))}" for x in leaves]
            self._shapes[", ".join(shapes)] += 1
            yield item
            start = time.perf_counter()

    def is_uniform(self) -> bool:
        """Returns whether the batches that are kept, which all processes have, are alike."""
        first, *others = (signature(item) for item in self.kept)
        return all(other == first for other in others)

    def facts(self) -> dict[str, Any]:
        """Returns what is known of the data, as JSON values; reads the first batch of a pass."""
        return {
            "source": type(self.source).__name__,
            "in_memory": self.source.in_memory,
            "rows": self.kept[0].num_rows,
            "batch_bytes": sum(np.asarray(x).nbytes for x in jax.tree.leaves(self.kept[0].data)),
            "steps_of_epoch": self._steps_of_epoch,
            "shapes": dict(self._shapes.most_common(8)),
            "num_shapes": len(self._shapes),
            "first_batch_s": self._first_batch_s(),
            "read_mean_s": statistics.fmean(self._seconds),
            "read_s": statistics.median(self._seconds[:KEPT]),
            # The first of them begins a pass.
            "read_most_s": max(self._seconds[1:KEPT]),
        }

    def _first_batch_s(self) -> float:
        """Returns the seconds until the first batch of another pass, if the data has one."""
        start = time.perf_counter()
        if row_order_of(self.source).can_go_back:
            next(self.source.batches(1), None)
        return time.perf_counter() - start


class Explaining:
    """Times kinds of steps, and notes what was tried.

    It is made after the first step, whose compilation is that of a start. A program has
    `num_steps`; `trained_by` is `"fit"`, or the name of a step of a custom loop.
    """

    def __init__(self, runtime: Runtime, num_steps: int, trained_by: str) -> None:
        settings = runtime.settings
        assert settings.explain_steps is not None, "The environment says what to explain."
        self._runtime, self._num_steps, self._trained_by = runtime, num_steps, trained_by
        self.rounds = settings.explain_rounds
        self.programs = max(settings.explain_steps // num_steps, 1)
        """Programs of each kind that are timed in a round."""
        self._trials: list[dict[str, Any]] = []
        self._faults = _faults()
        self._compile_s = goodput.account().report()["compiling_s"]

    def time(
        self,
        kinds: Mapping[str, Callable[[int], None]],
        *,
        programs: int | None = None,
        alone: Sequence[str] = (),
    ) -> Timed:
        """Returns what a program of each kind takes; see `turns`."""
        programs = programs or self.programs
        return run_to_end(turns(kinds, rounds=self.rounds, programs=programs, alone=alone))

    def count_faults(self) -> None:
        """Ends the count of pages that are read from disk, which began with the object."""
        self._faults = [
            after - before for before, after in zip(self._faults, _faults(), strict=True)
        ]

    def note_trial(
        self, what: str, name: str, before: Any, after: Any, *, exact: bool = True
    ) -> None:
        """Notes what was tried, and seconds of a program by round."""
        lists = [(np.asarray(x) / self._num_steps).tolist() for x in (before, after)]
        trial = {"what": what, "name": name, "exact": exact}
        self._trials.append(trial | {"before": lists[0], "after": lists[1]})

    def try_fused(self, one: Callable[[int], None], several: Callable[[int], None]) -> None:
        """Compares programs of one step with those of `FUSED` steps, which the kinds run."""
        kinds = {"one": lambda n: one(n * FUSED), "several": several}
        timed = self.time(kinds, programs=max(self.programs // FUSED, 1))
        before, after = (timed.slowest(name) / FUSED for name in kinds)
        self.note_trial("fused", str(FUSED), before, after)

    def try_channels_last(self, jaxpr: Any) -> None:
        """Times the convolutions of a step whose channels come first, and with channels last."""
        equations = channels_first(jaxpr)
        if not equations:
            return
        mesh = self._runtime.mesh
        kinds = {
            name: run_alone(equations, mesh, last=name == "last") for name in ("first", "last")
        }
        timed = self.time(kinds)
        before, after = (timed.slowest(name) * self._num_steps for name in kinds)
        self.note_trial("channels", str(len(equations)), before, after)

    def measured(
        self,
        timed: Timed,
        reading: Reading,
        lower: Callable[[], Any],
        *,
        comparison: str | None,
    ) -> dict[str, Any]:
        """Returns everything as JSON values; `comparison` says how rows of a step are compared."""
        runtime, config = self._runtime, jax.config
        is_cached = config.jax_enable_compilation_cache  # pyright: ignore
        cores = collectives.all_gather(np.array(len(os.sched_getaffinity(0))))
        return {
            "ranks": runtime.num_ranks,
            "processes": jax.process_count(),
            "hosts": len(set(collectives.agree(self._trained_by, {}, note=machine_id("net")))),
            "device": runtime.mesh.devices.flat[0].device_kind,
            "platform": runtime.platform,
            "trained_by": self._trained_by,
            "steps": self.programs * self._num_steps,
            "steps_per_execution": self._num_steps,
            "cores_of_machine": os.cpu_count(),
            "cores_of_process": cores.tolist(),
            "cache": config.jax_compilation_cache_dir if is_cached else None,  # pyright: ignore
            "compile_s": self._compile_s,
            "seconds": {
                name: (times / self._num_steps).tolist() for name, times in timed.seconds.items()
            },
            "compiled_s": {
                name: (times / self._num_steps).tolist() for name, times in timed.compiled_s.items()
            },
            "faults": dict(zip(("major", "swapped"), self._faults, strict=True)),
            "trials": self._trials,
            "comparison": comparison,
            "sums": _describe_sums(None if runtime.num_ranks == 1 else lower()),
            **reading.facts(),
        }


def report(measured: Mapping[str, Any]) -> NoReturn:
    """Reports what was measured to the launcher, on the master, and ends the script."""
    if is_master_rank():
        report_to_launcher(f"{EXPLAIN_MARK}{json.dumps(measured)}")
    raise TrialsDone


def _describe_sums(lowered: Any | None) -> dict[str, int]:
    compiled = [] if lowered is None else collectives.describe_lowered(lowered).compiled
    sizes = [entry[1] for entry in compiled]
    small = sum(size < _SMALL_SUM_BYTES for size in sizes)
    return {"number": len(sizes), "small": small, "bytes": sum(sizes)}


def local_kinds(
    kept: Sequence[HostBatch],
    num_ranks: int,
    run_of: Callable[[list[HostBatch]], Callable[[int], None]],
) -> dict[str, Callable[[int], None]]:
    """Returns what runs steps of one rank, of so many, that sends nothing."""
    per_rank = len(jax.tree.leaves(kept[0].data)[0]) // num_ranks
    local = run_of([_first_rows(item, per_rank) for item in kept])
    kinds = {"no sums": local}
    if jax.process_count() > 1:
        kinds["one rank"] = local
    if per_rank > 1:
        kinds["half the rows"] = run_of([_first_rows(item, per_rank // 2) for item in kept])
    return kinds


def _first_rows(item: HostBatch, rows: int) -> HostBatch:
    """Returns the first rows of a batch of this process."""
    mask = None if item.mask is None else item.mask[:rows]
    return HostBatch(jax.tree.map(lambda x: x[:rows], item.data), mask, rows)


def _faults() -> list[int]:
    """Returns the pages that this process has read from disk, and that the machine swapped in."""
    swapped = 0
    try:
        with open("/proc/vmstat") as file:
            swapped = sum(int(line.split()[1]) for line in file if line.startswith("pswpin "))
    except OSError as error:  # Not Linux's, or not mounted.
        logger.info("Pages that are swapped in are not counted: %s.", error)
    return [resource.getrusage(resource.RUSAGE_SELF).ru_majflt, swapped]
