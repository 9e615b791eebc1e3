"""Checks that all ranks hold the same training state, at the start of training and every epoch.

Copies are never exchanged: if a callback on one process, or faulty memory, changes one of them,
every later result is wrong without a word.
"""

import json
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from tnt_jax.cluster.devices import cpu_kind
from tnt_jax.distributed.host.comparison import name_processes
from tnt_jax.distributed.joining import runtime
from tnt_jax.distributed.liveness.rendezvous import meet
from tnt_jax.log import logger
from tnt_jax.train.health.state_checksums import (
    local_checksums,
    replicated_arrays,
    replicated_paths,
)
from tnt_jax.train.state import TrainState

_NAMED_ARRAYS, _MOST_SPEAKERS = 4, 8
_IN_TRAINING = (
    "Results would be wrong. A callback must do the same on every process, and not inside "
    "OnMaster; if no callback changes the state, the memory or the device of that rank is faulty. "
    "Go on from a checkpoint that was written before."
)
_AT_START = (
    "Load the same file on every process, or call model.set_weights(model.get_weights()) on all, "
    "which takes the weights of process 0."
)


class _Brought(NamedTuple):
    """The message of a process."""

    ranks: list[int]
    sums: list[int]
    stops: bool


class Divergence:
    """Compares the ranks during one training."""

    def __init__(self, *, forbids_single_stop: bool) -> None:
        self._forbids_single_stop = forbids_single_stop
        self._is_warned = False

    def check_start(self, state: TrainState) -> None:
        """Compares what training starts from; an error is raised on all processes."""
        self._compare(state, "start of training", _AT_START, stops=False)

    def check(self, state: TrainState, *, epoch: int, stop_training: bool) -> bool:
        """Compares the ranks after an epoch; returns whether any process ends training."""
        where = f"end of epoch {epoch}"
        stops = self._compare(state, where, _IN_TRAINING, stops=stop_training)
        if self._forbids_single_stop and any(stops) and not all(stops):
            raise RuntimeError(
                f"stop_training is True on the process(es) {_numbers(stops, True)} and False on "
                f"{_numbers(stops, False)}. A callback must decide alike on every process: from "
                "the logs, which are the same everywhere, and not inside OnMaster."
            )
        return any(stops)

    def _compare(self, state: TrainState, where: str, advice: str, *, stops: bool) -> list[bool]:
        """Returns which processes end training, if the state is the same on all ranks."""
        job = runtime.init()
        if job.num_ranks == 1:
            return [stops]
        local = local_checksums(replicated_arrays(state), job.mesh)
        own = _Brought(job.local_ranks, [zlib.crc32(row.tobytes()) for row in local], stops)
        brought = [_Brought(*json.loads(text)) for text in meet(where, json.dumps(own))]
        if len({total for one in brought for total in one.sums}) > 1:
            self._report(replicated_paths(state), local, brought, where, advice)
        return [one.stops for one in brought]

    def _report(
        self, names: list[str], local: np.ndarray, brought: list[_Brought], where: str, advice: str
    ) -> None:
        """Raises or warns, on all processes alike, of ranks that differ."""
        ranks: dict[int, list[int]] = {}
        process_of = {}
        for process, one in enumerate(brought):
            for rank, total in zip(one.ranks, one.sums, strict=True):
                ranks.setdefault(total, []).append(rank)
                process_of[rank] = process
        # One rank tells the checksums of all arrays for those that have the same.
        speakers = [alike[0] for alike in list(ranks.values())[:_MOST_SPEAKERS]]
        own_ranks = brought[jax.process_index()].ranks
        told = {
            rank: local[own_ranks.index(rank)].tolist() for rank in speakers if rank in own_ranks
        }
        answers = [json.loads(text) for text in meet(where, json.dumps([told, _kind_of_devices()]))]
        sums = {int(rank): row for rows, _ in answers for rank, row in rows.items()}
        text = describe_drift(names, sums, list(ranks.values()), process_of)
        text = f"At the {where}, the ranks do not hold the same training state: {text}."
        processors = {kind for _, kind in answers}
        if len(processors) == 1:
            raise RuntimeError(f"{text} {advice}")
        if not self._is_warned:
            self._is_warned = True
            logger.warning(
                "%s The processes run on different processors (%s), which may round differently; "
                "results then depend on which process saves them.",
                text,
                ", ".join(sorted(processors)),
            )


def describe_drift(
    names: Sequence[str],
    sums: dict[int, list[int]],
    alike: list[list[int]],
    process_of: dict[int, int],
) -> str:
    """Returns which arrays differ, on which ranks, from those of most ranks.

    There are checksums of the first rank of each group of ranks that hold the same.
    """
    told = [group for group in alike if group[0] in sums]
    # Of two groups of equal size it is not known which is wrong.
    reference = max(told, key=len)
    parts = []
    for group in told:
        if group is reference:
            continue
        pairs = zip(names, sums[reference[0]], sums[group[0]], strict=False)
        differing = [name for name, expected, found in pairs if expected != found]
        more = f" and {len(differing) - _NAMED_ARRAYS} more" * (len(differing) > _NAMED_ARRAYS)
        of_group = name_processes(sorted({process_of[rank] for rank in group}))
        parts.append(
            f"{', '.join(differing[:_NAMED_ARRAYS])}{more} on {_name_ranks(group)} ({of_group})"
        )
    of_reference = name_processes(sorted({process_of[rank] for rank in reference}))
    rest = f"; {len(alike) - len(told)} more kinds" * (len(alike) > len(told))
    return f"{'; '.join(parts)}{rest} differ from {_name_ranks(reference)} ({of_reference})"


def _name_ranks(ranks: Sequence[int]) -> str:
    return name_processes(ranks).replace("processes", "ranks").replace("process", "rank")


def _kind_of_devices() -> str:
    """Returns what decides how the devices of this process round."""
    kinds = sorted({device.device_kind for device in jax.local_devices()})
    return f"CPU {cpu_kind()}" if kinds == ["cpu"] else ", ".join(kinds)


def _numbers(stops: Sequence[bool], wanted: bool) -> str:
    return ", ".join(str(process) for process, stop in enumerate(stops) if stop == wanted)
