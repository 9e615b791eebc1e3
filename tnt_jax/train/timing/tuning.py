"""Finds out which way to sum gradients is fastest for a model.

It tries the step that `fit` runs in each way, in turns. `tnt-jax tune -- script.py` starts a job in
which the first `fit` of the script runs these trials instead of training.
"""

import socket
import statistics
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby, repeat
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from tnt_jax.data.sources import HostBatch
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.sums.reduction import Reduction, choose_reduction, list_thresholds
from tnt_jax.settings import Settings
from tnt_jax.train.contracts import Batch, Parts
from tnt_jax.train.execution import DeviceBatches
from tnt_jax.train.steps.data_parallel import DataParallelSteps
from tnt_jax.train.timing.timed_steps import TimedLoop
from tnt_jax.train.trainer import Trainer, device_feed

NUM_ROUNDS = 5
# A way must be faster by so much to be worth a change of options.
_WORTH_A_CHANGE = 0.98


class Candidate(NamedTuple):
    """A way to sum gradients: how to ask for it, what it is, whether it rounds nothing."""

    setting: str
    reduction: Reduction
    is_exact: bool = True


class Step(NamedTuple):
    """Step that the trials run; `num_steps` are those of one program."""

    parts: Parts
    optimizer: optax.GradientTransformation
    accumulation_steps: int
    num_steps: int


class Trial(NamedTuple):
    """A way, and the seconds that a step took with it in each round, on the slowest process."""

    candidate: Candidate
    seconds: list[float]


def list_candidates(
    trainer: Trainer, *, by_argument: bool, accumulation_steps: int
) -> list[Candidate]:
    """Returns the ways that the trainer's devices allow, with the one that it uses first."""
    platform = trainer.runtime.platform
    num_ranks = trainer.runtime.num_ranks
    choose = partial(choose_reduction, platform, num_ranks, settings=Settings())
    nbytes = sum(x.nbytes for x in jax.tree.leaves(trainer.require_state().params))
    option = "Model(fusion_threshold={!r})" if by_argument else "--fusion-threshold {}"
    candidates = [
        Candidate(option.format(kb), reduction)
        for kb, reduction in list_thresholds(platform, num_ranks, nbytes)
    ]
    compressed = choose(compression="bfloat16")
    setting = 'Model(gradient_compression="bfloat16")'
    candidates.append(Candidate(setting, compressed, is_exact=False))
    if accumulation_steps == 1:
        candidates.append(
            Candidate("Model(shard_optimizer_state=True)", choose(shard_optimizer_state=True))
        )
    names = collectives.all_gather(np.uint32(zlib.crc32(socket.gethostname().encode())))
    hosts = [int(names[device.process_index]) for device in trainer.runtime.mesh.devices.flat]
    if (per_host := ranks_of_equal_hosts(hosts)) > 1:
        candidates.append(
            Candidate(f"Model(ranks_per_host={per_host})", choose(ranks_per_host=per_host))
        )
    reduction = _reduction_of(trainer)
    used = Candidate("what it uses", reduction, is_exact=not reduction.keeps_residual)
    return [used, *(candidate for candidate in candidates if candidate.reduction != used.reduction)]


def ranks_of_equal_hosts(hosts: Sequence[Any]) -> int:
    """Returns how many neighbouring ranks share a host, given the host of each.

    It is 1 if there is one host only, if hosts differ in their numbers of ranks, or if the ranks of
    a host are not neighbours.

    >>> [ranks_of_equal_hosts(hosts) for hosts in ("aabb", "aab", "aaaa", "abab")]
    [2, 1, 1, 1]
    """
    sizes = [len(list(group)) for _, group in groupby(hosts)]
    return sizes[0] if len(sizes) == len(set(hosts)) > 1 and len(set(sizes)) == 1 else 1


def tune(
    trainer: Trainer, step: Step, item: HostBatch, unpack: Callable, *, by_argument: bool
) -> None:
    """Tries all ways and prints a table and the options to use, on the master.

    Every process must call it; the trainer's state is given up. A ValueError says that there is
    nothing to choose.
    """
    num_ranks = trainer.runtime.num_ranks
    steps = trainer.runtime.settings.tune_steps
    assert steps is not None, "The environment says whether to tune."
    _reduction_of(trainer)
    if num_ranks == 1:
        raise ValueError(
            "There is one rank, which sends nothing: start more to tune, for instance tnt-jax "
            "tune -n 2 -- script.py"
        )
    candidates = list_candidates(
        trainer, by_argument=by_argument, accumulation_steps=step.accumulation_steps
    )
    trials = try_candidates(trainer, candidates, step, item, unpack, steps=steps)
    if jax.process_index() == 0:
        print(
            f"{num_ranks} rank(s) on {trainer.runtime.platform}, {NUM_ROUNDS} rounds of {steps} "
            f"steps each"
        )
        print(describe(trials), flush=True)


def try_candidates(
    trainer: Trainer,
    candidates: Sequence[Candidate],
    step: Step,
    item: HostBatch,
    unpack: Callable[[HostBatch], Batch],
    *,
    steps: int,
) -> list[Trial]:
    """Measures a step in each way, but for those that ask for the same program as an earlier one.

    The ways run in turns, so that a disturbance of the machine hits all alike, and one state at a
    time is on the devices.
    """
    variables, adapter, runtime = trainer.variables(), trainer.adapter, trainer.runtime
    trainer.state = None
    with device_feed(
        trainer, iter([item] * step.num_steps), unpack, threaded=True, num_steps=step.num_steps
    ) as feed:
        group = next(iter(feed))
    programs: dict[str, tuple[Candidate, Trainer]] = {}
    for candidate in candidates:
        own = Trainer(adapter, runtime, DataParallelSteps(runtime, candidate.reduction), seed=0)
        own.compile(step.parts, step.optimizer, accumulation_steps=step.accumulation_steps)
        own.build_from(variables)
        programs.setdefault(own.lower_train_step(unpack(item)).as_text(), (candidate, own))
        own.state = None
    times: list[list[float]] = []
    # The first round compiles, and counts nowhere.
    for _ in range(NUM_ROUNDS + 1):
        times.append([])
        for _, own in programs.values():
            own.build_from(variables)
            times[-1].append(_time_step(own, group, steps))
            own.state = None
    slowest = collectives.all_gather(np.array(times[1:])).max(axis=0)
    return [
        Trial(candidate, slowest[:, index].tolist())
        for index, (candidate, _) in enumerate(programs.values())
    ]


def describe(trials: Sequence[Trial]) -> str:
    """Returns a table of trials, the way in use first, and what to do about it."""
    used = statistics.median(trials[0].seconds)
    width = max(len(trial.candidate.setting) for trial in trials)
    lines = [f"{'way':{width}} {'median ms':>10} {'min':>9} {'max':>9} {'of used':>8}"]
    for candidate, seconds in trials:
        median = statistics.median(seconds)
        numbers = (
            f"{median * 1e3:10.3f} {min(seconds) * 1e3:9.3f} {max(seconds) * 1e3:9.3f} "
            f"{median / used:8.3f}"
        )
        remark = "" if candidate.is_exact else "  rounds what is sent"
        lines.append(f"{candidate.setting:{width}} {numbers}{remark}")
    return "\n".join([*lines, advise(trials)])


def advise(trials: Sequence[Trial]) -> str:
    """Returns which options to use, in words.

    A way is worth a change if its median is 2 % below that of the first one, which is in use, and
    below its fastest round.
    """
    used = trials[0].seconds
    limit = min(_WORTH_A_CHANGE * statistics.median(used), min(used))
    better = sorted(
        (t for t in trials[1:] if statistics.median(t.seconds) < limit),
        key=lambda t: statistics.median(t.seconds),
    )
    exact = [trial.candidate.setting for trial in better if trial.candidate.is_exact]
    lines = [
        f"Use {exact[0]}"
        if exact
        else "Keep what it uses: no way that is as exact was faster beyond doubt."
    ]
    if better and not better[0].candidate.is_exact:
        lines.append(f"Faster still, if gradients may be rounded: {better[0].candidate.setting}")
    return "\n".join(lines)


def _time_step(trainer: Trainer, group: DeviceBatches, steps: int) -> float:
    """Returns the seconds of a step, after one program that warms up."""
    loop, num_programs = TimedLoop(trainer, repeat(group)), -(-steps // group.num_steps)
    loop.run(1)
    return loop.run(num_programs)[1] / (num_programs * group.num_steps)


def _reduction_of(trainer: Trainer) -> Reduction:
    """Returns how a trainer sums gradients; a ValueError if its steps leave no choice."""
    if type(trainer.steps) is not DataParallelSteps:
        raise ValueError(
            "With reproducible=True the order of all additions is fixed: there is nothing to tune. "
            "With a mesh gradients are summed layer by layer, and the compiler divides the step of "
            "a model that compares rows."
        )
    return trainer.steps.reduction
