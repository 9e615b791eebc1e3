"""What the notes of `distributed/stall.py` cost a training step: the same steps with and without.

    python benchmarks/stall_notes.py [--step-ms 0.6] [--steps 5000]

A step stands for what `fit` notes around one: data, a callback, and the waits of a ring of three
buckets. Steps with and without notes alternate, and the medians of both are compared, so that
steps in which another program had the core do not count.
"""

import argparse
import statistics
import threading
import time

from tnt_jax.distributed import stall

_BUCKETS = 3


def step_with_notes(here: stall.Here, index: int) -> None:
    outer = here.enter("data")
    here.enter(*outer)
    here.step = index
    here.enter("step")
    thread = threading.get_ident()
    for _ in range(_BUCKETS):
        here.end_wait(thread, here.begin_wait(thread, "sum of gradients"))
    outer = here.enter("callback", "Callback.on_train_batch_end")
    here.enter(*outer)


def pass_time(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def step_us(step_s: float, here: stall.Here | None, index: int) -> float:
    """Returns the microseconds of one step."""
    start_ns = time.perf_counter_ns()
    pass_time(step_s)
    if here is not None:
        step_with_notes(here, index)
    return (time.perf_counter_ns() - start_ns) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--step-ms", type=float, default=0.6)
    parser.add_argument("--steps", type=int, default=5000)
    arguments = parser.parse_args()
    here, step_s = stall.here(), arguments.step_ms / 1000
    times: dict[bool, list[float]] = {True: [], False: []}
    for index in range(arguments.steps):
        for notes in (False, True):
            times[notes].append(step_us(step_s, here if notes else None, index))
    without, with_notes = (statistics.median(times[notes]) for notes in (False, True))
    print(
        f"{without:.2f} us without, {with_notes:.2f} us with notes: {with_notes - without:.2f} us "
        f"or {100 * (with_notes / without - 1):.2f} % a step (medians of {arguments.steps})."
    )


if __name__ == "__main__":
    main()
