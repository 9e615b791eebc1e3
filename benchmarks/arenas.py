"""What one arena of glibc for all threads costs and saves on CPUs: steps of `fit`, and input
pipelines.

glibc gives each thread an arena of its own, in heaps of 64 MB: a block that is larger comes from
the system and goes back to it, also where freed memory is kept. One arena for all threads has no
such limit, but its threads wait for one another, and a process grows. "synchronous" lets the main
thread, whose arena has no limit either, run the steps. Every measurement is a process of its own,
which calls `tnt_jax.init`, as training does; the variants take turns.

    TNT_JAX_DATA=... python benchmarks/arenas.py --cases transformer_tiny,32 pillow --cores 2
    --output benchmarks/results/arenas.json

Cases are MODEL,BATCH of `benchmarks/fit_overhead.py`, and the input pipelines `tnt_jax` and
`tf.data` of `benchmarks/input_pipeline.py` and `pillow` (the same files, decoded by Pillow in 8
threads of a `RandomAccess`).
"""

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ONE_ARENA, HUGE_PAGES = "glibc.malloc.arena_max=1", "glibc.malloc.hugetlb=1"
SYNCHRONOUS = {"BENCHMARK_SYNCHRONOUS": "1"}
VARIANTS = {
    "default": {},
    "one arena": {"GLIBC_TUNABLES": ONE_ARENA},
    "synchronous": SYNCHRONOUS,
    "huge pages": {"GLIBC_TUNABLES": HUGE_PAGES},
    "huge pages, one arena": {"GLIBC_TUNABLES": f"{HUGE_PAGES}:{ONE_ARENA}"},
    "huge pages, synchronous": {"GLIBC_TUNABLES": HUGE_PAGES, **SYNCHRONOUS},
}
PIPELINES = ("tnt_jax", "tf.data", "pillow")
UNITS = {"ms": "ms", "cpu_ms": "CPU ms", "page_faults": "page faults", "peak_mb": "MB at the peak"}


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases",
        nargs="+",
        default=["transformer_tiny,32", *PIPELINES],
        help="MODEL,BATCH or a pipeline",
    )
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="all by default"
    )
    parser.add_argument("--cores", type=int, default=2, help="cores of a process (default: 2)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="measured rounds of a process (default: 5)"
    )
    parser.add_argument(
        "--repeats", type=int, default=2, help="processes of each variant (default: 2)"
    )
    parser.add_argument(
        "--output", help="JSON file; what it has already and is not measured again stays"
    )
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- In a process of its own ----


def make_steps(case):
    """Returns a function that trains for a round, and the number of its steps."""
    import fit_overhead

    model, batch = case.split(",")
    # A round takes about a second.
    num_steps = 500 if model == "mlp" else max(4, 320 // int(batch))
    module, x, y = fit_overhead.make_problem(model, num_steps * int(batch))
    arguments = argparse.Namespace(devices=1, batch_size=int(batch))
    return fit_overhead.tnt_fit(arguments, module, x, y), num_steps


def make_pillow(folder, batch_size):
    from input_contenders import TorchImages

    from tnt_jax.data import RandomAccess
    from tnt_jax.data.indexed.random_access import RandomAccessSource
    from tnt_jax.data.layout import RankSlice

    data = RandomAccess(TorchImages(folder), batch_size=batch_size, shuffle=True, num_workers=8)
    source = RandomAccessSource(data, RankSlice(1))
    return lambda epoch: (batch.data for batch in source.batches(epoch))


def make_pipeline(case, folder):
    """Returns a function that reads an epoch up to arrays on the device, and the number of its
    images.
    """
    import input_contenders
    import jax

    import tnt_jax

    tnt_jax.init()
    make = {
        "tnt_jax": input_contenders.ours,
        "tf.data": input_contenders.hand_written,
        "pillow": make_pillow,
    }[case]
    batches = make(folder, 64)

    def run():
        for batch in batches(0):
            on_device = jax.device_put(batch)
        jax.block_until_ready(on_device)

    return run, sum(len(batch[1]) for batch in batches(0))


def child(case, cores, rounds, folder):
    """Prints what a step, or an image, takes in each round."""
    os.sched_setaffinity(0, range(int(cores)))
    if "BENCHMARK_SYNCHRONOUS" in os.environ:
        import jax

        jax.config.update("jax_cpu_enable_async_dispatch", False)
    run, count = make_pipeline(case, folder) if case in PIPELINES else make_steps(case)
    run()
    run()
    measured = [one_round(run, count) for _ in range(int(rounds))]
    result = {name: [round(values[name], 4) for values in measured] for name in measured[0]}
    result["peak_mb"] = [round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)]
    print("RESULT " + json.dumps(result))


def one_round(run, count):
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    run()
    wall_s, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {
        "ms": wall_s / count * 1e3, "cpu_ms": cpu_s / count * 1e3,
        "page_faults": (after.ru_minflt - before.ru_minflt) / count,
    }  # fmt: skip


# ---- All processes ----


def run_child(case, variant, args, folder):
    env = {
        name: value
        for name, value in os.environ.items()
        if name != "GLIBC_TUNABLES" and not name.startswith("MALLOC_")
    }
    env |= {
        "JAX_PLATFORMS": "cpu",
        "KERAS_BACKEND": "jax",
        "PJRT_NPROC": str(max(2, args.cores)),
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    env |= VARIANTS[variant]
    command = [sys.executable, __file__, "--child", case, str(args.cores), str(args.rounds), folder]
    done = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(
        next(line for line in done.stdout.splitlines() if line.startswith("RESULT ")).removeprefix(
            "RESULT "
        )
    )


def measure(case, args, folder):
    """Returns the measured values of each variant, those of all its processes together."""
    results = {variant: {} for variant in args.variants}
    for _ in range(args.repeats):
        for variant in args.variants:
            for name, values in run_child(case, variant, args, folder).items():
                results[variant].setdefault(name, []).extend(values)
    return results


def report(name, results):
    print(name)
    for variant, values in results.items():
        cells = [
            f"{statistics.median(v):.4g} ({min(v):.4g} to {max(v):.4g}) {UNITS[key]}"
            for key, v in values.items()
        ]
        print(f"  {variant:24} " + ", ".join(cells), flush=True)


def environment():
    from importlib.metadata import version

    with open("/proc/cpuinfo") as file:
        processor = next(
            line.split(":")[1].strip() for line in file if line.startswith("model name")
        )
    return {
        "command": "python benchmarks/arenas.py --cases CASE --cores CORES --variants VARIANT "
                   "... --repeats PROCESSES --rounds ROUNDS",
        "processor": processor, "cores": os.cpu_count(), "python": platform.python_version(),
        "libc": " ".join(platform.libc_ver()),
        **{name: version(name) for name in ("jax", "tensorflow-cpu", "pillow", "numpy")},
    }  # fmt: skip


def save(path, name, args, results):
    stored = (
        json.loads(path.read_text())
        if path.exists()
        else {"environment": environment(), "results": {}}
    )
    shape = {"rounds": args.rounds, "processes": args.repeats}
    stored["results"].setdefault(name, {}).update(
        {variant: shape | values for variant, values in results.items()}
    )
    path.write_text(json.dumps(stored, indent=1) + "\n")


def main(args):
    from input_pipeline import unpack_images

    with tempfile.TemporaryDirectory() as folder:
        images = unpack_images(folder) if set(args.cases) & set(PIPELINES) else ""
        for case in args.cases:
            name = f"{case}, {args.cores} core(s)"
            results = measure(case, args, images)
            report(name, results)
            if args.output:
                save(Path(args.output), name, args, results)


if __name__ == "__main__":
    ARGUMENTS = parse_arguments()
    if ARGUMENTS.child:
        child(*ARGUMENTS.child)
    else:
        main(ARGUMENTS)
