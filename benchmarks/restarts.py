"""What a restart costs: the seconds from the death of a rank to the next step of training.

A job of two CPU processes under `tnt-jax --max-restarts 1` trains, and one rank is killed at a
step. Each round begins with an empty compilation cache, so the first start shows what the programs
cost that a restart finds there.

    python benchmarks/restarts.py --output benchmarks/results/restarts.json
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import versions
from scaling_models import SIZES, load, make_flax

# From one event to the next; the first three are of a restart alone.
PHASES = (
    ("fault", "ended", "notice, and end of the others"),
    ("ended", "launched", "delay"),
    ("launched", "script", "start of the processes"),
    ("script", "joined", "imports, joining the job"),
    ("joined", "restoring", "data, initial weights"),
    ("restoring", "restored", "restore"),
    ("restored", "stepped", "compilation, first step"),
)
KILLED_RANK, KILLED_AT_STEP, SAVED_EVERY = 1, 12, 5


def work(model_name: str, folder: Path) -> None:
    """Trains, as one process of the job, and writes when it has got how far."""
    began_at = time.time()
    import jax
    import optax

    import tnt_jax as tnt
    from tnt_jax.settings import read_settings

    settings = read_settings()

    def note(event: str, moment: float) -> None:
        if event == "fault" or tnt.is_master_rank():
            path = folder / f"events{settings.restart_count}"
            with open(path, "a") as file:
                file.write(json.dumps([event, moment]) + "\n")

    class Watch(tnt.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.step = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.step += 1
            if self.step == 1:
                jax.block_until_ready(self.model.state.params)
                note("stepped", time.time())
            is_victim = settings.restart_count == 0 and tnt.get_rank() == KILLED_RANK
            if is_victim and self.step == KILLED_AT_STEP:
                note("fault", time.time())
                os.kill(os.getpid(), signal.SIGKILL)

    class Backup(tnt.callbacks.BackupAndRestore):
        def on_train_begin(self, logs: Any = None) -> None:
            note("restoring", time.time())
            super().on_train_begin(logs)
            note("restored", time.time())

    tnt.init()
    joined_at = time.time()
    for event, moment in [("launched", settings.launched_at), ("script", began_at)]:
        note(event, moment or 0.0)
    note("joined", joined_at)
    batch = SIZES[model_name].rows * tnt.get_size()
    x, y = load(model_name, real=False, num_rows=20 * batch)
    model = tnt.Model(make_flax(model_name))
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optax.sgd(0.01, momentum=0.9), loss=loss)
    callbacks = [Watch(), Backup(folder / "backup", save_freq=SAVED_EVERY)]
    inputs = x if len(x) > 1 else x[0]
    model.fit(inputs, y, batch_size=batch, epochs=1, verbose=0, callbacks=callbacks)


def run_round(model: str) -> list[dict[str, float]]:
    """Returns the seconds of each phase at the first start and at the restart."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environ = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        options = ["-n", "2", "--no-gpu", "--max-restarts", "1", "--"]
        command = [sys.executable, "-m", "tnt_jax.launch", *options]
        worker = [__file__, "--worker", model, name]
        launcher = subprocess.Popen(
            [*command, *worker], env=environ, stderr=subprocess.PIPE, text=True
        )
        assert launcher.stderr is not None
        ended_at, said = 0.0, []
        for line in launcher.stderr:
            said.append(line)
            if "Restart 1 of 1 follows" in line:
                ended_at = time.time()
        if launcher.wait():
            sys.exit("".join(said))
        starts = []
        for number in (0, 1):
            lines = (folder / f"events{number}").read_text().splitlines()
            starts.append(dict(json.loads(line) for line in lines))
    starts[1] |= {"fault": starts[0].pop("fault"), "ended": ended_at}
    return [
        {
            label: events[end] - events[begin]
            for begin, end, label in PHASES
            if begin in events and end in events
        }
        for events in starts
    ]


def describe(seconds: list[float]) -> str:
    """Returns the median and the range."""
    if not seconds:
        return ""
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=SIZES, default=["mlp", "resnet20"])
    parser.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    parser.add_argument("--output", help="JSON file for the results")
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(args.worker[0], Path(args.worker[1]))
        return
    # In turns, so that a busy minute of the machine does not meet one model alone.
    rounds = [{model: run_round(model) for model in args.models} for _ in range(args.rounds)]
    print("| network | seconds | first start | restart |\n| --- | --- | --- | --- |")
    for model in args.models:
        for label in [label for _, _, label in PHASES]:
            cells = [
                describe([one[model][start][label] for one in rounds if label in one[model][start]])
                for start in (0, 1)
            ]
            print(f"| {model} | {label} | {cells[0]} | {cells[1]} |")
        totals = [[sum(one[model][start].values()) for one in rounds] for start in (0, 1)]
        print(f"| {model} | all | {describe(totals[0])} | {describe(totals[1])} |")
    if args.output:
        found = {"versions": versions(), "cores": os.cpu_count(), "rounds": rounds}
        Path(args.output).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
