"""How often `tnt-jax explain` names a planted cause first, in fresh processes.

    python benchmarks/explain_causes.py --times 20 --output benchmarks/results/explain_causes.json
    python benchmarks/explain_causes.py --causes "slow decode" "small batch" --times 5 --busy 1

The causes are those of `tests/helpers/planted_causes.py`. Processes that compute without end may
keep the machine busy meanwhile.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from machine import busy_processes, environment

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "helpers"))

from planted_causes import PLANTED, run


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--causes", nargs="+", choices=PLANTED, default=list(PLANTED), metavar="CAUSE")
    add("--times", type=int, default=20, help="runs of each cause (default: %(default)s)")
    add("--busy", type=int, default=0, help="processes that compute beside (default: %(default)s)")
    add("--output", type=Path, help="JSON file for the results")
    return parser.parse_args()


def explain(name: str) -> dict:
    """Returns what one run has named first, and its seconds."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = run(name, str(Path(folder, "found")))
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return {"first": "no result", "seconds": time.perf_counter() - start}
    first = next(iter(found["findings"]), {"cause": "nothing", "line": found["sentence"]})
    return {
        "first": first["cause"],
        "is_right": first["cause"] == PLANTED[name].cause and PLANTED[name].text in first["line"],
        "line": first["line"],
        "sentence": found["sentence"],
        "gain": first.get("gain"),
        "seconds": time.perf_counter() - start,
    }


def table(runs: dict[str, list[dict]]) -> str:
    lines = ["| planted | named first | of | others | s a run |", "| --- | --- | --- | --- | --- |"]
    for name, found in runs.items():
        right = sum(each.get("is_right", False) for each in found)
        others = Counter(each["first"] for each in found if not each.get("is_right", False))
        listed = ", ".join(f"{cause} {number}" for cause, number in others.items())
        seconds = sum(each["seconds"] for each in found) / len(found)
        lines.append(f"| {name} | {right} | {len(found)} | {listed} | {seconds:.1f} |")
    return "\n".join(lines)


def main() -> None:
    args = parse_arguments()
    # So that a run that is interrupted ends its job.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    about = environment() | {"busy_processes": args.busy}
    runs: dict[str, list[dict]] = {name: [] for name in args.causes}
    with busy_processes(args.busy):
        for _ in range(args.times):
            for name, found in runs.items():
                found.append(explain(name))
                print(f"{name}: {found[-1]['first']}", file=sys.stderr, flush=True)
                if args.output:  # What is known so far, in case that the rest is interrupted.
                    kept = json.dumps({"about": about, "runs": runs}, indent=1)
                    args.output.write_text(kept + "\n")
    print(table({name: found for name, found in runs.items() if found}))


if __name__ == "__main__":
    main()
