"""Memory and communication of models that are larger than a GPU, on 8 and 64 H100s, beside XLA's
own sharding of the same model.

The step that `fit` runs is compiled ahead of time for GPUs that need not be there. The compiler
states the memory that it needs, and its scheduler models the time and how much communication
nothing hides; loops count as often as they run. Nothing runs, so no number here is a measured time.
Plain jit gets the same parameters, cut in the same way, with the same rematerialization, and
decides all else itself. With "rows held", the output of each block keeps its rows where the batch
has them, as MaxText, Levanter and Kauldron do by `with_sharding_constraint`; XLA then gathers the
parameters of a block at a time. It sums gradients over GPUs in bfloat16, and this library in
float32; "sums in bfloat16" is this library's step with the same sums. "Compiler's step" is this
library's step of models that compare rows (`ShardedGlobalSteps`).

It needs the environment of `benchmarks/overlap.py`, with JAX and its plugins of 0.12.0.1:

    python benchmarks/larger_models.py --gpus 8 64 --output benchmarks/results/larger_models.json
    --picture benchmarks/results/larger_models.png

Rows are added to the output file as they are compiled, and rows that it has are not compiled again.
"""

import argparse
import json
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

# Sets the environment of JAX, so that it must come first.
import overlap

H100, MIB, TOPOLOGIES = overlap.H100, overlap.MIB, overlap.TOPOLOGIES

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from tnt_jax import _jax, models
from tnt_jax.adapters.base import Variables
from tnt_jax.adapters.linen import LinenAdapter
from tnt_jax.distributed.joining.runtime import Runtime
from tnt_jax.distributed.sums.hlo import count_runs, read_collectives, read_traffic
from tnt_jax.distributed.sums.reduction import default_reduction
from tnt_jax.settings import Settings
from tnt_jax.sharded import ShardedGlobalSteps, ShardedSteps, gathering
from tnt_jax.sharded.blocks.remat import rematerialized, rematerialized_apply
from tnt_jax.sharded.options import MeshAxes
from tnt_jax.train.contracts import Batch, LossTerm, StepParts, TrainingStep
from tnt_jax.train.state import create_state
from tnt_jax.train.steps.epoch_sums import zero_sums
from tnt_jax.train.steps.step import make_train_step

GIB = 2**30
H100_BYTES = 80e9
TOKENS = 2048


class Form(NamedTuple):
    """A way to train a model.

    Attributes:
        name: Its name in the table.
        mesh: Devices along each axis.
        remat: What blocks keep for backpropagation.
        by_jit: Whether plain `jax.jit` shards the step, and not this library.
        holds_rows: Whether the outputs of blocks keep their rows where the batch has them.
        sums: Dtype in which this library sums gradients.
        options: Options of the compiler.
        model: The decoder, or a model of `benchmarks/overlap.py`.
    """

    name: str
    mesh: dict[str, int]
    remat: Any = "full"
    by_jit: bool = False
    holds_rows: bool = False
    sums: str = "float32"
    options: tuple[tuple[str, Any], ...] = ()
    model: str = "decoder"


# XLA of JAX 0.12 fails to compile its own kernel for a sum over 64 GPUs.
NO_KERNELS = (("xla_gpu_experimental_use_collective_kernels", ""),)
# Two layers in a turn of the loop: the gathers of the second can run while the first computes.
DOUBLE = (("xla_gpu_enable_while_loop_double_buffering", True),)


def forms_of(num_gpus: int) -> list[Form]:
    """Returns the forms of the decoder, and those of a model that fits a GPU."""
    whole = {"fsdp": num_gpus}
    found = [
        Form("fsdp", whole),
        Form("fsdp, sums in bfloat16", whole, sums="bfloat16"),
        Form("fsdp, two layers a turn", whole, options=DOUBLE),
        Form("fsdp, dots kept", whole, remat="dots"),
        Form("plain jit", whole, by_jit=True),
        Form("jit, rows held", whole, by_jit=True, holds_rows=True),
    ]
    both = {"data": num_gpus // 8, "fsdp": 8} if num_gpus > 8 else {"data": 2, "fsdp": 4}
    found += [
        Form("data x fsdp", both),
        Form("data x fsdp, sums in bfloat16", both, sums="bfloat16"),
        Form("plain jit", both, by_jit=True),
        Form("jit, rows held", both, by_jit=True, holds_rows=True),
    ]
    if num_gpus == 8:
        found += [
            Form("data parallel", {"data": 8}, "none", model="transformer_big"),
            Form("fsdp", whole, "none", model="transformer_big"),
            Form("compiler's step", whole, "none", by_jit=True, model="transformer_big"),
            Form("data parallel", {"data": 8}, "none", model="resnet50"),
            Form("fsdp", whole, "none", model="resnet50"),
            Form("compiler's step", whole, "none", by_jit=True, model="resnet50"),
        ]
    return found


# Kernels that are chosen on a device would ask the CPU of this machine.
DECODER = models.Decoder(**models.DECODER_SIZES["8b"], dtype=jnp.bfloat16, implementation="xla")


def decoder(num_ranks: int) -> overlap.Problem:
    """A decoder of 8.03 billion parameters in bfloat16, a text of 2,048 tokens a rank, Adam."""
    tokens = jax.ShapeDtypeStruct((num_ranks, TOKENS), jnp.int32)

    def loss_terms(outputs: jax.Array, batch: Batch) -> list[LossTerm]:
        losses = optax.softmax_cross_entropy_with_integer_labels(outputs, batch.targets)
        return [LossTerm(jnp.sum(losses), float(losses.size))]

    optimizer = optax.adam(1e-4)

    def start() -> Any:
        variables = DECODER.init(jax.random.key(0), jnp.zeros((1, 8), jnp.int32))
        return create_state(*Variables(variables["params"], {}), optimizer, seed=0)

    parts = StepParts(LinenAdapter(DECODER).apply, loss_terms, lambda outputs, batch: ())
    return overlap.Problem(parts, optimizer, jax.eval_shape(start), Batch(tokens, tokens))


def problem_of(form: Form, mesh: Any) -> overlap.Problem:
    """Returns the model of a form; statistics of ResNet-50 are those of the global batch."""
    num_ranks = _jax.num_ranks(mesh)
    if form.model == "decoder":
        return decoder(num_ranks)
    if form.model == "resnet50":
        return overlap.resnet(num_ranks, bn_axis_name=_jax.rank_axes(mesh))
    return overlap.PROBLEMS[form.model](num_ranks)


def placed(tree: Any, shardings: Any) -> Any:
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tree,
        shardings,
    )


def lower(form: Form, num_gpus: int) -> Any:
    """Returns the lowered step of a form."""
    devices = topologies.get_topology_desc(
        platform="cuda", topology=TOPOLOGIES[num_gpus], target_config=H100
    ).devices
    mesh = MeshAxes.of(form.mesh).build(_jax.make_data_mesh(devices))
    problem = problem_of(form, mesh)
    if form.mesh == {"data": num_gpus}:
        sums = zero_sums(problem.parts, problem.state, problem.batch, mesh)
        reduction = default_reduction("cuda", num_gpus)
        training = TrainingStep(problem.parts, problem.optimizer)
        step = make_train_step(training, mesh, reduction=reduction)
        return step.lower(problem.state, sums, problem.batch)  # type: ignore[attr-defined]
    # Over a whole batch the compiler decides what moves: the step of models that compare rows.
    is_whole = form.by_jit and form.model != "decoder"
    steps = (ShardedGlobalSteps if is_whole else ShardedSteps)(
        Runtime(mesh, Settings()),
        default_reduction("cuda", num_gpus),
        has_remat=form.remat != "none",
    )
    layout = steps.layout_of(problem.state.params)
    state = placed(problem.state, layout.like_params(problem.state))
    by_row = NamedSharding(mesh, PartitionSpec(_jax.rank_axes(mesh)))
    batch = placed(problem.batch, jax.tree.map(lambda _: by_row, problem.batch))
    if form.by_jit and not is_whole:
        return lower_jit(problem, form, layout, state, batch)
    apply = rematerialized_apply(problem.parts.apply, form.remat)
    parts = StepParts(apply, problem.parts.loss_terms, problem.parts.increments)
    sums = zero_sums(parts, state, batch, mesh)
    step = steps.train(TrainingStep(parts, problem.optimizer))
    with summed_in(form.sums):
        return step.lower(state, sums, batch)  # type: ignore[attr-defined]


@contextmanager
def summed_in(dtype: str) -> Iterator[None]:
    """Sums gradients that are reduce-scattered in float32, or in the dtype that was gathered."""

    def backward(dim: int, name: str, like: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
        axis = _jax.FSDP_AXIS
        total = jax.lax.psum_scatter(grad, axis, scatter_dimension=dim, tiled=True)
        return (total.astype(like.dtype),)

    if dtype == "bfloat16":
        gathering._gathered.defvjp(gathering._gathered_forward, backward)
    try:
        yield
    finally:
        gathering._gathered.defvjp(gathering._gathered_forward, gathering._gathered_backward)


def lower_jit(problem: overlap.Problem, form: Form, layout: Any, state: Any, batch: Batch) -> Any:
    """Returns the lowered step that a user of plain JAX would write for the same arrays."""
    optimizer, remat, rows = problem.optimizer, form.remat, batch.inputs.sharding

    def hold(call: Any, args: Any, kwargs: Any, context: Any) -> Any:
        outputs = call(*args, **kwargs)
        if not (form.holds_rows and type(context.module).__name__ == "DecoderBlock"):
            return outputs
        return jax.tree.map(lambda x: jax.lax.with_sharding_constraint(x, rows), outputs)

    def step(params: Any, opt_state: Any, batch: Batch) -> Any:
        def loss(params: Any) -> jax.Array:
            def forward(params: Any) -> jax.Array:
                with nn.intercept_methods(hold):
                    return DECODER.apply({"params": params}, batch.inputs)

            outputs = rematerialized(forward, params, remat=remat)
            term = problem.parts.loss_terms(outputs, batch)[0]
            return term.total / term.count

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    shardings = jax.tree.map(lambda x: x.sharding, (state.params, state.opt_state))
    whole = NamedSharding(layout.mesh, PartitionSpec())
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*shardings, whole))
    return jitted.lower(state.params, state.opt_state, batch)


def compile_row(form: Form, num_gpus: int) -> dict[str, Any]:
    """Returns what the compiler makes of one form."""
    lowered = lower(form, num_gpus)
    start = time.time()
    with tempfile.TemporaryFile("w+") as log:
        with overlap.logging_to(log):
            compiled = lowered.compile(compiler_options=dict((*NO_KERNELS, *form.options)))
        log.seek(0)
        text = compiled.as_text()
        exposed_us, total_us = modelled(log.read(), count_runs(text))
    memory = compiled.memory_analysis()
    state = memory.argument_size_in_bytes
    peak = state + memory.temp_size_in_bytes
    peak += memory.output_size_in_bytes - memory.alias_size_in_bytes
    traffic: dict[str, list[float]] = {}
    for x in read_traffic(text):
        counted = traffic.setdefault(x.kind, [0, 0.0, 0.0])
        counted[0] += x.times
        counted[1] += x.times * x.nbytes / GIB
        counted[2] += x.times * x.nbytes / GIB * x.is_asynchronous
    return {
        "model": form.model,
        "gpus": num_gpus,
        "form": form.name,
        "mesh": form.mesh,
        "remat": form.remat,
        "by_jit": form.by_jit,
        "state_gib": state / GIB,
        "peak_gib": peak / GIB,
        "fits": peak < H100_BYTES,
        "exposed_ms": exposed_us / 1e3,
        "total_ms": total_us / 1e3,
        "traffic": traffic,
        "loops": timelines(text),
        "compile_s": round(time.time() - start),
        "jax": jax.__version__,
    }


def modelled(log: str, runs: dict[str, int]) -> tuple[float, float]:
    """Returns exposed communication and time of a step in us, by the scheduler's own model.

    Its log has a part for each loop body, and one for the program itself, whose name is none of
    theirs.
    """
    exposed = total = 0.0
    for part in re.split("Statistics after scheduling", log)[1:]:
        found = [
            re.search(pattern, part)
            for pattern in (
                r"For computation: ([\w.\-]+),",
                r"Total wasted cycles: ([\d.e+]+)",
                r"Total cycles: ([\d.e+]+)",
            )
        ]
        name, wasted, lasted = (match[1] for match in found if match)
        exposed += runs.get(name, 1) * float(wasted)
        total += runs.get(name, 1) * float(lasted)
    return exposed, total


def timelines(text: str) -> list[list[list[Any]]]:
    """Returns the collectives of each loop over the layers, in the order of the schedule."""
    names = [name for name, times in count_runs(text).items() if times > 8]
    return [[list(x) for x in read_collectives(text, name)[0]] for name in names]


def table(rows: list[dict[str, Any]]) -> str:
    """Returns rows as a Markdown table."""
    lines = [
        "| model | GPUs | form | mesh | remat | state GiB | peak GiB | fits | all-gather GiB "
        "| reduce-scatter GiB | other GiB | exposed ms | step ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        mesh = " x ".join(f"{name} {size}" for name, size in row["mesh"].items())
        sent = {kind: gib for kind, (_, gib, _) in row["traffic"].items()}
        gathered, scattered = sent.pop("all-gather", 0.0), sent.pop("reduce-scatter", 0.0)
        lines.append(
            f"| {row['model']} | {row['gpus']} | {row['form']} | {mesh} | {row['remat']} "
            f"| {row['state_gib']:.1f} | {row['peak_gib']:.1f} | {'yes' if row['fits'] else 'no'} "
            f"| {gathered:.1f} | {scattered:.1f} | {sum(sent.values()):.1f} "
            f"| {row['exposed_ms']:.0f} | {row['total_ms']:.0f} |"
        )
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], path: str) -> None:
    """Draws when the loops over the layers communicate: forward above backward."""
    from matplotlib import pyplot as plt

    colours = {"all-gather": "tab:blue", "reduce-scatter": "tab:orange", "all-reduce": "tab:red"}
    bars = [
        (f"{row['form']}, {' x '.join(row['mesh'])}\n{name}", loop)
        for row in rows
        for name, loop in zip(("forward", "backward"), row["loops"], strict=False)
    ]
    figure, axes = plt.subplots(len(bars), 1, figsize=(10, 1 + 0.8 * len(bars)), sharex=True)
    for axis, (label, loop) in zip(axes, bars, strict=True):
        for kind, nbytes, is_asynchronous, start, done, _ in loop:
            if nbytes >= MIB:
                axis.barh(
                    0,
                    max(done - start, 0.004),
                    left=start,
                    color=colours.get(kind, "tab:gray"),
                    alpha=0.7 if is_asynchronous else 1.0,
                )
        axis.set_yticks([0], [label], fontsize=7)
        axis.set_xlim(0, 1)
    axes[-1].set_xlabel(
        "place in the schedule of a layer (share of kernels); blue: all-gather, orange: "
        "reduce-scatter, red: all-reduce"
    )
    figure.suptitle("Decoder of 8 billion parameters on 8 H100s, as compiled (not measured)")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", nargs="+", type=int, choices=(8, 64), default=[8])
    parser.add_argument("--forms", nargs="+", help="names of forms (default: all)")
    parser.add_argument("--models", nargs="+", help="names of models (default: all)")
    parser.add_argument("--output", help="JSON file that rows are added to")
    parser.add_argument("--picture", help="PNG file for the timeline on 8 GPUs")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    path = Path(args.output) if args.output else None
    rows: list[dict[str, Any]] = json.loads(path.read_text()) if path and path.exists() else []
    for num_gpus in args.gpus:
        for form in forms_of(num_gpus):
            known = (form.model, num_gpus, form.name, form.mesh)
            is_left_out = (args.forms and form.name not in args.forms) or (
                args.models and form.model not in args.models
            )
            if is_left_out or any(
                (row["model"], row["gpus"], row["form"], row["mesh"]) == known for row in rows
            ):
                continue
            rows.append(compile_row(form, num_gpus))
            print(table(rows[-1:]).splitlines()[-1], flush=True)
            if path:
                path.write_text("[" + ",\n".join(map(json.dumps, rows)) + "]\n")
    print(table(rows))
    if args.picture:
        drawn = ("fsdp", "data x fsdp", "jit, rows held")
        draw([row for row in rows if row["gpus"] == 8 and row["form"] in drawn], args.picture)


if __name__ == "__main__":
    main()
