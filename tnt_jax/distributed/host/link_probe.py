"""Measures all-reduces between pairs of processes of a job.

`tnt-jax doctor` starts it as `python -m tnt_jax.distributed.host.link_probe`. Each pair prints one
line of JSON: the ranks, the latency of a reduction of one number, and the bandwidth of a large one.
"""

import json
import statistics
import time
from itertools import combinations

import jax
import numpy as np
from jax.sharding import PartitionSpec

from tnt_jax import _jax
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.joining import runtime

_LARGE_BYTES = 4 << 20
_MOST_PROCESSES_FOR_ALL_PAIRS = 4


def choose_pairs(num_processes: int) -> list[tuple[int, int]]:
    """Returns the pairs to measure: all of a few processes, ring neighbours of many.

    >>> choose_pairs(3), choose_pairs(5)
    ([(0, 1), (0, 2), (1, 2)], [(0, 1), (1, 2), (2, 3), (3, 4), (0, 4)])
    """
    if num_processes <= _MOST_PROCESSES_FOR_ALL_PAIRS:
        return list(combinations(range(num_processes), 2))
    return [*((rank, rank + 1) for rank in range(num_processes - 1)), (0, num_processes - 1)]


def measure_pair(pair: tuple[int, int]) -> dict[str, float]:
    """Returns the cost of an all-reduce between two processes; both must call it, and no other.

    `latency_us` is the median for one float, `bandwidth_mb_per_s` 4 MiB over the median for them.
    """
    latency_s = _time_all_reduce(pair, num_floats=1, repeats=20)
    large_s = _time_all_reduce(pair, num_floats=_LARGE_BYTES // 4, repeats=5)
    return {
        "latency_us": round(latency_s * 1e6, 1),
        "bandwidth_mb_per_s": round(_LARGE_BYTES / large_s / 1e6, 1),
    }


def _time_all_reduce(pair: tuple[int, int], *, num_floats: int, repeats: int) -> float:
    mesh = _jax.make_data_mesh(
        [next(d for d in jax.devices() if d.process_index == process) for process in pair]
    )
    x = _jax.shard_rows(np.ones((2, num_floats), np.float32), mesh)
    add = jax.jit(
        _jax.shard_map(
            lambda x: jax.lax.psum(x, "data"),
            mesh=mesh,
            in_specs=PartitionSpec("data"),
            out_specs=PartitionSpec(None),
        )
    )
    total = np.asarray(add(x).addressable_data(0))
    if not (total == 2).all():
        raise RuntimeError(
            f"An all-reduce of ones between processes {pair} gave {total.ravel()[:4]}, not 2."
        )
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(add(x))
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def main() -> None:
    """Measures one pair after another; the other processes wait at a barrier."""
    runtime.init()
    for pair in choose_pairs(runtime.get_process_count()):
        if runtime.get_process_index() in pair:
            measured = measure_pair(pair)
            if runtime.get_process_index() == pair[0]:
                print(json.dumps({"pair": pair, **measured}), flush=True)
        collectives.barrier()


if __name__ == "__main__":
    main()
