"""How much communication of a training step the compiler hides on H100s, for every form of the
gradients' reduction.

The step that `fit` runs is compiled ahead of time for GPUs that need not be there, and the
compiler's schedule and its own model of times are read: nothing runs, so no number here is a
measured time. Convolutions enter the model at a flat 10 us each, so that rows of ResNet-50 can be
compared with each other, not read as times.

It needs, in an environment of its own (no GPU, no driver):

    pip install jax==0.10.2 jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2 nvidia-cuda-nvcc-cu12
    flax optax matplotlib python benchmarks/overlap.py --models resnet50 transformer_big --gpus 8 64
    --output benchmarks/results/overlap.json

Rows are added to the output file as they are compiled, and rows that it has are not compiled again.
"""

import argparse
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

# Before JAX starts: the plugin's own check needs a driver where CUDA is among the platforms, and
# the scheduler logs its model.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "0"
os.environ["TF_CPP_VMODULE"] = "latency_hiding_scheduler=1"

import jax
import jax.numpy as jnp
import optax
from jax.experimental import topologies

from tnt_jax import _jax
from tnt_jax.adapters.linen import LinenAdapter
from tnt_jax.distributed.sums.hlo import Collective, read_collectives
from tnt_jax.distributed.sums.reduction import Reduction, default_reduction
from tnt_jax.models.resnet import resnet50
from tnt_jax.models.transformer import PARAM_SETS, Transformer
from tnt_jax.train.contracts import Batch, LossTerm, StepParts, TrainingStep
from tnt_jax.train.state import create_state
from tnt_jax.train.steps.epoch_sums import zero_sums
from tnt_jax.train.steps.step import make_train_step

MIB = 2**20
COMBINE = "xla_gpu_all_reduce_combine_threshold_bytes"
# Partitions x hosts x GPUs of a host; the compiler's model takes 8 GPUs a host in any case.
TOPOLOGIES = {8: "1x1x8", 64: "1x8x8", 512: "1x64x8"}
# H100 SXM5 80 GB, from the CUDA device query and the data sheet.
# ruff: noqa: E501
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000
  l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 84942979072 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 cuda_compute_capability { major: 9 minor: 0 } device_vendor: "NVIDIA Corporation"
  device_interconnect_info { active_links: 18 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 patch: 0 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


class Form(NamedTuple):
    """A way to reduce gradients: what our step does, and what the compiler is told.

    Attributes:
        reduction: How the step sums gradients.
        options: Options of the compiler.
    """

    reduction: Reduction
    options: tuple[tuple[str, int], ...] = ()


def chained(mib: float) -> Reduction:
    return Reduction(int(mib * MIB), chained=True)


FORMS = {
    "xla": Form(Reduction("xla")),
    "xla, combine 4 MiB": Form(Reduction("xla"), ((COMBINE, 4 * MIB),)),
    "per array, kept apart": Form(Reduction(0), ((COMBINE, 1),)),
    "chained 4 MiB": Form(chained(4)),
    "chained 8 MiB": Form(chained(8)),
    "chained 25 MiB": Form(chained(25)),
    "chained 50 MiB": Form(chained(50)),
    "chained 100 MiB": Form(chained(100)),
    "chained 200 MiB": Form(chained(200)),
    "bfloat16 25 MiB": Form(Reduction(25 * MIB, chained=True, compression="bfloat16")),
    "sharded state 25 MiB": Form(Reduction(25 * MIB, chained=True, shard_optimizer_state=True)),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--models",
        nargs="+",
        choices=PROBLEMS,
        default=list(PROBLEMS),
        help="models (default: all)",
    )
    parser.add_argument(
        "--gpus",
        nargs="+",
        type=int,
        choices=TOPOLOGIES,
        default=[8],
        help="numbers of GPUs (default: 8)",
    )
    parser.add_argument(
        "--forms",
        nargs="+",
        choices=FORMS,
        default=list(FORMS),
        help="forms of reduction (default: all)",
    )
    parser.add_argument("--output", help="JSON file that rows are added to")
    parser.add_argument(
        "--picture", help="PNG file for the timeline of the first model and number of GPUs"
    )
    return parser.parse_args()


class Problem(NamedTuple):
    """A model with its optimizer and its batch, as shapes."""

    parts: StepParts
    optimizer: optax.GradientTransformation
    state: Any
    batch: Batch


def resnet(num_ranks: int, *, bn_axis_name: Any = None) -> Problem:
    """ResNet-50 in bfloat16, 256 images of 224 x 224 a GPU, SGD with momentum.

    Args:
        num_ranks: Number of GPUs.
        bn_axis_name: Mesh axes over which BatchNorm takes its statistics; None for each GPU's own.
    """
    images = jax.ShapeDtypeStruct((256 * num_ranks, 224, 224, 3), jnp.bfloat16)
    batch = Batch(images, jax.ShapeDtypeStruct((256 * num_ranks,), jnp.int32))
    module = resnet50(num_classes=1000, dtype=jnp.bfloat16, bn_axis_name=bn_axis_name)
    return make_problem(module, optax.sgd(0.1, momentum=0.9), batch)


def transformer(num_ranks: int) -> Problem:
    """Transformer-big in bfloat16, 64 sentences of 64 source and 64 target tokens a GPU, Adam."""
    tokens = jax.ShapeDtypeStruct((64 * num_ranks, 64), jnp.int32)
    return make_problem(
        Transformer(**PARAM_SETS["big"], dtype=jnp.bfloat16),
        optax.adam(1e-3),
        Batch((tokens, tokens), tokens),
    )


def transformer_base(num_ranks: int) -> Problem:
    """Transformer-base in bfloat16, otherwise like Transformer-big."""
    tokens = jax.ShapeDtypeStruct((64 * num_ranks, 64), jnp.int32)
    return make_problem(
        Transformer(**PARAM_SETS["base"], dtype=jnp.bfloat16),
        optax.adam(1e-3),
        Batch((tokens, tokens), tokens),
    )


PROBLEMS = {
    "resnet50": resnet,
    "transformer_big": transformer,
    "transformer_base": transformer_base,
}


def make_problem(module: Any, optimizer: optax.GradientTransformation, batch: Batch) -> Problem:
    adapter = LinenAdapter(module)

    def start() -> Any:
        one = [jnp.zeros((1, *x.shape[1:]), x.dtype) for x in jax.tree.leaves(batch.inputs)]
        variables = module.init(jax.random.key(0), *one, train=False)
        model_state = {name: value for name, value in variables.items() if name != "params"}
        return create_state(variables["params"], model_state, optimizer, seed=0)

    def loss_terms(outputs: jax.Array, batch: Batch) -> list[LossTerm]:
        losses = optax.softmax_cross_entropy_with_integer_labels(
            outputs.astype(jnp.float32), batch.targets
        )
        return [LossTerm(jnp.sum(losses), float(losses.size))]

    def increments(outputs: jax.Array, batch: Batch) -> jax.Array:
        return jnp.sum(jnp.argmax(outputs, -1) == batch.targets, dtype=jnp.float32)

    return Problem(
        StepParts(adapter.apply, loss_terms, increments), optimizer, jax.eval_shape(start), batch
    )


def compile_row(model: str, num_gpus: int, name: str) -> tuple[dict[str, Any], list[Collective]]:
    """Returns what the compiler makes of one form, and its collectives in the order of the
    schedule.
    """
    devices = topologies.get_topology_desc(
        platform="cuda", topology=TOPOLOGIES[num_gpus], target_config=H100
    ).devices
    mesh = _jax.make_data_mesh(devices)
    problem, form = PROBLEMS[model](num_gpus), FORMS[name]
    sums = zero_sums(problem.parts, problem.state, problem.batch, mesh)
    state = problem.state
    if form.reduction.keeps_residual:
        rows = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((num_gpus, *x.shape), x.dtype), state.params
        )
        state = type(state)(**{**vars(state), "residual": rows})
    training = TrainingStep(problem.parts, problem.optimizer)
    step = make_train_step(training, mesh, reduction=form.reduction)
    start = time.time()
    lowered = step.lower(state, sums, problem.batch)  # type: ignore[attr-defined]
    with tempfile.TemporaryFile("w+") as log:
        with logging_to(log):
            compiled = lowered.compile(compiler_options=dict(form.options) or None)
        log.seek(0)
        exposed_us, total_us = read_estimate(log.read())
    collectives, num_backward = read_collectives(compiled.as_text())
    large = [x for x in collectives if x.nbytes >= 16384]
    row = {
        "model": model,
        "gpus": num_gpus,
        "form": name,
        "is_default": form
        == Form(default_reduction("cuda", num_gpus).resolve(count_bytes(state.params))),
        "collectives": len(collectives),
        "large": len(large),
        "mib": round(sum(x.nbytes for x in collectives) / MIB, 1),
        "asynchronous": sum(x.is_asynchronous for x in large),
        "exposed_us": exposed_us,
        "total_us": total_us,
        "compile_s": round(time.time() - start),
        "timeline": [list(x) for x in collectives],
        "backward_kernels": num_backward,
        "jax": jax.__version__,
    }
    return row, collectives


def count_bytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@contextmanager
def logging_to(file: Any) -> Iterator[None]:
    """Sends what the compiler's C++ code writes to stderr to a file."""
    sys.stderr.flush()
    stderr = os.dup(2)
    os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def read_estimate(log: str) -> tuple[float, float]:
    """Returns the exposed communication and the whole step of the final schedule in us, as the
    scheduler's log states them.
    """
    after = log[log.rindex("Statistics after scheduling") :]
    # The log says cycles; with the estimator of Hopper GPUs costs are in microseconds.
    found = [re.findall(rf"{name} cycles: ([\d.e+]+)", after) for name in ("Total wasted", "Total")]
    return float(found[0][-1]), float(found[1][-1])


def table(rows: list[dict[str, Any]]) -> str:
    """Returns rows as a Markdown table, with exposed time relative to XLA's own grouping."""
    lines = [
        "| model | GPUs | form | collectives (16 KiB or more) | MiB | asynchronous | exposed us "
        "| of xla | total us |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    base = {(row["model"], row["gpus"]): row["exposed_us"] for row in rows if row["form"] == "xla"}
    for row in sorted(
        rows, key=lambda row: (row["model"], row["gpus"], list(FORMS).index(row["form"]))
    ):
        reference = base.get((row["model"], row["gpus"]))
        ratio = f"{row['exposed_us'] / reference:.2f}" if reference else "-"
        name = f"**{row['form']}** (default)" if row["is_default"] else row["form"]
        lines.append(
            f"| {row['model']} | {row['gpus']} | {name} | {row['collectives']} ({row['large']}) "
            f"| {row['mib']} | "
            f"{row['asynchronous']} | {row['exposed_us']:.0f} | {ratio} | {row['total_us']:.0f} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: str) -> None:
    """Draws when each form sends what: along the kernels of the schedule, one bar for each
    collective.
    """
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        len(rows), 1, figsize=(10, 1 + 0.7 * len(rows)), sharex=True, squeeze=False
    )
    for axis, row in zip(axes[:, 0], rows, strict=True):
        for collective in (Collective(*fields) for fields in row["timeline"]):
            width = max(collective.done - collective.start, 0.004)
            axis.barh(
                0,
                width,
                left=collective.start,
                color="tab:blue" if collective.is_asynchronous else "tab:red",
            )
        axis.axvline(
            row["timeline"] and Collective(*row["timeline"][0]).backward_end,
            color="black",
            linewidth=1,
        )
        axis.set_yticks([0], [f"{row['form']}\nexposed {row['exposed_us']:.0f} us"], fontsize=7)
        axis.set_xlim(0, 1)
    axes[-1, 0].set_xlabel(
        "place in the schedule (share of kernels); black: end of backpropagation; red: nothing "
        "runs meanwhile"
    )
    figure.suptitle(
        f"Gradient exchange of {rows[0]['model']} on {rows[0]['gpus']} H100s, as compiled (not "
        f"measured)"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    args = parse_arguments()
    path = Path(args.output) if args.output else None
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path and path.exists() else []
    for num_gpus in args.gpus:
        for model in args.models:
            for form in args.forms:
                if any(
                    (row["model"], row["gpus"], row["form"]) == (model, num_gpus, form)
                    for row in rows
                ):
                    continue
                rows.append(compile_row(model, num_gpus, form)[0])
                print(table(rows[-1:]).splitlines()[-1], flush=True)
                if path:
                    path.write_text(
                        json.dumps(rows, indent=None, separators=(",", ":")).replace("},{", "},\n{")
                        + "\n"
                    )
    print(table(rows))
    if args.picture:
        draw(
            [row for row in rows if (row["model"], row["gpus"]) == (args.models[0], args.gpus[0])],
            args.picture,
        )


if __name__ == "__main__":
    main()
