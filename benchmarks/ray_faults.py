"""Ray Train runs with faults: is training that goes on the training that was never disturbed?

Each trial trains a small network in `JaxTrainer` on CPU workers, on a cluster of several nodes on
this machine, and disturbs it after a random update. Its weights and history are compared with those
of a run that nothing disturbed: bit by bit, or to 1e-5 where another number of workers goes on,
because sums are rounded otherwise then. Faults:

    worker      SIGKILL to a worker; Ray starts it again
    exception   an exception in one worker's training function
    stuck       a worker does nothing any more; the others notice after 20 seconds
    node        SIGKILL to a worker's node; another node takes its place
    fewer       the same without another node: one worker goes on, of `num_workers=(1, 2)`
    more        a node is added: two workers go on, where one was
    four        four workers are killed or raise an exception, one after the other
    ten         ten workers are killed, raise an exception, or lose their node, likewise

Each trial adds a line to the record; those that are in it are not run again, so that a series can
be interrupted and continued. The exit code is 1 if a trial that was run went wrong:

    python benchmarks/ray_faults.py --trials 20 --record benchmarks/results/ray_faults.jsonl
    python benchmarks/ray_faults.py --table benchmarks/results/ray_faults.jsonl --into docs/ray.md
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fault_tables import insert, read_records
from machine import commit, versions

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))
import ray_runs

KINDS = {
    "worker": "a worker is killed",
    "exception": "a worker raises an exception",
    "stuck": "a worker does nothing any more",
    "node": "a node is killed, another one is added",
    "fewer": "a node is killed: two workers, then one",
    "more": "a node is added: one worker, then two",
    "four": "workers are killed or raise, four times",
    "ten": "workers or nodes are killed, or workers raise, ten times",
}
# Trials with several faults: their number, and what they are drawn from.
SERIES = {"four": (4, ("worker", "exception")), "ten": (10, ("worker", "exception", "node"))}
MARKS = ("<!-- ray faults: begin -->", "<!-- ray faults: end -->")


def main() -> None:
    """Runs the trials that are not recorded, or prints the table of those that are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=5, help="of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hang", type=float, default=300, help="most seconds of a trial")
    parser.add_argument("--record", type=Path, help="file to which trials are added")
    parser.add_argument("--table", type=Path, metavar="RECORD", help="print a table, and end")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="write it into a page instead")
    args = parser.parse_args()
    if args.table:
        text = table(read_records(args.table))
        return insert(text, args.into, MARKS) if args.into else print(text)
    left, num_wrong = list(trials_left(args)), 0
    with tempfile.TemporaryDirectory() as programs:
        # Nodes and workers inherit it: a worker that is started again compiles nothing.
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", programs)
        os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        while left:
            left, is_wrong = run_series(left, args)
            num_wrong += is_wrong
    if num_wrong:
        sys.exit(f"{num_wrong} trial(s) went wrong.")
    return None


def trials_left(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields the trials that are not recorded, round by round of all kinds."""
    recorded = read_records(args.record) if args.record else []
    known = {(each["seed"], each["kind"], each["number"]) for each in recorded}
    for number in range(args.trials):
        for kind in args.kinds:
            if (args.seed, kind, number) in known:
                continue
            draw = random.Random(f"{args.seed} {kind} {number}")
            trial = {"seed": args.seed, "kind": kind, "number": number}
            if kind in SERIES:
                count, choices = SERIES[kind]
                steps = sorted(draw.sample(range(1, ray_runs.EPOCHS * ray_runs.STEPS), count))
                kinds = [draw.choice(choices) for _ in steps]
                ranks = [draw.randrange(2) for _ in steps]
                yield {**trial, "step": steps, "rank": ranks, "faults": kinds}
                continue
            step = draw.randrange(1, ray_runs.EPOCHS * ray_runs.STEPS)
            # Where a node is added, one worker is all there is.
            rank = 0 if kind == "more" else draw.randrange(2)
            yield {**trial, "step": step, "rank": rank}


def run_series(
    trials: Sequence[dict[str, Any]], args: argparse.Namespace
) -> tuple[Sequence[dict[str, Any]], bool]:
    """Runs trials on one cluster up to one that goes wrong.

    Returns:
        The trials after it, for which another cluster is started, and whether one went wrong.
    """
    about = {"commit": commit(), "versions": versions(), "cores": len(os.sched_getaffinity(0))}
    with tempfile.TemporaryDirectory() as base, connected_cluster() as cluster:
        folder = Path(base, "undisturbed")
        truth = run_in(folder, [], [], hang_s=args.hang, workers=2)[0]
        for number, trial in enumerate(trials):
            found = {**trial, **run_trial(cluster, trial, truth, Path(base, str(number)), args)}
            print(json.dumps(found), flush=True)
            if args.record:
                with open(args.record, "a") as file:
                    file.write(json.dumps({**found, **about}) + "\n")
            if found["wrong"]:
                return trials[number + 1 :], True
    return [], False


@contextmanager
def connected_cluster() -> Iterator[Any]:
    """Starts a cluster whose first node has no worker, and two others one each."""
    import ray
    from ray_clusters import own_cluster, ray_cluster_of

    os.environ.update(ray_runs.VARIABLES)
    with ray_cluster_of(num_cpus=0) as cluster:
        cluster.add_node(**ray_runs.NODE)
        cluster.add_node(**ray_runs.NODE)
        ray.init(cluster.address, log_to_driver=False, runtime_env=own_cluster(cluster))
        ray.cloudpickle.register_pickle_by_value(ray_runs)
        try:
            yield cluster
        finally:
            ray.shutdown()


def run_trial(
    cluster: Any, trial: dict[str, Any], truth: dict[str, Any], folder: Path, args: Any
) -> dict[str, Any]:
    """Disturbs a run; returns what came of it, and what was wrong with it, if anything."""
    kind, nodes = trial["kind"], 1 if trial["kind"] == "more" else 2
    restore_nodes(cluster, nodes)
    faults = faults_of(trial)
    is_elastic = kind in ("fewer", "more")
    changes = [
        (lambda: cluster.add_node(**ray_runs.NODE))
        if kind == "more" or (fault["kind"] == "node" and not is_elastic)
        else None
        for fault in faults
    ]
    try:
        found, sizes = run_in(
            folder, faults, changes, hang_s=args.hang * len(faults),
            failures=len(faults), workers=(1, 2) if is_elastic else 2,
        )  # fmt: skip
    except TimeoutError:
        return {"wrong": "hung"}
    except Exception as error:  # It is part of the record; the trials after it go on.
        return {"wrong": f"{type(error).__name__}: {error}"}
    expected = {"fewer": [2, 1], "more": [1, 2]}.get(kind, [2])
    last = folder / f"fault-{len(faults) - 1}"
    seconds = time.time() - float(last.read_text())
    gap = ray_runs.difference(found, truth)
    close = history_gap(found, truth)
    wrong = [
        *(["other workers"] if sizes != expected else []),
        *(["other weights"] if gap > (1e-5 if is_elastic else 0) else []),
        *(["other history"] if close > (1e-5 if is_elastic else 0) else []),
        *(["other updates"] if found["updates"] != truth["updates"] else []),
    ]
    return {
        "sizes": sizes, "difference": gap, "history_difference": close,
        "from_fault_to_end_s": round(seconds, 1), "wrong": ", ".join(wrong),
    }  # fmt: skip


def faults_of(trial: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the faults of a trial as `ray_runs` names them."""
    if trial["kind"] in SERIES:
        columns = zip(trial["faults"], trial["step"], trial["rank"], strict=True)
        return [{"kind": kind, "step": step, "rank": rank} for kind, step, rank in columns]
    names = {"fewer": "node", "more": "pause", "stuck": "pause"}
    kind = names.get(trial["kind"], trial["kind"])
    return [{"kind": kind, "step": trial["step"], "rank": trial["rank"]}]


def restore_nodes(cluster: Any, count: int) -> None:
    """Gives the cluster as many nodes with a worker each as a trial begins with."""
    for node in [*cluster.worker_nodes]:
        if not node.live_processes() or node.dead_processes():
            cluster.remove_node(node, allow_graceful=False)
    while len(cluster.worker_nodes) > count:
        cluster.remove_node(next(iter(cluster.worker_nodes)), allow_graceful=False)
    while len(cluster.worker_nodes) < count:
        cluster.add_node(**ray_runs.NODE)


def run_in(
    folder: Path, faults: list[Any], changes: list[Any], **options: Any
) -> tuple[dict[str, Any], list[int]]:
    """Trains in a folder; returns the result, and the numbers of workers that trained."""
    folder.mkdir()
    # Of two workers that wait for each other; one that pauses alone is not stuck.
    is_stuck = options["workers"] == 2 and any(fault["kind"] == "pause" for fault in faults)
    environment = {"TNT_STALL_TIMEOUT": "20"} if is_stuck else {}
    config = {"folder": str(folder), "faults": faults, "environment": environment}
    result = ray_runs.run_amid(config, changes, storage=str(folder / "storage"), **options)
    return result.return_value, ray_runs.sizes(config)


def history_gap(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Returns the largest difference between the numbers of two histories."""
    names = one["history"].keys() | other["history"].keys()
    return max(
        abs(a - b)
        for name in names
        for a, b in zip(one["history"][name], other["history"][name], strict=True)
    )


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Returns a row for each fault, and one of the sums."""
    lines = [
        "| fault | trials | faults | hung | other weights or history | otherwise wrong "
        "| largest difference |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for kind, title in KINDS.items():
        if some := [record for record in records if record["kind"] == kind]:
            lines.append(row(title, some))
    return "\n".join([*lines, row("**all**", records)])


def row(title: str, some: Sequence[Mapping[str, Any]]) -> str:
    """Returns the row of some trials."""
    wrong = Counter(record["wrong"] for record in some if record["wrong"])
    other = sum(number for word, number in wrong.items() if "other " in word)
    faults = sum(SERIES.get(record["kind"], (1,))[0] for record in some)
    cells = [
        len(some), faults, wrong["hung"], other, wrong.total() - wrong["hung"] - other,
        f"{max(record.get('difference', 0) for record in some):.1g}",
    ]  # fmt: skip
    return f"| {title} | {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
