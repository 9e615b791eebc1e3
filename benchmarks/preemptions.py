"""Sends signals at random times to jobs of two processes, and counts what is lost.

`python benchmarks/preemptions.py --trials 100 --seed 0`: each trial starts
`tests/scripts/preempted.py`, or starts it again where the trial before ended it, waits for training
to begin and a random time, and sends a random one of SIGTERM, SIGUSR1 and SIGUSR2 to the launcher
or to one process. A run that comes to its end must have the digest of one that nobody interrupted.
"""

import argparse
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
from preemptions import LAUNCHER, PREEMPTED, Run, digests

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# A step sleeps so long that 36 of them take about as long as the longest delay of a signal.
STEP_S, LONGEST_DELAY_S = 0.1, 5.0


@dataclass
class Trial:
    """What one signal did.

    Attributes:
        sent: Signal, receiver and delay, in words.
        code: Exit code of the launcher.
        ended_at: Updates at the end of training, by process.
        exit_s: Seconds from the signal to the end of the launcher; None if it came too late.
        digests: What a run printed that came to its end.
        error: Its messages.
    """

    sent: str
    code: int
    ended_at: list[int]
    exit_s: float | None
    digests: list[str]
    error: str

    @property
    def has_saved(self) -> bool:
        """Whether both processes ended alike, after saving."""
        return self.code == PREEMPTED and len(self.ended_at) == 2 and len(set(self.ended_at)) == 1


def run_trial(folder: Path, numbers: random.Random) -> Trial:
    """Runs the script until a signal or its own end stops it."""
    signum, to = numbers.choice(SIGNALS), numbers.choice([LAUNCHER, 0, 1])
    delay_s = numbers.uniform(0, LONGEST_DELAY_S)
    run = Run(folder, variables={"STEP_S": str(STEP_S)})
    run.wait_for([folder / f"pid-{process}" for process in (0, 1)])
    time.sleep(delay_s)
    is_late = run.launcher.poll() is not None
    began = time.monotonic()
    if not is_late:
        run.send(signum, to)
    code, out, error = run.end(timeout_s=300)
    found = [line.split()[1] for line in out.splitlines() if line.startswith("digest")]
    exit_s = None if is_late or code == 0 else time.monotonic() - began
    sent = f"{signum.name} to {to} after {delay_s:.2f} s"
    return Trial(sent, code, run.ended_at(), exit_s, found, error)


def run_trials(num_trials: int, seed: int, truth: list[str]) -> list[Trial]:
    """Runs trials, printing each; says of a run that ended with other weights that it is lost."""
    numbers = random.Random(seed)
    trials: list[Trial] = []
    folder = Path(tempfile.mkdtemp(prefix="preemptions-"))
    while len([trial for trial in trials if trial.exit_s is not None]) < num_trials:
        trial = run_trial(folder, numbers)
        trials.append(trial)
        took = "" if trial.exit_s is None else f", {trial.exit_s:.1f} s to the end"
        print(f"{len(trials)}: {trial.sent}: code {trial.code}, {trial.ended_at}{took}", flush=True)
        if trial.code not in (0, PREEMPTED):
            print(trial.error, flush=True)
        if trial.code == 0:
            print("   weights", "equal" if trial.digests == truth else "DIFFER", flush=True)
            shutil.rmtree(folder)
    return trials


def main() -> None:
    """Prints a line for each trial, and their table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    truth = digests(Path(tempfile.mkdtemp(prefix="preemptions-")))
    trials = run_trials(arguments.trials, arguments.seed, truth)
    sent = [trial for trial in trials if trial.exit_s is not None]
    finished = [trial for trial in trials if trial.code == 0]
    exits = sorted(trial.exit_s for trial in sent if trial.exit_s is not None)
    print("| trials | saved at one step, code 75 | others | runs finished | with other weights | "
          "median to exit | longest |")  # fmt: skip
    print("|---|---|---|---|---|---|---|")
    saved = sum(trial.has_saved for trial in sent)
    differ = sum(trial.digests != truth for trial in finished)
    print(f"| {len(sent)} | {saved} | {len(sent) - saved} | {len(finished)} | {differ} | "
          f"{exits[len(exits) // 2]:.1f} s | {exits[-1]:.1f} s |")  # fmt: skip


if __name__ == "__main__":
    main()
