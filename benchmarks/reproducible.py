"""What the same bits on any number of devices cost: reproducible steps beside the fast ones, on 1,
2, 4 and 8 virtual CPU devices.

    python benchmarks/reproducible.py --output benchmarks/results/reproducible.json

Each number of devices runs in a process of its own, with the same pool of threads and with huge
pages, as the launcher starts it. The two kinds of steps take turns; a time is that of one step on a
batch that is on the devices already. The global batch is the same everywhere. Processor time is
that of all threads and hardly depends on what else the machine does. Memory is what the compiler
plans for one device: state, batch, gradients, and what the programs need besides. After that the
stages of reproducible steps are timed, each waiting for the one before: the chunks, the sums over
devices, and the update.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VIRTUAL_RANKS = 8
DEVICES = (1, 2, 4, 8)
MODELS = ("mlp", "resnet20", "transformer_tiny")
KINDS = ("fast", "reproducible")


def make_task(name):
    """Returns what the batch is, a module and one global batch."""
    import numpy as np
    from flax import linen as nn

    from tnt_jax.models.resnet import resnet20
    from tnt_jax.models.transformer import PARAM_SETS, Transformer

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(10)(nn.relu(nn.Dense(256)(x)))

    class Translator(nn.Module):
        @nn.compact
        def __call__(self, tokens, train):
            return Transformer(vocab_size=1000, **PARAM_SETS["tiny"])(tokens, tokens, train=train)

    generator = np.random.default_rng(0)
    if name == "mlp":
        return (
            "784-256-10, 1024 rows",
            Mlp(),
            (pixels(generator, 1024, 784), generator.integers(0, 10, 1024)),
        )
    if name == "resnet20":
        return (
            "32x32x3, 32 rows",
            resnet20(),
            (pixels(generator, 32, 32, 32, 3), generator.integers(0, 10, 32)),
        )
    tokens = generator.integers(1, 1000, (32, 32)).astype(np.int32)
    return "32 rows of 32 tokens", Translator(), (tokens, tokens)


def pixels(generator, *shape):
    return generator.normal(size=shape).astype("float32")


def prepare(module, data, *, reproducible):
    """Returns a function that runs a training step to its end, one that times its stages, and the
    bytes of a device.
    """
    import jax
    import optax

    import tnt_jax as tnt
    from tnt_jax.data.streams import EpochStream
    from tnt_jax.keras_compat.fit.data_intake import DataArguments, to_batch
    from tnt_jax.train.execution import DeviceBatches

    model = tnt.Model(module, reproducible=reproducible, virtual_ranks=VIRTUAL_RANKS, seed=0)
    model.compile(
        optimizer=optax.adam(1e-3), loss=tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    rows = len(data[1])
    model.fit(*data, batch_size=rows, epochs=2, verbose=0)
    trainer = model._core.trainer
    host_batch = to_batch(
        EpochStream(model._shared.source(DataArguments(*data, batch_size=rows))).peek(0)
    )
    batch = trainer.put(host_batch)
    group, programs = DeviceBatches(batch, 0), trainer.programs
    sums = programs.zero_sums(group, trainer.state)
    train = programs.training(group, trainer.state, sums)

    def step():
        trainer.state, _ = train(trainer.state, sums, batch)
        jax.block_until_ready(trainer.state)

    compiled = trainer.lower_train_step(host_batch).compile()
    memory = (
        reproducible_memory(compiled, trainer, batch)
        if reproducible
        else planned(compiled, with_arguments=True)
    )
    return step, lambda: time_stages(trainer, train, sums, batch), memory


def time_stages(trainer, step, sums, batch):
    """Returns the milliseconds, wall and processor, of each stage of a reproducible step that waits
    for the stage before.
    """
    import jax

    from tnt_jax.reproducible.steps import _model

    times = {}

    def timed(name, function, *args):
        start = time.perf_counter(), time.process_time()
        result = jax.block_until_ready(function(*args))
        times[name] = (time.perf_counter() - start[0]) * 1e3, (time.process_time() - start[1]) * 1e3
        return result

    def sum_over_devices(sums):
        for add in adds:
            sums = add(sums)
        return sums

    ranks = trainer.steps.ranks
    adds, ranks._add_ranks = ranks._add_ranks, []
    measured, *others = timed("chunks", step.sum_batch, _model(trainer.state), batch)
    ranks._add_ranks = adds
    measured = timed("sums", sum_over_devices, measured)
    trainer.state, _ = timed("update", step.last, trainer.state, sums, measured, *others)
    return times


def planned(program, *, with_arguments):
    """Returns the bytes of a program: its temporary arrays and results, with or without its
    arguments.
    """
    stats = program.memory_analysis()
    made = stats.temp_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return made + stats.argument_size_in_bytes if with_arguments else made


def reproducible_memory(compiled, trainer, batch):
    """Returns the most bytes that a device holds during a step: what stays, and the gradients with
    the program that runs.
    """
    import jax

    ranks = trainer.steps.ranks
    per_rank = ranks.per_rank
    stays = (
        sum(x.nbytes for x in jax.tree.leaves(trainer.state))
        + sum(x.nbytes for x in jax.tree.leaves(batch)) / ranks.mesh.size
    )
    grads = sum(x.nbytes for x in jax.tree.leaves(trainer.state.params))
    # While the last chunk is worked on, one sum waits for each level of the tree below it.
    waiting = {
        "chunk": (per_rank.bit_length() - 1) * grads
        + (bytes_of_chunk(batch, ranks.count) if per_rank > 1 else 0)
    }
    needs = [
        planned(program, with_arguments=False) + waiting.get(name, grads)
        for name, program in compiled.by_name.items()
    ]
    return stays + max(needs)


def bytes_of_chunk(batch, num_chunks):
    import jax

    return sum(x.nbytes for x in jax.tree.leaves(batch)) / num_chunks


def measure(name, repeats):
    about, module, data = make_task(name)
    prepared = {kind: prepare(module, data, reproducible=kind == "reproducible") for kind in KINDS}
    times = {kind: [] for kind in KINDS}
    for _ in range(repeats):
        for kind, (step, *_) in prepared.items():
            start = time.perf_counter(), time.process_time()
            step()
            times[kind].append(
                ((time.perf_counter() - start[0]) * 1e3, (time.process_time() - start[1]) * 1e3)
            )
    row = {"model": name, "batch": about}
    for kind, values in times.items():
        wall, processor = zip(*values, strict=True)
        low, median, high = statistics.quantiles(wall, n=4)
        row |= {
            f"{kind}_ms": round(median, 3),
            f"{kind}_quartiles_ms": [round(low, 3), round(high, 3)],
        }
        row |= {
            f"{kind}_processor_ms": round(statistics.median(processor), 3),
            f"{kind}_mb": round(prepared[kind][-1] / 1e6, 2),
        }
    ratios = {
        "ratio": row["reproducible_ms"] / row["fast_ms"],
        "processor_ratio": row["reproducible_processor_ms"] / row["fast_processor_ms"],
    }
    stages = [prepared["reproducible"][1]() for _ in range(repeats)]
    for position, clock in enumerate(("ms", "processor_ms")):
        row[f"stages_{clock}"] = {
            key: round(statistics.median(x[key][position] for x in stages), 3) for key in stages[0]
        }
    return row | {key: round(value, 2) for key, value in ratios.items()}


def run_on(devices, name, repeats, cache):
    env = {
        **os.environ, "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "PJRT_NPROC": str(2 * VIRTUAL_RANKS), "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "JAX_COMPILATION_CACHE_DIR": cache,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }  # fmt: skip
    command = [sys.executable, __file__, "--inside", name, "--repeats", str(repeats)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return {"devices": devices, **json.loads(done.stdout.splitlines()[-1])}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=MODELS, help="networks (default: all)"
    )
    parser.add_argument(
        "--repeats", type=int, default=30, help="timed steps of each kind (default: %(default)s)"
    )
    parser.add_argument("--output", type=Path, help="JSON file for the results")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inside:
        print(json.dumps(measure(options.inside, options.repeats)))
        return
    import jax

    load = os.getloadavg()[0]
    rows = []
    print(
        f"{'model':18} {'devices':>7} {'fast ms':>9} {'repr. ms':>9} {'ratio':>6} "
        f"{'of processor':>13} {'fast MB':>8} {'repr. MB':>9}"
    )
    with tempfile.TemporaryDirectory() as cache:
        for name in options.models:
            for devices in DEVICES:
                row = run_on(devices, name, options.repeats, cache)
                rows.append(row)
                print(
                    f"{name:18} {devices:7} {row['fast_ms']:9.2f} {row['reproducible_ms']:9.2f} "
                    f"{row['ratio']:6.2f} "
                    f"{row['processor_ratio']:13.2f} {row['fast_mb']:8.2f} "
                    f"{row['reproducible_mb']:9.2f}",
                    flush=True,
                )
    if options.output:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, text=True
        ).stdout.strip()
        about = {
            "command": " ".join(["python", *sys.argv]), "commit": commit, "jax": jax.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(), "cores": os.cpu_count(), "load_before": round(load, 1),
            "virtual_ranks": VIRTUAL_RANKS,
            "repeats": options.repeats,
        }  # fmt: skip
        options.output.write_text(json.dumps({"about": about, "results": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
