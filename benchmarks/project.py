"""Projects step time and efficiency of data-parallel training on many GPUs from one measured step
and the figures of the links, by the model of `tnt_jax.launch.scale.projection`.

    python benchmarks/project.py --step-ms 95 --gradient-mb 102.5 --rows 256 --output
    benchmarks/results/project_resnet50.json python benchmarks/project.py --step-ms 83 --gradient-mb
    28 --gpus-per-host 1 --host-gbit 1 --gpus 2 --overlap no --measured-ms 330

With `--measured-ms` the error of the projection for the last number of GPUs is stated. `--check`
reads what `benchmarks/allreduce.py` recorded over rate-limited links, projects each step from the
computation alone, and states the errors:

    python benchmarks/project.py --check benchmarks/results/allreduce_1*.json
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from allreduce_contenders import LAYERS, WIDTH

from tnt_jax.launch.scale.projection import TCP_PAYLOAD_SHARE, Links, all_reduce_ms, project

# Contenders of benchmarks/allreduce.py: the number of equal buckets, and whether they travel during
# backpropagation. PyTorch closes a bucket once it holds the 4 or 25 MiB asked for: two layers of
# 3.5 MB, or all.
CHECKED = {
    "xla": (1, False),
    "torch ddp 4 MB": (LAYERS // 2, True),
    "torch ddp 25 MB": (1, True),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--step-ms", type=float, help="measured step of one GPU")
    parser.add_argument("--gradient-mb", type=float, help="MB of gradients (10**6 bytes)")
    parser.add_argument(
        "--bucket-mb",
        type=float,
        default=26.2,
        help="MB of a bucket (default: 26.2, that is 25 MiB)",
    )
    parser.add_argument(
        "--rows",
        type=int,
        default=1,
        help="rows of a GPU's batch, for rows per second (default: 1)",
    )
    parser.add_argument(
        "--gpus",
        type=int,
        nargs="+",
        default=[8, 16, 32, 64, 128, 256, 512, 1024],
        help="numbers of GPUs",
    )
    parser.add_argument("--gpus-per-host", type=int, default=8, help="(default: 8)")
    parser.add_argument(
        "--gpu-gbit",
        type=float,
        default=3600,
        help="Gbit/s of a GPU in its host (default: 3600, NVLink 4)",
    )
    parser.add_argument(
        "--host-gbit",
        type=float,
        default=3200,
        help="Gbit/s of a host (default: 3200, eight 400G cards)",
    )
    parser.add_argument(
        "--gpu-latency-us", type=float, default=3, help="of a hop within a host (default: 3)"
    )
    parser.add_argument(
        "--host-latency-us", type=float, default=10, help="of a hop between hosts (default: 10)"
    )
    parser.add_argument(
        "--overlap",
        choices=("yes", "no"),
        default="yes",
        help="whether buckets travel during backpropagation",
    )
    parser.add_argument(
        "--measured-ms",
        type=float,
        help="measured step on the last number of GPUs, to state the error",
    )
    parser.add_argument(
        "--check",
        nargs="+",
        metavar="JSON",
        help="results of allreduce.py with a rate, to compare with projections",
    )
    parser.add_argument("--output", help="JSON file for the results")
    args = parser.parse_args()
    if not args.check and (args.step_ms is None or args.gradient_mb is None):
        parser.error(
            "give --step-ms and --gradient-mb to project, or --check to compare projections with "
            "measured steps"
        )
    return args


def check(recorded: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns projected and measured steps, in ms, of what `benchmarks/allreduce.py` recorded over
    a link of known rate.

    Args:
        recorded: Its JSON file, with the computation alone, whose median is what is projected from.
    """
    arguments = recorded["arguments"]
    medians = {
        name.removeprefix("step:"): statistics.median(times) * 1e3
        for name, times in recorded["seconds"].items()
    }
    links = Links(1, float("inf"), arguments["rate_gbit"] / 8 * TCP_PAYLOAD_SHARE, 0, 0)
    rows = []
    for name, (num_buckets, overlap) in CHECKED.items():
        if name not in medians:
            continue
        buckets = [LAYERS * WIDTH**2 * 4 / 1e6 / num_buckets] * num_buckets
        projected = project(
            medians["alone"], buckets, arguments["processes"], links, overlap=overlap
        )
        rows.append(
            {key: arguments[key] for key in ("processes", "rate_gbit", "batch_size")}
            | {
                "step": name,
                "alone_ms": medians["alone"],
                "projected_ms": projected,
                "measured_ms": medians[name],
            }
            | {"error": projected / medians[name] - 1}
        )
    return rows


def report_check(rows: list[dict[str, Any]]) -> None:
    print(
        f"{'processes':>9} {'Gbit/s':>6} {'batch':>5} {'alone ms':>8}  {'step':15} "
        f"{'projected':>9} {'measured':>8} {'error':>6}"
    )
    for row in rows:
        conditions = (
            f"{row['processes']:9} {row['rate_gbit']:6g} {row['batch_size']:5} "
            f"{row['alone_ms']:8.1f}"
        )
        times = f"{row['projected_ms']:9.1f} {row['measured_ms']:8.1f} {row['error'] * 100:+5.1f}%"
        print(f"{conditions}  {row['step']:15} {times}")
    print(f"largest error {max(abs(row['error']) for row in rows) * 100:.1f} %")


def project_gpus(args: argparse.Namespace) -> list[dict[str, Any]]:
    links = Links(
        args.gpus_per_host,
        args.gpu_gbit / 8,
        args.host_gbit / 8,
        args.gpu_latency_us,
        args.host_latency_us,
    )
    num_buckets = max(1, round(args.gradient_mb / args.bucket_mb))
    buckets = [args.gradient_mb / num_buckets] * num_buckets
    rows = []
    print(
        f"{'GPUs':>6} {'sum ms':>8} {'step ms':>8} {'efficiency':>10} {'rows/s':>12} "
        f"{'no overlap':>10}"
    )
    for num_gpus in args.gpus:
        step = project(args.step_ms, buckets, num_gpus, links, overlap=args.overlap == "yes")
        blocking = project(args.step_ms, buckets, num_gpus, links, overlap=False)
        total = sum(all_reduce_ms(mb, num_gpus, links) for mb in buckets)
        rows.append(
            {
                "gpus": num_gpus,
                "sum_ms": total,
                "step_ms": step,
                "efficiency": args.step_ms / step,
                "blocking_ms": blocking,
            }
        )
        speed = num_gpus * args.rows / step * 1000
        print(
            f"{num_gpus:6} {total:8.2f} {step:8.2f} {args.step_ms / step:10.3f} {speed:12.0f} "
            f"{args.step_ms / blocking:10.3f}"
        )
    if args.measured_ms:
        print(
            f"measured {args.measured_ms:g} ms: the projection is off by "
            f"{(rows[-1]['step_ms'] / args.measured_ms - 1) * 100:+.1f} %"
        )
    return rows


def main() -> None:
    args = parse_arguments()
    if args.check:
        rows = [row for path in args.check for row in check(json.loads(Path(path).read_text()))]
        report_check(rows)
    else:
        rows = project_gpus(args)
    if args.output:
        Path(args.output).write_text(
            json.dumps({"arguments": vars(args), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
