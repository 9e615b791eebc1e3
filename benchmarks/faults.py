"""Disturbs training jobs of two processes, and counts what is lost.

Each trial starts a job, lets one fault happen at a random step, starts the job again where its
launcher does not (as a cluster would, at most `--starts` times in all), and compares the final
weights with those of the undisturbed job. A parameter of the model counts how often each row was
trained on, so rows that are lost or doubled are read from the weights themselves. The peers get
the same faults: PyTorch under torchrun, and Keras 3 on JAX with `BackupAndRestore`.

    python benchmarks/faults.py --trials 1000 --output benchmarks/results/faults.json
    python benchmarks/faults.py --contenders tnt_jax pytorch keras --trials 40
"""

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from fault_contenders import CONTENDERS, RunningJob
from fault_jobs.injected import EPOCHS, STEPS
from scaling import versions

# Those that happen inside a process, with the place; and those that come from outside.
INSIDE = {
    "exception in a callback": "exception callback",
    "exception in the loader": "exception loader",
    "MemoryError in the loader": "memory loader",
    "sys.exit(3) in a callback": "sys_exit callback",
    "os._exit(5) in a callback": "os_exit callback",
    "stuck in a callback": "stuck callback",
    "stuck in the loader": "stuck loader",
    "a slow process": "slow callback",
    "NaN in one row": "nan row",
}
OUTSIDE = (
    "kill -9 of a process", "SIGSEGV of a process", "SIGSTOP of a process", "SIGTERM to a process",
    "SIGTERM to the launcher", "SIGUSR1 to the launcher", "kill -9 of the launcher",
    "a flipped bit in the newest checkpoint", "a truncated file in the newest checkpoint",
)  # fmt: skip
FAULTS = (*INSIDE, *OUTSIDE)


@dataclass(frozen=True)
class Trial:
    """What became of a job.

    Attributes:
        contender: Who trained.
        fault: What happened.
        process: The process it happened to.
        step: The step at which it was due.
        ended: Whether the job came to its end.
        lost: Rows that were trained on too seldom, over all epochs.
        doubled: Rows that were trained on too often.
        same_weights: Whether the final weights are those of the undisturbed job, bit for bit.
        noticed_s: Seconds from the fault to the first line that the job printed or its first
            process that ended; None if it noticed nothing.
        back_s: Seconds from the fault to the next step; None if there was none.
        starts: How often the job was started, other than by its own launcher.
        code: Exit code of the last start; None if it was ended as hanging.
    """

    contender: str
    fault: str
    process: int
    step: int
    ended: bool
    lost: int = 0
    doubled: int = 0
    same_weights: bool = False
    noticed_s: float | None = None
    back_s: float | None = None
    starts: int = 1
    code: int | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=["tnt_jax"])
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--trials", type=int, default=len(FAULTS), help="of each contender")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--starts", type=int, default=4, help="most starts of a job")
    parser.add_argument(
        "--hang", type=float, default=120.0, help="seconds without a step or an end"
    )
    parser.add_argument("--minutes", type=float, help="stop beginning trials after this time")
    parser.add_argument("--output", help="JSON file for the results")
    args = parser.parse_args()
    trials = []
    began = time.monotonic()
    for contender in args.contenders:
        whole = run_trial(contender, "none", 0, 0, args, reference=None)[1]
        for trial in trials_of(contender, args, whole):
            trials.append(trial)
            print(_line(trial), flush=True)
            write(args, trials)
            if args.minutes and time.monotonic() - began > 60 * args.minutes:
                break
    print(table(trials))


def trials_of(contender: str, args: argparse.Namespace, whole: str) -> Iterator[Trial]:
    """Yields the trials of a contender: the faults in turns, the rest drawn from the seed."""
    for number in range(args.trials):
        draw = random.Random(f"{args.seed} {number}")
        fault = args.faults[number % len(args.faults)]
        process, step = draw.randrange(2), draw.randrange(3, STEPS - 8)
        yield run_trial(contender, fault, process, step, args, reference=whole)[0]


def run_trial(
    contender: str,
    fault: str,
    process: int,
    step: int,
    args: argparse.Namespace,
    *,
    reference: str | None,
) -> tuple[Trial, str]:
    """Runs one job to its end, and returns the trial and the digest of its weights."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    inside = f"{INSIDE[fault]} {process} {step}" if fault in INSIDE else ""
    codes: list[int | None] = []
    noticed_s = None
    try:
        while len(codes) < args.starts and not (folder / "result").exists():
            job = RunningJob(CONTENDERS[contender], folder, inside)
            try:
                codes.append(_watch(job, fault, process, step, folder, args.hang))
            finally:
                job.end()
            noticed_s = noticed_s or job.noticed_s
        return _judge(contender, fault, process, step, folder, codes, noticed_s, reference)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _watch(
    job: RunningJob, fault: str, process: int, step: int, folder: Path, hang_s: float
) -> int | None:
    """Waits for a job, makes faults from outside, and returns its exit code; None if it hangs."""
    moved_at, last = time.monotonic(), ""
    while (code := job.poll()) is None:
        time.sleep(0.02)
        steps = _steps(folder)
        state = f"{len(steps)} {job.num_lines}"
        if state != last:
            moved_at, last = time.monotonic(), state
        is_due = fault in OUTSIDE and steps and steps[-1][0] >= step
        if is_due and not (folder / "fault").exists():
            (folder / "fault").write_text(str(time.time()))
            job.disturb(fault, process)
        if time.monotonic() - moved_at > hang_s:
            return None
    return code


def _judge(
    contender: str,
    fault: str,
    process: int,
    step: int,
    folder: Path,
    codes: Sequence[int | None],
    noticed_s: float | None,
    reference: str | None,
) -> tuple[Trial, str]:
    """Reads from its folder what became of a job."""
    path = folder / "result"
    result = json.loads(path.read_text()) if path.exists() else {"seen": [], "digest": ""}
    happened = folder / "fault"
    at = float(happened.read_text()) if happened.exists() else None
    later = [moment for _, moment in _steps(folder) if at is not None and moment > at + 0.5]
    trial = Trial(
        contender, fault, process, step,
        ended=path.exists(),
        lost=round(sum(max(0.0, EPOCHS - count) for count in result["seen"])),
        doubled=round(sum(max(0.0, count - EPOCHS) for count in result["seen"])),
        same_weights=path.exists() and reference in (None, result["digest"]),
        noticed_s=noticed_s,
        back_s=None if at is None or not later else later[0] - at,
        starts=len(codes),
        code=codes[-1],
    )  # fmt: skip
    return trial, result["digest"]


def _steps(folder: Path) -> list[tuple[int, float]]:
    path = folder / "steps"
    lines = path.read_text().splitlines() if path.exists() else []
    pairs = [line.split() for line in lines]
    return [(int(pair[0]), float(pair[1])) for pair in pairs if len(pair) == 2]


def _line(trial: Trial) -> str:
    return " ".join(f"{name}={value}" for name, value in asdict(trial).items())


def table(trials: Sequence[Trial]) -> str:
    """Returns the trials by contender and fault, as a table."""
    lines = [
        "| contender | fault | trials | did not end | rows lost | doubled | other weights | "
        "noticed, s | next step, s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    kinds = dict.fromkeys((trial.contender, trial.fault) for trial in trials)
    for contender, fault in kinds:
        some = [item for item in trials if (item.contender, item.fault) == (contender, fault)]
        counts = [
            len(some),
            sum(not item.ended for item in some),
            sum(item.lost for item in some),
            sum(item.doubled for item in some),
            sum(item.ended and not item.same_weights for item in some),
        ]
        times = [
            _spread([value for item in some if (value := getattr(item, name)) is not None])
            for name in ("noticed_s", "back_s")
        ]
        lines.append(f"| {' | '.join(map(str, [contender, fault, *counts, *times]))} |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{statistics.median(values):.1f} (at most {max(values):.1f})"


def write(args: argparse.Namespace, trials: Sequence[Trial]) -> None:
    """Writes what is known so far."""
    if args.output:
        about = {"command": " ".join(sys.argv), "cores": os.cpu_count(), "versions": versions()}
        text = json.dumps(about | {"trials": [asdict(trial) for trial in trials]}, indent=1)
        Path(args.output).write_text(text + "\n")


if __name__ == "__main__":
    main()
