"""Which arrays should the ring between CPU processes take joined into one?

Jobs of two processes train a network for handwritten digits (784-256-10) on random data, and join
gradients below different sizes. They train in the main thread, as scripts do, or in another one, as
in Ray Train, whose memory lies elsewhere. The jobs come one after another, in an order that changes
from round to round.

    python benchmarks/ring_joins.py --output benchmarks/results/ring_joins.json
"""

import argparse
import json
import statistics
import subprocess
import sys
import threading
from pathlib import Path

from machine import environment
from ray_steps import PROCESSES, summary, train

LIMITS = (0, 2**16, 2**20)
THREADS = ("main thread", "another thread")


def work(limit: int, thread: str) -> None:
    """Trains as one process of a job; the first one prints the median milliseconds of a step."""
    from tnt_jax.distributed import reduction

    reduction._SMALL_IN_RING = limit
    found = []

    def run() -> None:
        found.append(train({"network": "mlp"}))

    if thread == THREADS[0]:
        run()
    else:
        running = threading.Thread(target=run)
        running.start()
        running.join()
    if found[0] is not None:
        print(1e3 * statistics.median(found[0]["step_s"]))


def step_ms(limit: int, thread: str) -> float:
    """Returns the median milliseconds of a step of a job."""
    command = [sys.executable, "-m", "tnt_jax.launch", "-n", str(PROCESSES), "--no-gpu", "--"]
    done = subprocess.run(
        [*command, __file__, "--work", str(limit), thread],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    """Runs the rounds, and prints and writes what a step took."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        return work(int(given.work[0]), given.work[1])
    jobs = [(limit, thread) for thread in THREADS for limit in LIMITS]
    rounds: dict[tuple[int, str], list[float]] = {job: [] for job in jobs}
    for number in range(given.rounds):
        shift = number % len(jobs)
        for job in (*jobs[shift:], *jobs[:shift]):
            rounds[job].append(step_ms(*job))
    for (limit, thread), found in rounds.items():
        print(f"joined below {limit:7} bytes, {thread:14} {summary(found)} ms a step")
    if given.output:
        rows = [
            {"limit": limit, "thread": thread, "step_ms": found}
            for (limit, thread), found in rounds.items()
        ]
        given.output.write_text(json.dumps({**environment(), "rows": rows}, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
