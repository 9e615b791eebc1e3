"""Times several kinds of steps in turns, so that a disturbance of the machine meets all alike."""

import time
from collections.abc import Callable, Collection, Mapping

import jax
import numpy as np

from tnt_jax.distributed.host import collectives

_WARM_PROGRAMS = 2


def time_in_turns(
    kinds: Mapping[str, Callable[[int], None]],
    *,
    rounds: int,
    programs: int,
    alone: Collection[str] = (),
) -> dict[str, np.ndarray]:
    """Returns the seconds of a program of each kind `[rounds, processes]`.

    All processes must call it with the same kinds, in the same order.

    Args:
        kinds: By name, what runs a number of programs to their end.
        rounds: How often each kind is timed; a round before compiles and warms up.
        programs: Programs that are timed in a round, after two that are not.
        alone: Kinds that process 0 runs while the others wait; of the others they have NaN.
    """
    found: dict[str, list[float]] = {name: [] for name in kinds}
    for round in range(rounds + 1):
        for name, run in kinds.items():
            collectives.barrier()
            seconds = float("nan")
            if name not in alone or jax.process_index() == 0:
                run(_WARM_PROGRAMS)
                start = time.perf_counter()
                run(programs)
                seconds = (time.perf_counter() - start) / programs
            if round:
                found[name].append(seconds)
    collectives.barrier()
    return {
        name: collectives.all_gather(np.array(own)).swapaxes(0, 1) for name, own in found.items()
    }
