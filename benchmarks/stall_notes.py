"""What the notes of `distributed/liveness/phases.py` cost a step: steps with and without them.

    python benchmarks/stall_notes.py --output benchmarks/results/stall_notes.json

A step stands for what `fit` notes around one: data, the step, a callback, and three waits for other
processes. Steps with and without notes alternate, and the medians of both are compared, so
that steps in which another program had the core do not count. The thread that samples how long each
phase takes runs all the time; what it costs is measured apart, as the processor time of a sample.
"""

import argparse
import json
import os
import platform
import statistics
import threading
import time

from tnt_jax.distributed.liveness import phases
from tnt_jax.distributed.liveness.watch import OwnTimes

_WAITS = 3
_WINDOW_S = 60.0


def step_with_notes(here: phases.Here, index: int) -> None:
    outer, here.doing = here.doing, ("data", "")
    here.doing = outer
    here.step = index
    here.doing = ("step", "")
    for _ in range(_WAITS):
        with phases.waiting("values of other processes"):
            pass
    outer, here.doing = here.doing, ("callback", "Callback.on_train_batch_end")
    here.doing = outer


def pass_time(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def step_us(step_s: float, here: phases.Here | None, index: int) -> float:
    """Returns the microseconds of one step."""
    start_ns = time.perf_counter_ns()
    pass_time(step_s)
    if here is not None:
        step_with_notes(here, index)
    return (time.perf_counter_ns() - start_ns) / 1000


def start_samples(here: phases.Here) -> tuple[threading.Thread, threading.Event]:
    """Returns a thread that samples, and what ends it."""
    stopped = threading.Event()
    sample, arguments = (
        OwnTimes(here, _WINDOW_S, lambda: False).run,
        (stopped, lambda passed_s: None),
    )
    thread = threading.Thread(target=sample, args=arguments)
    thread.start()
    return thread, stopped


def sampling_share(here: phases.Here, seconds: float = 5.0) -> float:
    """Returns the part of a core that the samples take, on an idle main thread."""
    thread, stopped = start_samples(here)
    start_s = time.process_time()
    time.sleep(seconds)
    stopped.set()
    thread.join()
    return (time.process_time() - start_s) / seconds


def measure(step_s: float, num_steps: int) -> dict:
    here = phases.here()
    times: dict[str, list[float]] = {"without": [], "with": []}
    thread, stopped = start_samples(here)
    for index in range(num_steps):
        for way in times:
            times[way].append(step_us(step_s, here if way == "with" else None, index))
    stopped.set()
    thread.join()
    found = {
        f"{way}_us": {
            "median": statistics.median(values), "quartiles": statistics.quantiles(values)[::2]
        }
        for way, values in times.items()
    }  # fmt: skip
    medians = [found[f"{way}_us"]["median"] for way in times]
    return found | {
        "notes_percent": 100 * (medians[1] / medians[0] - 1),
        "samples_percent": 100 * sampling_share(here),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--step-ms", type=float, default=0.6)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--output", help="JSON file for the results")
    arguments = parser.parse_args()
    found = measure(arguments.step_ms / 1000, arguments.steps)
    without, with_notes = (found[f"{way}_us"]["median"] for way in ("without", "with"))
    print(
        f"{without:.2f} us without, {with_notes:.2f} us with notes: {with_notes - without:.2f} us "
        f"or {found['notes_percent']:.2f} % a step (medians of {arguments.steps}); samples take "
        f"{found['samples_percent']:.3f} % of a core."
    )
    if arguments.output:
        about = {"cores": os.cpu_count(), "processor": platform.machine()}
        about |= {"python": platform.python_version(), "load": os.getloadavg()[0]}
        with open(arguments.output, "w") as file:
            json.dump({"arguments": vars(arguments), "about": about} | found, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
