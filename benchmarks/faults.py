"""Disturbs training jobs of two processes, and counts what is lost.

A trial is one fault: a signal, a death, a blocked or slow process, a bad number, a damaged file, a
full disk, a process that disagrees, a start with other settings, a network that is cut, each in
every phase of training in which it can happen (`fault_kinds.py`). What is lost or doubled is read
from the weights: a parameter of the model counts how often each row was trained on. After each
fault the arrays must have the bits of the undisturbed job's. The peers get the same faults: PyTorch
under torchrun, and Keras 3 on JAX with `BackupAndRestore`.

Each trial adds a line to the record; those that are in it are not run again, so that a series can
be interrupted and continued. A line with a reason under `void` is shown, but not counted, and its
trial is run again:

    python benchmarks/faults.py --trials 1000 --seed 0 --record faults.jsonl
    python benchmarks/faults.py --contenders pytorch keras --repetitions 3 --record faults.jsonl
    python benchmarks/faults.py --table faults.jsonl --into docs/fault_trials.md

Mounting file systems and cutting networks needs root; without it, those kinds are left out.
"""

import argparse
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
from fault_contenders import CONTENDERS, STOP, Stopped
from fault_kinds import KINDS, Kind
from fault_sequences import FaultSequence, in_order
from fault_starts import has_hosts, run_alone, verdict_alone
from fault_tables import compact, insert, read_records, tables
from fault_verdicts import Trial, verdict
from machine import commit, versions


def main() -> None:
    args = parse_arguments()
    if args.table:
        text = tables([record for path in args.table for record in read_records(Path(path))])
        if args.into:
            insert(text, Path(args.into))
        else:
            print(text)
        return
    record = Path(args.record)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: STOP.set())
    with tempfile.TemporaryDirectory(prefix="tnt-faults-", ignore_cleanup_errors=True) as scratch:
        try:
            for contender in args.contenders:
                Series(contender, args, Path(scratch), record).run()
        except Stopped:
            sys.exit("Ended by a signal. The same command goes on from the record.")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=["tnt_jax"])
    parser.add_argument("--kinds", help="only kinds whose name this regular expression finds")
    parser.add_argument("--trials", type=int, default=1000, help="of each contender")
    parser.add_argument("--repetitions", type=int, help="most trials of a kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", default="faults.jsonl", help="file to which trials are added")
    parser.add_argument("--table", nargs="+", metavar="RECORD", help="print tables, and end")
    parser.add_argument("--into", metavar="PAGE", help="write the tables into a page instead")
    parser.add_argument("--jobs", type=int, default=1, help="jobs that run at a time")
    parser.add_argument("--faults-per-job", type=int, default=8)
    parser.add_argument("--hang", type=float, default=120.0, help="seconds without any progress")
    parser.add_argument("--minutes", type=float, help="begin no job after this time")
    parser.add_argument("--keep", help="folder for the output of jobs that went wrong")
    return parser.parse_args()


class Series:
    """The trials of one contender.

    Args:
        contender: Who trains.
        args: The options.
        scratch: Folder for its jobs.
        record: File to which trials are added.
    """

    def __init__(
        self, contender: str, args: argparse.Namespace, scratch: Path, record: Path
    ) -> None:
        self._contender, self._args = contender, args
        self._scratch, self._record = scratch, record
        self._write, self._failures = threading.Lock(), 0
        self._until = time.monotonic() + 60 * args.minutes if args.minutes else None
        known = " ".join(f"{name} {number}" for name, number in versions().items())
        self._about = {"seed": args.seed, "commit": commit(), "versions": known}

    def run(self) -> None:
        """Runs what is not recorded, round by round of all kinds."""
        for trials in self._rounds():
            if not trials or self._is_over():
                continue
            # Before the threads, which all need them.
            _ = self._digests
            if any(trial.kind.family != "sequence" for trial in trials):
                _ = self._weights
            with ThreadPoolExecutor(self._args.jobs) as pool:
                list(pool.map(self._try_group, _groups(trials, self._args.faults_per_job)))
        if self._failures:
            raise RuntimeError(f"{self._failures} jobs could not be judged; see above.")

    @cached_property
    def _digests(self) -> list[str]:
        """The digests of the undisturbed job's arrays after each epoch."""
        most = 2 + 4 * self._args.faults_per_job
        whole = FaultSequence(self._contender, [], self._scratch, self._args.hang, most)
        whole.run()
        epochs = whole.history.epochs
        if len(epochs) != most + 1 or any(item["lost"] or item["doubled"] for item in epochs):
            raise RuntimeError(f"The undisturbed job is wrong: {whole.history.lines}")
        return [epoch["digest"] for epoch in epochs]

    @cached_property
    def _weights(self) -> np.ndarray:
        """All numbers that the undisturbed job ends with after three epochs."""
        three = FaultSequence(self._contender, [], self._scratch, self._args.hang, more_epochs=2)
        three.run()
        return np.load(three.folder / "weights.npy")

    def _is_over(self) -> bool:
        return self._until is not None and time.monotonic() > self._until

    def _rounds(self) -> Iterator[list[Trial]]:
        """Yields the trials of each round that are not recorded, in a random order."""
        kinds = list(self._kinds())
        left = self._args.trials
        for repetition in islice(count(), self._args.repetitions):
            draw = random.Random(f"{self._args.seed} {repetition}")
            chosen = draw.sample(kinds, len(kinds))[:left]
            left -= len(chosen)
            if not chosen:
                return
            seed = self._args.seed
            trials = [Trial(self._contender, kind, repetition, seed) for kind in chosen]
            known = {_key(item) for item in read_records(self._record) if not item.get("void")}
            yield [trial for trial in trials if _key(trial.record()) not in known]

    def _kinds(self) -> Iterator[Kind]:
        for kind in KINDS.values():
            is_possible = self._contender in kind.contenders and (
                ("disk" not in kind.fault or os.geteuid() == 0)
                and ("cut off" not in kind.fault or has_hosts())
            )
            if is_possible and re.search(self._args.kinds or "", kind.name):
                yield kind

    def _try_group(self, trials: Sequence[Trial]) -> None:
        """Runs trials; a failure of the benchmark itself is shown, and the others go on."""
        try:
            self._run_group(trials)
        except Stopped:
            raise
        except Exception:
            traceback.print_exc()
            self._failures += 1

    def _run_group(self, trials: Sequence[Trial]) -> None:
        while trials and not self._is_over():
            if trials[0].kind.family != "sequence":
                args = (self._scratch, self._args.hang, self._weights)
                found = [run_alone(trials[0], *args)]
                self._add(found[0], verdict_alone(found[0], trials[0].kind))
                return
            trials = self._run_sequence(trials)

    def _run_sequence(self, trials: Sequence[Trial]) -> list[Trial]:
        """Runs a job; returns the trials that were not reached, or came after one gone wrong."""
        sequence = FaultSequence(self._contender, trials, self._scratch, self._args.hang)
        done = set()
        for found in sequence.run():
            wrong = verdict(found, KINDS[found["kind"]], self._digests)
            self._add(found, wrong)
            done.add(_key(found))
            if wrong:
                self._keep(sequence, found)
                break
        sequence.close()
        left = [trial for trial in in_order(trials) if _key(trial.record()) not in done]
        if not done:
            # It is not recorded, so that the next series tries it again.
            print(f"not reached: {self._contender} {left.pop(0).kind.name}", flush=True)
        return left

    def _keep(self, sequence: FaultSequence, found: dict[str, Any]) -> None:
        if self._args.keep:
            name = f"{found['kind']} {found['repetition']}".replace("/", "-")
            shutil.copytree(sequence.folder, Path(self._args.keep) / name, dirs_exist_ok=True)

    def _add(self, found: dict[str, Any], wrong: str) -> None:
        line = json.dumps({**compact(found, wrong), "wrong": wrong, **self._about})
        with self._write, open(self._record, "a") as file:
            file.write(line + "\n")
        print(_one_line(found, wrong), flush=True)


def _groups(trials: Sequence[Trial], size: int) -> Iterator[Sequence[Trial]]:
    """Yields trials that one job takes."""
    alone = [trial for trial in trials if trial.kind.family != "sequence"]
    others = [trial for trial in trials if trial.kind.family == "sequence"]
    yield from (others[first : first + size] for first in range(0, len(others), size))
    yield from ([trial] for trial in alone)


def _key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(record[name] for name in ("contender", "kind", "repetition"))


def _one_line(found: Mapping[str, Any], wrong: str) -> str:
    names = ("contender", "kind", "process", "noticed_s", "back_s", "redone", "named", "codes")
    words = " ".join(f"{name}={found.get(name)}" for name in names)
    return f"{time.strftime('%H:%M:%S')} {wrong or 'ok'}: {words}"


if __name__ == "__main__":
    main()
