"""What the input costs: throughput beside hand-written tf.data pipelines, PyTorch's DataLoader and
Grain, and CPU time per host.

1. Throughput of JPEG folders, TFRecords and arrays, up to arrays on the device, on the same cores
   in one run; rounds are interleaved so that a disturbance of the machine hits all alike. Images
   are those of `clothing_small`, each as training takes it (random crop 224, flip, standardized
   float32). Examples a second and core are those of the median round. Who is not installed, or has
   no reader for a format, is left out, with a line.
2. Scaling: CPU seconds that one of p = 1, 2, 4, 8 simulated processes spends on an epoch, with rows
   selected before decoding and, as Tarantella does, after it. Every measurement is a process of its
   own.
3. Shuffle: memory and time to the first batch of a shuffled random-access dataset of 10^9 examples.

    TNT_JAX_DATA=... python benchmarks/input_pipeline.py --output input_pipeline.json

With `--quick` the images are made up, and only the first part runs, with one round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from input_contenders import CONTENDERS, KINDS, lacking, make_up_images, write_records
from machine import environment

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # Batches end on the device of JAX.


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=7, help="measured epochs of each contender (default: 7)"
    )
    parser.add_argument("--batch-size", type=int, default=64, help="global batch (default: 64)")
    parser.add_argument(
        "--repeats",
        type=int,
        default=3,
        help="measured processes for each point of part 2 and 3 (default: 3)",
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=KINDS, help="formats (default: all)"
    )
    parser.add_argument("--quick", action="store_true", help="a round of part 1 on made-up images")
    parser.add_argument("--output", help="JSON file for the results")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


def unpack_images(folder):
    archive = Path(os.environ["TNT_JAX_DATA"]) / "clothing_small" / "clothing_train.tar"
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return str(next(path for path in Path(folder).rglob("dress") if path.is_dir()).parent)


# ---- Part 1 ----


def measure_throughput(kind, folder, batch_size, rounds):
    import jax

    made = {}
    for name, make in CONTENDERS[kind].items():
        if missing := lacking(kind, name):
            print(f"{kind}: {name} is left out: {missing}.")
        else:
            made[name] = make(folder, batch_size)
    rates, cores = {name: [] for name in made}, len(os.sched_getaffinity(0))
    for number in range(rounds + 1):
        for name, batches in made.items():
            begin, images = time.perf_counter(), 0
            for batch in batches(number):
                on_device = jax.device_put(batch)
                images += len(batch[1])
            jax.block_until_ready(on_device)
            if number:  # The first round warms up: threads, workers, file cache, automatic tuning.
                rates[name].append(images / (time.perf_counter() - begin))
    return {
        name: {**summary(values), "per_core": statistics.median(values) / cores}
        for name, values in rates.items()
    }


def summary(values):
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "values": values,
    }


# ---- Part 2 and 3: run in processes of their own ----


def child_epoch(folder, split, num_processes, batch_size):
    """Prints the CPU seconds of an epoch of process 0 of `num_processes`, after one of warm-up."""
    from dataclasses import replace

    from tnt_jax.data import image_folder, training_images
    from tnt_jax.data.layout import RankSlice
    from tnt_jax.data.tf.tfdata import TfDataSource

    data = training_images(image_folder(folder).repeat(4), batch_size=int(batch_size))
    source = TfDataSource(replace(data, split=split), RankSlice(int(num_processes)))
    for _ in source.batches(0):
        pass
    begin = time.process_time()
    rows = sum(len(batch.data[1]) for batch in source.batches(1))
    print(json.dumps({"cpu_s": time.process_time() - begin, "rows": rows}))


class Numbers:
    """10^9 examples that cost nothing."""

    def __len__(self):
        return 10**9

    def __getitem__(self, index):
        return index


def peak_memory_mb():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


def child_shuffle():
    """Prints memory and time that the first batch of a shuffle over 10^9 examples takes."""
    from tnt_jax.data import RandomAccess
    from tnt_jax.data.indexed.random_access import RandomAccessSource
    from tnt_jax.data.layout import RankSlice

    Path("/proc/self/clear_refs").write_text("5")  # Resets the peak to what is in use.
    before = peak_memory_mb()
    begin = time.perf_counter()
    source = RandomAccessSource(
        RandomAccess(Numbers(), batch_size=1024, shuffle=True), RankSlice(1)
    )
    batches = source.batches(epoch=0)
    next(batches)
    first_s = time.perf_counter() - begin
    begin = time.perf_counter()
    for _ in range(100):
        next(batches)
    batch_ms = (time.perf_counter() - begin) * 10
    print(
        json.dumps(
            {
                "first_batch_s": first_s,
                "extra_memory_mb": peak_memory_mb() - before,
                "batch_ms": batch_ms,
            }
        )
    )


def run_child(*arguments):
    command = [sys.executable, __file__, "--child", *map(str, arguments)]
    return json.loads(
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1]
    )


def measure_scaling(folder, batch_size, repeats):
    results = {}
    for split in ("auto", "after"):
        for num_processes in (1, 2, 4, 8):
            runs = [
                run_child("epoch", folder, split, num_processes, batch_size) for _ in range(repeats)
            ]
            results[f"{split} {num_processes}"] = summary([run["cpu_s"] for run in runs]) | {
                "rows": runs[0]["rows"]
            }
    for key, result in results.items():
        result["ratio_to_p1"] = result["median"] / results[f"{key.split()[0]} 1"]["median"]
    return results


def main(arguments):
    result = {"environment": environment(), "examples_per_s": {}}
    rounds = 1 if arguments.quick else arguments.rounds
    print("| format | contender | examples/s | range | a core |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        images = make_up_images(folder) if arguments.quick else unpack_images(folder)
        write_records(images, Path(folder) / "records")
        for kind in arguments.kinds:
            place = str(Path(folder) / "records") if kind == "TFRecords" else images
            found = measure_throughput(kind, place, arguments.batch_size, rounds)
            result["examples_per_s"][kind] = found
            for name, rate in found.items():
                print(
                    f"| {kind} | {name} | {rate['median']:.0f} | {rate['min']:.0f} to "
                    f"{rate['max']:.0f} | {rate['per_core']:.0f} |"
                )
        if not arguments.quick:
            result["cpu_s_per_process"] = measure_scaling(
                images, arguments.batch_size, arguments.repeats
            )
            for name, cost in result["cpu_s_per_process"].items():
                print(
                    f"split and processes {name:9} {cost['median']:6.2f} CPU s, "
                    f"{cost['ratio_to_p1']:.3f} of p = 1"
                )
    if not arguments.quick:
        measure_shuffle(result, arguments.repeats)
    if arguments.output:
        Path(arguments.output).write_text(json.dumps(result, indent=1) + "\n")


def measure_shuffle(result, repeats):
    runs = [run_child("shuffle") for _ in range(repeats)]
    result["shuffle_1e9"] = {key: summary([run[key] for run in runs]) for key in runs[0]}
    for key, value in result["shuffle_1e9"].items():
        print(
            f"shuffle of 10^9: {key} {value['median']:.3f} ({value['min']:.3f} to "
            f"{value['max']:.3f})"
        )


if __name__ == "__main__":
    ARGUMENTS = parse_arguments()
    if ARGUMENTS.child:
        {"epoch": child_epoch, "shuffle": child_shuffle}[ARGUMENTS.child[0]](*ARGUMENTS.child[1:])
    else:
        main(ARGUMENTS)
