"""Disturbs one job for half an hour, and shows that memory, threads and open files stay flat.

Two processes train under `tnt-jax --max-restarts`, and a fault comes every 20 seconds on average: a
process is killed, preempted, or stopped for good; or it is stopped for three seconds, the disk of
the checkpoints is full or read-only for five, or their directory vanishes, which the processes
survive. Resident memory, threads and open files of the launcher and the processes are read once a
second. After the last fault, rows that were lost or doubled are read from the
weights (`faults.py`).

    python benchmarks/soak.py --minutes 30 --output benchmarks/results/soak.json --plot soak.png
"""

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fault_contenders import CONTENDERS, TNT_JAX, RunningJob, tnt_jax_words
from fault_damage import Disk, remove_folder
from machine import versions

_SAMPLE_S = 1.0
# A record keeps the samples of every fifth second.
_KEPT_S = 5
_TICK_S = 0.05
_PAUSED_S, _HELD_S = 3.0, 5.0
# A process is new for so long: it imports, compiles and reads ahead.
_SETTLING_S = 20.0
# What ends an attempt comes rarely enough that most attempts last for more than a minute, after
# which the launcher's delays begin anew.
_WEIGHTS = {
    "SIGSTOP for 3 s": 4, "disk full": 4, "read-only disk": 4, "directory vanished": 4,
    "kill -9": 2, "SIGTERM": 2, "SIGSTOP": 1,
}  # fmt: skip
_ENDING = ("kill -9", "SIGTERM", "SIGSTOP")
# One that is stopped before it has joined its job is noticed after this time.
_ENVIRONMENT = TNT_JAX | {"TNT_INIT_TIMEOUT_S": "60"}


class Soak:
    """The job, its faults, and what is read of its processes.

    Args:
        folder: Folder of the job.
        seconds: How long faults come.
        every_s: Mean time between two of them.
        seed: Seed of faults and times.
    """

    def __init__(self, folder: Path, seconds: float, every_s: float, seed: int) -> None:
        self._folder, self._seconds, self._every_s = folder, seconds, every_s
        self._draw = random.Random(seed)
        self._disk = Disk(folder / "disk")
        self._later: list[tuple[float, Callable[[], None]]] = []
        self.faults: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        plan = {"epochs": 10**6, "faults": [], "differs": None, "changes": {}}
        (folder / "plan.json").write_text(json.dumps(plan))
        words = [sys.executable, "-m", "tnt_jax.launch", "-n", "2", "--no-gpu"]
        words += ["--max-restarts", "100000", *tnt_jax_words(folder)]
        self._job = RunningJob(CONTENDERS["tnt_jax"], folder, commands=[(words, _ENVIRONMENT)])

    def run(self) -> dict[str, Any]:
        """Returns faults, samples, the last epoch and the exit code of the job."""
        began = time.time()
        try:
            self._disturb_until(began + self._seconds)
            for _, action in self._later:
                action()
            num_epochs = len(self._epochs())
            self._await(lambda: len(self._epochs()) > num_epochs + 3)
            self._job.send(signal.SIGTERM, None)
            self._await(lambda: self._job.poll() is not None)
            codes = self._job.poll()
        finally:
            self._job.end()
            self._disk.close()
        last = self._epochs()[-1]
        return {
            "seconds": time.time() - began, "code": codes, "faults": self.faults,
            "epochs": last["epoch"], "lost": last["lost"], "doubled": last["doubled"],
            "restarts": sum("Restart" in line and "starts" in line for _, line in self._job.lines),
            "samples": self.samples,
        }  # fmt: skip

    def _disturb_until(self, end: float) -> None:
        due, sampled = time.time() + _SETTLING_S, 0.0
        while time.time() < end:
            if (codes := self._job.poll()) is not None:
                raise RuntimeError(f"The job has ended with {codes}: {self._job.lines[-20:]}")
            for item in [item for item in self._later if item[0] <= time.time()]:
                self._later.remove(item)
                item[1]()
            if time.time() >= due and not self._later and len(self._job.workers()) == 2:
                self._disturb()
                due = time.time() + self._draw.expovariate(1 / self._every_s)
            if time.time() >= sampled + _SAMPLE_S:
                sampled = time.time()
                self.samples += _facts(self._folder, sampled)
            time.sleep(_TICK_S)

    def _disturb(self) -> None:
        names = list(_WEIGHTS)
        fault = self._draw.choices(names, list(_WEIGHTS.values()))[0]
        pid = self._job.workers()[self._draw.randrange(2)]
        self.faults.append({"fault": fault, "time": time.time(), "ends": fault in _ENDING})
        if fault in ("disk full", "read-only disk"):
            (self._disk.fill if fault == "disk full" else self._disk.freeze)()
            self._later.append((time.time() + _HELD_S, self._disk.release))
        elif fault == "directory vanished":
            remove_folder(self._folder / "disk" / "run")
        else:
            _send(pid, signal.SIGKILL if fault == "kill -9" else signal.Signals[fault.split()[0]])
        if fault == "SIGSTOP for 3 s":
            self._later.append((time.time() + _PAUSED_S, lambda: _send(pid, signal.SIGCONT)))

    def _epochs(self) -> list[dict[str, Any]]:
        path = self._folder / "epochs"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

    def _await(self, is_done: Callable[[], bool], timeout_s: float = 600.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_done():
            if time.monotonic() > deadline:
                raise TimeoutError(f"The job hangs: {self._job.lines[-20:]}")
            time.sleep(_TICK_S)


def _send(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:  # It has just ended.
        return


def _facts(folder: Path, now: float) -> list[dict[str, Any]]:
    """Returns what the processes of the job take: those whose command names the folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            if str(folder).encode() not in words:
                continue
            pages = int((entry / "statm").read_text().split()[1])
            is_rank = b"TNT_PROCESS_ID=" in (entry / "environ").read_bytes()
            found.append({
                "time": round(now, 1), "pid": int(entry.name),
                "role": "training" if is_rank else "launcher",
                "megabytes": round(pages * os.sysconf("SC_PAGE_SIZE") / 1e6, 2),
                "threads": len(list((entry / "task").iterdir())),
                "files": len(list((entry / "fd").iterdir())),
            })  # fmt: skip
        except OSError:  # It has ended.
            continue
    return found


def growth(samples: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Returns how much processes have grown in a minute, by role, at the median of the processes.

    Of each process that lived for a hundred seconds or more, the last quarter of its samples is
    compared with the third, by medians. In the first half it may still import and compile.
    """
    slopes: dict[str, dict[str, list[float]]] = {}
    for pid in {sample["pid"] for sample in samples}:
        own = [sample for sample in samples if sample["pid"] == pid]
        if own[-1]["time"] - own[0]["time"] < 100:
            continue
        quarter = len(own) // 4
        early, late = own[2 * quarter : 3 * quarter], own[3 * quarter :]
        minutes = (late[0]["time"] - early[0]["time"]) / 60
        for what in ("megabytes", "threads", "files"):
            grown = statistics.median(s[what] for s in late) - statistics.median(
                s[what] for s in early
            )
            slopes.setdefault(own[0]["role"], {}).setdefault(what, []).append(grown / minutes)
    return {
        role: {what: statistics.median(values) for what, values in of_role.items()}
        for role, of_role in slopes.items()
    }


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draws memory, threads and files of all processes over time, with the faults."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    began = result["samples"][0]["time"]
    figure, axes = plt.subplots(3, 1, sharex=True, figsize=(10, 8))
    for axis, what in zip(axes, ("megabytes", "threads", "files"), strict=True):
        for role, colour in (("training", "tab:blue"), ("launcher", "tab:orange")):
            for pid in {sample["pid"] for sample in result["samples"] if sample["role"] == role}:
                own = [sample for sample in result["samples"] if sample["pid"] == pid]
                times = [(sample["time"] - began) / 60 for sample in own]
                axis.plot(times, [sample[what] for sample in own], color=colour, lw=1)
        for fault in result["faults"]:
            colour = "tab:red" if fault["ends"] else "0.8"
            axis.axvline((fault["time"] - began) / 60, color=colour, lw=0.5)
        axis.set_ylabel(what)
        axis.set_ylim(bottom=0)
    axes[0].set_title("training (blue), launcher (orange); faults (red: restart)")
    axes[-1].set_xlabel("minutes")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=20.0, help="mean seconds between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", help="JSON file for the result")
    parser.add_argument("--plot", help="PNG file; needs matplotlib")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name) / "job"
        folder.mkdir()
        result = Soak(folder, 60 * args.minutes, args.every, args.seed).run()
    about = {"command": " ".join(sys.argv), "cores": os.cpu_count(), "versions": versions()}
    grown = growth(result["samples"])
    told = {name: value for name, value in result.items() if name not in ("faults", "samples")}
    print(json.dumps({**told, "faults": len(result["faults"]), "growth_per_minute": grown}))
    if args.output:
        kept = [sample for sample in result["samples"] if int(sample["time"]) % _KEPT_S == 0]
        text = json.dumps({**about, **result, "samples": kept, "growth_per_minute": grown})
        Path(args.output).write_text(text + "\n")
    if args.plot:
        plot(result, Path(args.plot))


if __name__ == "__main__":
    main()
