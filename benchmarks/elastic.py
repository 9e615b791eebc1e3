"""What the loss of processes costs an elastic job, beside a job that is started again.

A job of CPU processes trains while this program kills, and after every nine stops, one of them. A
delay before each step stands for the device: it is proportional to the rows of a rank, so that
fewer ranks take longer; up to eight ranks have equally many. Of each job are reported

    share_of_work         time in which the "devices" worked on steps that count, of all the time
                          from the first step on: the throughput, of that of the ranks that live
    next_step_s           from a loss to the end of the next step, by the signal
    joined_s              from the end of the imports of a replacement to its first step
    step_beside_delay_ms  the cost of a step beside its delay; with `--losses 0`, that of an elastic
                          job in which nothing fails
    steps_missing         steps that no process has done
    steps_repeated        steps after which the callbacks of a process were called twice
    distance              of the weights from those of one process without losses

The job `plain` has no losses, and `restarts` starts all processes again after each.

    python benchmarks/elastic.py --minutes 30 --losses 62 --output benchmarks/results/elastic.json
    python benchmarks/elastic.py --minutes 1 --losses 3 --processes 3  # A first look.
    python benchmarks/elastic.py --minutes 1 --losses 0 --step-s 0.01 --jobs plain elastic
    python benchmarks/elastic.py --minutes 3 --losses 5 --jobs elastic --reproducible
"""

import argparse
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from machine import versions

GLOBAL_BATCH, STEPS_PER_EPOCH = 840, 50  # Equal rows on up to eight ranks.
ROWS = GLOBAL_BATCH * STEPS_PER_EPOCH
JOBS = {
    "plain": [],
    "elastic": ["--elastic"],
    "restarts": ["--max-restarts", "10000", "--checkpoint-every", "5s"],
}


def work(folder: Path, epochs: int, step_s: float, planned: int, reproducible: bool) -> None:
    """Trains as one process of the job, and notes when each step was done."""
    rank = os.environ.get("TNT_PROCESS_ID", "0")
    import flax.linen as nn

    import tnt_jax as tnt
    from tnt_jax.distributed.elastic import link

    imported_at = time.time()

    class MLP(nn.Module):
        @nn.compact
        def __call__(self, x: Any, train: bool = False) -> Any:
            x = nn.relu(nn.Dense(256)(x))
            x = nn.Dropout(0.1, deterministic=not train)(x)
            return nn.Dense(10)(nn.relu(nn.Dense(64)(x)))

    class Device(tnt.callbacks.Callback):
        """Waits as long as the devices would compute, and notes the steps."""

        def on_train_begin(self, logs: Any = None) -> None:
            self._trains = False
            self._file = (folder / f"steps-{rank}-{os.getpid()}").open("a", buffering=1)
            self._file.write(f"{imported_at}\n")

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self._epoch = epoch

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self._rows = -(-GLOBAL_BATCH // tnt.get_process_count())
            time.sleep(self.delay_s)

        @property
        def delay_s(self) -> float:
            """Seconds of a step on this many ranks."""
            return step_s * self._rows * planned / GLOBAL_BATCH

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if not self._trains:
                # From here on it can be lost.
                self._trains = True
                (folder / f"pid-{rank}").write_text(str(os.getpid()))
            own = link()
            generation = -1 if own is None else own.generation.number
            if os.environ.get("TNT_RESTART_COUNT", "0") != "0":
                generation = int(os.environ["TNT_RESTART_COUNT"])
            # To read the number from the state would wait for the step.
            step = self._epoch * STEPS_PER_EPOCH + batch + 1
            self._file.write(json.dumps([time.time(), step, generation, self.delay_s]) + "\n")

    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, 64)).astype(np.float32)
    y = np.argmax(x @ rng.normal(size=(64, 10)), 1)
    model = tnt.Model(MLP(), seed=1, reproducible=reproducible)
    model.compile(
        tnt.optimizers.SGD(0.01), loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    callbacks = [Device()] if step_s else []
    model.fit(x, y, batch_size=GLOBAL_BATCH, epochs=epochs, verbose=0, callbacks=callbacks)
    if tnt.is_master_rank():
        np.savez(folder / "weights.npz", *map(np.asarray, model.get_weights()))


def run(job: str, arguments: argparse.Namespace, epochs: int, folder: Path) -> dict[str, Any]:
    """Runs a job with losses; returns what they cost."""
    saves = ["--checkpoint-dir", folder / "saved"] if job == "restarts" else []
    options = [*JOBS[job], *saves]
    words = ["-m", "tnt_jax.launch", "--no-gpu", "-n", arguments.processes, *options, "--"]
    sizes = [epochs, arguments.step_s, arguments.processes, int(arguments.reproducible)]
    own = [__file__, "--work", folder, *sizes]
    environ = os.environ | {"TNT_HEARTBEAT_TIMEOUT_S": "5"}
    with (folder / "output.txt").open("w") as output:
        launcher = subprocess.Popen(
            [sys.executable, *map(str, [*words, *own])], stderr=output, stdout=output, env=environ
        )
        num_losses = 0 if job == "plain" else arguments.losses
        losses = lose_processes(launcher, num_losses, arguments.minutes, folder)
        code = launcher.wait()
    return {"exit_code": code} | summarize(folder, losses, epochs * STEPS_PER_EPOCH)


def lose_processes(
    launcher: subprocess.Popen, num_losses: int, minutes: float, folder: Path
) -> list[tuple[float, str, int]]:
    """Kills or stops a random process at equal distances; returns when, how, and its rank."""
    chance = random.Random(0)
    losses: list[tuple[float, str, int]] = []
    interval_s = minutes * 60 / (num_losses + 1)
    while not list(folder.glob("steps-*")) and launcher.poll() is None:
        time.sleep(0.1)
    began_at = time.time()
    while len(losses) < num_losses and launcher.poll() is None:
        time.sleep(max(0.1, began_at + (len(losses) + 1) * interval_s - time.time()))
        pids = {file.name[4:]: int(file.read_text() or 0) for file in folder.glob("pid-*")}
        living = [rank for rank, pid in pids.items() if pid and Path(f"/proc/{pid}").exists()]
        how = signal.SIGSTOP if len(losses) % 10 == 9 else signal.SIGKILL
        if living:
            rank = chance.choice(sorted(living))
            os.kill(pids[rank], how)
            losses.append((time.time(), how.name, int(rank)))
    return losses


def summarize(folder: Path, losses: list[tuple[float, str, int]], num_steps: int) -> dict[str, Any]:
    """Returns what the module's description lists, of the notes of all processes."""
    files = [
        [json.loads(line) for line in file.read_text().splitlines()]
        for file in folder.glob("steps-*")
    ]
    of_process = [own[1:] for own in files if len(own) > 1]
    notes = sorted(note for own in of_process for note in own)
    first_of: dict[int, float] = {}
    work_s: dict[int, float] = {}
    for moment, step, generation, delay_s in notes:
        first_of.setdefault(generation, moment)
        work_s[step] = delay_s
    delays: dict[str, list[float]] = {}
    for at, how, _ in losses:
        later = [moment for moment in first_of.values() if moment > at]
        if later:
            delays.setdefault(how, []).append(min(later) - at)
    joined = [own[1][0] - own[0] - own[1][3] for own in files if len(own) > 1 and own[1][2] > 0]
    repeated = sum(len(own) - len({note[1] for note in own}) for own in of_process)
    beside_s = [
        after[0] - before[0] - after[3]
        for own in of_process
        for before, after in pairwise(own)
        if before[2] == after[2]
    ]
    wall_s = notes[-1][0] - notes[0][0]
    # The time begins with the end of the first step.
    worked_s = sum(work_s.values()) - work_s[notes[0][1]]
    return {
        "losses": dict(Counter(how for _, how, _ in losses)),
        "losses_of_ranks": dict(sorted(Counter(rank for *_, rank in losses).items())),
        "wall_s": round(wall_s, 1),
        "share_of_work": round(worked_s / wall_s, 4),
        "step_beside_delay_ms": round(1000 * statistics.median(beside_s), 3),
        "next_step_s": {how: spread(values) for how, values in delays.items()},
        "joined_s": spread(joined),
        "steps_missing": num_steps - len(work_s),
        "steps_repeated": repeated,
    }


def spread(values: list[float]) -> dict[str, float]:
    """Returns number, median, 95th percentile and largest of some seconds."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {
        "number": len(ordered),
        "median": round(statistics.median(ordered), 2),
        "p95": round(ordered[math.ceil(0.95 * len(ordered)) - 1], 2),
        "max": round(ordered[-1], 2),
    }


def distance(one: Path, other: Path) -> float:
    """Returns the largest difference of two files of weights."""
    first, second = np.load(one), np.load(other)
    return max(float(np.abs(first[name] - second[name]).max()) for name in first.files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--losses", type=int, default=62)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--step-s", type=float, default=0.5, help="of a step on all processes")
    parser.add_argument("--jobs", nargs="+", default=["elastic", "restarts"], choices=JOBS)
    parser.add_argument("--reproducible", action="store_true", help="train with the same bits")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    epochs = max(1, round(arguments.minutes * 60 / arguments.step_s / STEPS_PER_EPOCH))
    report: dict[str, Any] = {"versions": versions(), "arguments": vars(arguments) | {"output": ""}}
    with tempfile.TemporaryDirectory() as name:
        truth = Path(name, "truth")
        truth.mkdir()
        own = ["--work", truth, epochs, 0.0, 1, int(arguments.reproducible)]
        subprocess.run([sys.executable, __file__, *map(str, own)], check=True)
        for job in arguments.jobs:
            folder = Path(name, job)
            folder.mkdir()
            found = run(job, arguments, epochs, folder)
            ends = folder / "weights.npz"
            found["distance"] = distance(truth / "weights.npz", ends) if ends.exists() else None
            report[job] = found
            print(job, json.dumps(found), flush=True)
            if found["exit_code"]:
                print((folder / "output.txt").read_text()[-3000:], file=sys.stderr)
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    if "--work" in sys.argv:
        at = sys.argv.index("--work")
        place, num_epochs, seconds, number, is_reproducible = sys.argv[at + 1 :]
        work(Path(place), int(num_epochs), float(seconds), int(number), is_reproducible == "1")
    else:
        main()
