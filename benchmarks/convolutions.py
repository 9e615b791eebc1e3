"""Convolutions on CPUs: XLA as Flax writes them and in other forms, under compiler options, and
PyTorch; ResNet-20 as a whole.

    python benchmarks/convolutions.py --cores 2 --output benchmarks/results/convolutions.json \
        --picture benchmarks/results/convolutions.png

Forward pass and both gradients of a layer are timed alone, contenders in turns; before its timed
calls each runs once untimed. Options are compiled alone for one layer; an option counts as honoured
if the compiled program or the time differs from that of the defaults. The share of the peak is that
of the faster of XLA's and PyTorch's product of matrices of 1024 x 1024. ResNet-20 runs in a process
without and one with huge pages (`GLIBC_TUNABLES=glibc.malloc.hugetlb=1`, which the launcher sets
for CPU jobs).
"""

import argparse
import json
import os
import platform
import re
import resource
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from convolution_forms import CONTENDERS, LAYERS, OPTIONS, PASSES, WITHOUT_YNN, Layer, xla_runs

HUGE_PAGES = "glibc.malloc.hugetlb=1"
OPTIONS_LAYER = Layer("ResNet-20", 32, 16, 32, 32, 3)


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cores", type=int, default=os.cpu_count(), help="processor cores to use (default: all)"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=7,
        help="timed rounds of each contender (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-size",
        type=int,
        default=64,
        help="images of a step of ResNet-20 (default: %(default)s)",
    )
    parser.add_argument(
        "--layers",
        type=int,
        default=len(LAYERS),
        help="layers to measure, from the first on (default: all)",
    )
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="default: all"
    )
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("--picture", type=Path, help="PNG file for a plot")
    parser.add_argument("--inside", choices=("layers", "network"), help=argparse.SUPPRESS)
    return parser.parse_args()


def time_in_turns(runs, rounds, calls=3):
    """Returns for each contender milliseconds of a call, one value a round."""
    times = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            run()
            start = time.perf_counter()
            for _ in range(calls):
                run()
            times[name].append((time.perf_counter() - start) / calls * 1e3)
    return times


def summary(values):
    return {
        "ms": round(statistics.median(values), 4),
        "range_ms": [round(min(values), 4), round(max(values), 4)],
    }


def measure_peak(rounds, cores):
    """Returns GFLOP/s of products of matrices of 1024 x 1024."""
    import jax
    import jax.numpy as jnp
    import torch

    x, y = jnp.ones((1024, 1024)), torch.ones(1024, 1024)
    product = jax.jit(jnp.matmul)
    times = time_in_turns(
        {"XLA": lambda: product(x, x).block_until_ready(), "PyTorch": lambda: y @ y}, rounds
    )
    return {
        name: round(2 * 1024**3 / statistics.median(values) / 1e6, 1)
        for name, values in times.items()
    }


def measure_layers(args):
    rows = []
    for layer in LAYERS[: args.layers]:
        made = {name: CONTENDERS[name](layer) for name in args.contenders}
        for name in PASSES:
            times = time_in_turns(
                {contender: runs[name][0] for contender, runs in made.items()}, args.rounds
            )
            results = {contender: summary(values) for contender, values in times.items()}
            for result in results.values():
                result["gflop_per_s"] = round(layer.flops / result["ms"] / 1e6, 1)
            library = kernels(made["XLA"][name][1]) if "XLA" in made else None
            rows.append(
                {
                    "layer": layer.name,
                    "pass": name,
                    "flops": layer.flops,
                    "library": library,
                    "results": results,
                }
            )
    return rows


def kernels(compiled):
    """Tells what a compiled program convolves with."""
    return "YNNPACK" if "__ynn_fusion" in compiled.as_text() else "Eigen"


def instructions(compiled):
    """Returns the text of a program without what says where it came from."""
    return re.sub(r", metadata=\{[^}]*\}", "", compiled.as_text())


def measure_options(rounds):
    """Returns for each option whether it is accepted, whether the program of a pass is another one,
    and times of each pass.
    """
    import jax

    made, rows = {}, []
    for name, options in OPTIONS.items():
        try:
            made[name] = xla_runs(OPTIONS_LAYER, options=options)
        except jax.errors.JaxRuntimeError as error:
            rows.append({"option": name, "error": str(error)[:300]})
    texts = {
        name: [instructions(program) for _, program in runs.values()] for name, runs in made.items()
    }
    times = {
        kind: time_in_turns({name: runs[kind][0] for name, runs in made.items()}, rounds)
        for kind in PASSES
    }
    for name in made:
        results = {kind: summary(times[kind][name]) for kind in PASSES}
        rows.append(
            {"option": name, "same_program": texts[name] == texts["defaults"], "results": results}
        )
    return rows


def measure_network(args):
    """Returns times and page faults of ResNet-20, forward and a training step with SGD."""
    runs = {**network_of_xla(args.batch_size), **network_of_torch(args.batch_size)}
    for run in runs.values():
        run()
    times = time_in_turns(runs, args.rounds, calls=2)
    rows = []
    for name, run in runs.items():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        run()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        rows.append({"what": name, "page_faults": faults, **summary(times[name])})
    return rows


def network_of_xla(batch):
    import jax
    import numpy as np
    import optax
    from scaling_models import load

    from tnt_jax.distributed.sums.reduction import trace_grads
    from tnt_jax.models.resnet import resnet20
    from tnt_jax.train.steps.step import keep_inputs

    (x,), y = load("resnet20", real=False, num_rows=batch)
    module = resnet20()
    variables = dict(module.init(jax.random.key(0), x[:1], train=False))
    params = variables.pop("params")

    def loss_of(params, x, y):
        outputs, changed = module.apply(
            {"params": params, **variables}, x, train=True, mutable=[*variables]
        )
        return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean(), changed

    def step(params, x, y, *, rewrite=None):
        differentiated = jax.value_and_grad(lambda params: loss_of(params, x, y), has_aux=True)
        (loss, changed), grads, _ = trace_grads(differentiated, params, rewrite=rewrite)
        return (
            loss,
            changed,
            jax.tree.map(lambda param, grad: param - np.float32(0.1) * grad, params, grads),
        )

    def run(compiled):
        return lambda: jax.block_until_ready(compiled(params, x, y))

    def step_with_kept_inputs(params, x, y):
        # A label serves as number of the step: it is not negative, and the compiler does not know
        # that.
        return step(params, x, y, rewrite=partial(keep_inputs, step=y[0]))

    programs = {}
    chosen: tuple[tuple[str, dict[str, Any]], ...] = (("XLA", {}), ("without YNNPACK", WITHOUT_YNN))
    for name, options in chosen:
        for kind, function in (
            ("forward", loss_of),
            ("step", step),
            ("step with kept inputs", step_with_kept_inputs),
        ):
            programs[f"{name}, {kind}"] = run(
                jax.jit(function).lower(params, x, y).compile(compiler_options=options)
            )
    return programs


def network_of_torch(batch):
    import torch
    from scaling_models import load, make_torch

    (x,), y = load("resnet20", real=False, num_rows=batch)
    images = torch.from_numpy(x).permute(0, 3, 1, 2)  # Which is channels last in memory.
    labels = torch.from_numpy(y).long()
    module = make_torch("resnet20", 3).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)

    def forward():
        with torch.no_grad():
            torch.nn.functional.cross_entropy(module(images), labels)

    def step():
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(module(images), labels).backward()
        optimizer.step()

    return {"PyTorch, forward": forward, "PyTorch, step": step}


def run_inside(args, part, *, cores=None, **environment):
    command = [
        sys.executable,
        __file__,
        "--inside",
        part,
        "--cores",
        str(cores or args.cores),
        "--rounds",
        str(args.rounds),
    ]
    command += [
        "--batch-size",
        str(args.batch_size),
        "--layers",
        str(args.layers),
        "--contenders",
        *args.contenders,
    ]
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GLIBC_TUNABLES", "XLA_FLAGS")
    }
    done = subprocess.run(
        command, env={**env, "JAX_PLATFORMS": "cpu", **environment}, capture_output=True, text=True
    )
    if done.returncode != 0:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def inside(args):
    """Measures one part in this process, on its own cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    import torch

    torch.set_num_threads(args.cores)
    if args.inside == "network":
        return measure_network(args)
    return {
        "peak_gflop_per_s": measure_peak(args.rounds, args.cores), "layers": measure_layers(args),
        "options": measure_options(args.rounds)
    }  # fmt: skip


def main():
    args = parse_arguments()
    if args.inside:
        print(json.dumps(inside(args)))
        return
    from convolutions_report import draw, markdown

    load = os.getloadavg()[0]
    results = run_inside(args, "layers")
    results["network"] = {
        f"{cores} core(s), {pages} pages": run_inside(args, "network", cores=cores, **variables)
        for cores in sorted({1, args.cores})
        for pages, variables in (("small", {}), ("huge", {"GLIBC_TUNABLES": HUGE_PAGES}))
    }
    results = {"about": about(args, load), **results}
    print(markdown(results))
    if args.output:
        args.output.write_text(json.dumps(results, indent=1) + "\n")
    if args.picture:
        draw(results, args.picture)


def about(args, load):
    from importlib.metadata import version

    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    models = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "command": " ".join(["python", *sys.argv]), "commit": commit,
        "processor": models[0] if models else platform.machine(),
        "cores": args.cores, "rounds": args.rounds, "batch_size": args.batch_size,
        "load_before": round(load, 1),
        "python": platform.python_version(),
        **{name: version(name) for name in ("jax", "jaxlib", "flax", "torch")},
    }  # fmt: skip


if __name__ == "__main__":
    main()
