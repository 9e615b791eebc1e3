"""Speed of one device: ResNet-50 and Transformer-big through tnt_jax, a bare JAX step, and compiled
PyTorch, in one run.

Inputs are random and stay on the device, so that steps alone are measured; `fit` alone gets its
batches, of the same kind, from the host's memory. Computations are in bfloat16, parameters in
float32. The share of the chip's peak counts the products of the model's formula, not what a kernel
does besides.

    python benchmarks/gpu.py --models resnet50 transformer_big --output gpu.json

Contenders run in processes of their own, which compile one after another and then take turns, round
by round.

PyTorch runs where torch (and for ResNet-50 torchvision) is installed. Without a GPU the script can
be tried with small sizes; such numbers mean nothing.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from machine import add_platform, choose_devices, environment

CONTENDERS = ("tnt_jax fit", "tnt_jax", "bare jax", "torch")
READY, RESULT = "READY", "RESULT "
# Dense bfloat16 TFLOP/s from the data sheets.
PEAKS = {"H100": 989.4, "H200": 989.4, "A100": 311.9, "V100": 125.0}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--models",
        nargs="+",
        choices=("resnet50", "transformer_big"),
        default=["resnet50", "transformer_big"],
    )
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS)
    parser.add_argument(
        "--batch-size", type=int, help="images, or sentences of 64 tokens (default: 256 and 64)"
    )
    parser.add_argument("--image-size", type=int, default=224, help="(default: 224)")
    parser.add_argument("--steps", type=int, default=20, help="steps of a round (default: 20)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default: 5)")
    add_platform(parser)
    parser.add_argument("--output", help="JSON file for the results")
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "CONTENDER"), help=argparse.SUPPRESS)
    return parser.parse_args()


def batch_size_of(args: argparse.Namespace, model: str) -> int:
    return args.batch_size or {"resnet50": 256, "transformer_big": 64}[model]


def flops_per_item(args: argparse.Namespace, model: str, num_params: int) -> float:
    """Returns the operations of a training step for an image, or for a target token."""
    if model == "resnet50":
        # 4.09 G products of the forward pass at 224 x 224 (v1.5), two operations each, and twice as
        # many backwards.
        return 3 * 2 * 4.09e9 * (args.image_size / 224) ** 2
    # Each parameter works on a token once, forwards and twice backwards (Kaplan et al. 2020,
    # arXiv:2001.08361, section 2.1); sources are as many as targets, and each half of the
    # parameters sees one of them.
    return 6 * num_params


def jax_problem(args: argparse.Namespace, model: str) -> tuple[Any, Any, Any, Any]:
    """Returns module, optimizer, inputs and targets."""
    import jax
    import jax.numpy as jnp
    import optax

    from tnt_jax.models.resnet import resnet50
    from tnt_jax.models.transformer import PARAM_SETS, Transformer

    size, key = batch_size_of(args, model), jax.random.key(1)
    if model == "resnet50":
        images = jax.random.normal(key, (size, args.image_size, args.image_size, 3), jnp.bfloat16)
        return (
            resnet50(num_classes=1000, dtype=jnp.bfloat16),
            optax.sgd(0.1, momentum=0.9),
            images,
            jnp.arange(size) % 1000,
        )
    tokens = jax.random.randint(key, (size, 64), 1, 33708)
    return (
        Transformer(**PARAM_SETS["big"], dtype=jnp.bfloat16),
        optax.adam(1e-4),
        (tokens, tokens),
        tokens,
    )


def run_tnt(args: argparse.Namespace, model: str) -> tuple[Callable[[], Any], int]:
    import jax
    import jax.numpy as jnp
    import optax

    from tnt_jax import _jax
    from tnt_jax.adapters.linen import LinenAdapter
    from tnt_jax.distributed.sums.reduction import default_reduction
    from tnt_jax.train.contracts import Batch, LossTerm, StepParts, TrainingStep
    from tnt_jax.train.state import create_state
    from tnt_jax.train.steps.epoch_sums import zero_sums
    from tnt_jax.train.steps.step import make_train_step

    module, optimizer, inputs, targets = jax_problem(args, model)
    adapter, mesh = LinenAdapter(module), _jax.make_data_mesh(jax.devices()[:1])

    def loss_terms(outputs: jax.Array, batch: Batch) -> list[LossTerm]:
        losses = optax.softmax_cross_entropy_with_integer_labels(
            outputs.astype(jnp.float32), batch.targets
        )
        return [LossTerm(jnp.sum(losses), float(losses.size))]

    parts, batch = (
        StepParts(adapter.apply, loss_terms, lambda outputs, batch: ()),
        Batch(inputs, targets),
    )
    state = _jax.replicate(create_state(*adapter.init(inputs, seed=0), optimizer, seed=0), mesh)
    reduction = default_reduction(jax.devices()[0].platform, 1)
    step = make_train_step(TrainingStep(parts, optimizer), mesh, reduction=reduction)
    held = [state, _jax.replicate(zero_sums(parts, state, batch, mesh), mesh)]

    def run() -> None:
        for _ in range(args.steps):
            held[:] = step(held[0], held[1], batch)
        jax.block_until_ready(held[1])

    return run, sum(x.size for x in jax.tree.leaves(state.params))


def run_fit(args: argparse.Namespace, model: str) -> tuple[Callable[[], Any], int]:
    import jax
    import numpy as np

    import tnt_jax as tnt

    module, optimizer, inputs, targets = jax_problem(args, model)
    # Not a view of the device's memory, and as many batches as steps of a round.
    inputs, targets = jax.tree.map(
        lambda x: np.concatenate([np.asarray(x)] * args.steps), (inputs, targets)
    )
    trained = tnt.Model(module)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    trained.compile(optimizer, loss=loss)
    options = {"batch_size": batch_size_of(args, model), "epochs": 1, "verbose": 0}

    def run() -> None:
        trained.fit(inputs, targets, **options)

    run()
    return run, sum(x.size for x in jax.tree.leaves(trained.variables["params"]))


def run_bare(args: argparse.Namespace, model: str) -> tuple[Callable[[], Any], int]:
    import jax
    import jax.numpy as jnp
    import optax

    module, optimizer, inputs, targets = jax_problem(args, model)
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    variables = jax.jit(lambda key: module.init(key, *[x[:1] for x in given], train=False))(
        jax.random.key(0)
    )
    params, rest = (
        variables["params"],
        {name: value for name, value in variables.items() if name != "params"},
    )

    def step(params: Any, rest: Any, opt_state: Any, number: Any) -> Any:
        def objective(params: Any) -> Any:
            rngs = {"dropout": jax.random.fold_in(jax.random.key(0), number)}
            outputs, changed = module.apply(
                {"params": params, **rest}, *given, train=True, rngs=rngs, mutable=list(rest)
            )
            losses = optax.softmax_cross_entropy_with_integer_labels(
                outputs.astype(jnp.float32), targets
            )
            return losses.mean(), changed

        (_, rest), grads = jax.value_and_grad(objective, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), rest, opt_state, number + 1

    compiled = jax.jit(step, donate_argnums=(0, 1, 2))
    num_params = sum(x.size for x in jax.tree.leaves(params))
    held = [params, rest, optimizer.init(params), jnp.int32(0)]

    def run() -> None:
        for _ in range(args.steps):
            held[:] = compiled(*held)
        jax.block_until_ready(held)

    return run, num_params


def run_torch(args: argparse.Namespace, model: str) -> tuple[Callable[[], Any], int]:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = batch_size_of(args, model)
    if model == "resnet50":
        import torchvision  # pyright: ignore[reportMissingImports]

        net: Any = torchvision.models.resnet50().to(device, memory_format=torch.channels_last)
        images = torch.randn(size, 3, args.image_size, args.image_size, device=device).to(
            memory_format=torch.channels_last
        )
        given, targets = (images,), torch.arange(size, device=device) % 1000
        optimizer: Any = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    else:
        net = make_torch_transformer(torch).to(device)
        tokens = torch.randint(1, 33708, (size, 64), device=device)
        given, targets = (tokens, tokens), tokens
        optimizer = torch.optim.Adam(net.parameters(), 1e-4, fused=device == "cuda")
    compiled = torch.compile(net)

    def run() -> None:
        for _ in range(args.steps):
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast(device, torch.bfloat16):
                outputs = compiled(*given)
                loss = torch.nn.functional.cross_entropy(
                    outputs.flatten(0, -2).float(), targets.flatten()
                )
            loss.backward()
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    return run, sum(x.numel() for x in net.parameters())


def make_torch_transformer(torch: Any) -> Any:
    """Returns a Transformer-big of PyTorch's own layers, with one matrix for embeddings and
    logits.
    """

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(33708, 1024)
            self.body = torch.nn.Transformer(
                1024, 16, 6, 6, 4096, dropout=0.3, batch_first=True, norm_first=True
            )

        def forward(self, sources: Any, targets: Any) -> Any:
            mask = torch.nn.Transformer.generate_square_subsequent_mask(
                targets.shape[1], device=targets.device
            )
            out = self.body(
                self.embedding(sources), self.embedding(targets), tgt_mask=mask, tgt_is_causal=True
            )
            return out @ self.embedding.weight.T

    return Net()


def work(args: argparse.Namespace, model: str, contender: str) -> None:
    """Prepares one contender in this process, runs a round for each line that it is sent, and
    prints the result as JSON when there are no more.
    """
    choose_devices(args.platform)
    # Contenders share the device's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    makers = {"tnt_jax fit": run_fit, "tnt_jax": run_tnt, "bare jax": run_bare, "torch": run_torch}
    run, num_params = makers[contender](args, model)
    run()
    print(READY, flush=True)
    times = []
    for _ in sys.stdin:
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) / args.steps)
        print(READY, flush=True)
    facts = device_facts(args, contender)
    print(RESULT + json.dumps({"seconds": times, "num_params": num_params, **facts}), flush=True)


def device_facts(args: argparse.Namespace, contender: str) -> dict[str, Any]:
    if contender == "torch":
        import torch

        on_gpu = torch.cuda.is_available()
        name = torch.cuda.get_device_name() if on_gpu else "cpu"
        return {
            "device": name,
            "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
            "version": torch.__version__,
        }
    import jax

    device = jax.devices()[0]
    memory = device.memory_stats() or {}
    return {
        "device": device.device_kind,
        "peak_bytes": memory.get("peak_bytes_in_use"),
        "version": jax.__version__,
    }


def measure(args: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """Returns the results of all contenders, whose rounds take turns."""
    needs = ["torch", "torchvision"] if model == "resnet50" else ["torch"]
    has_torch = all(map(importlib.util.find_spec, needs))
    if "torch" in args.contenders and not has_torch:
        print(f"{model}: PyTorch is left out: {' and '.join(needs)} must be installed.")
    workers: dict[str, subprocess.Popen[str]] = {}
    for contender in args.contenders:
        if contender != "torch" or has_torch:
            # A process of its own, because each library keeps the memory that it has taken.
            command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:]]
            command += ["--worker", model, contender]
            workers[contender] = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            # One after another, or trials of kernels would disturb each other.
            wait_for(workers[contender], READY)
    for _ in range(args.rounds):
        for worker in workers.values():
            assert worker.stdin is not None
            worker.stdin.write("\n")
            worker.stdin.flush()
            wait_for(worker, READY)
    results = []
    for contender, worker in workers.items():
        assert worker.stdin is not None
        worker.stdin.close()
        found = json.loads(wait_for(worker, RESULT))
        worker.wait()
        results.append({"model": model, "contender": contender, **found})
    return results


def wait_for(worker: "subprocess.Popen[str]", word: str) -> str:
    """Returns the rest of the next line of a worker that begins with a word."""
    assert worker.stdout is not None
    for line in worker.stdout:
        if line.startswith(word):
            return line.removeprefix(word)
    sys.exit(f"{worker.args} ended with exit code {worker.wait()}.")


def report(args: argparse.Namespace, results: list[dict[str, Any]]) -> None:
    print(
        f"{'model':16} {'contender':11} {'ms/step':>8} {'spread':>8} {'items/s':>10} "
        f"{'of peak':>8} {'GiB':>6}  device"
    )
    for row in results:
        step = statistics.median(row["seconds"])
        items = batch_size_of(args, row["model"]) * (1 if row["model"] == "resnet50" else 64)
        peak = next((value for name, value in PEAKS.items() if name in row["device"]), None)
        flops = flops_per_item(args, row["model"], row["num_params"]) * items / step
        share = f"{flops / peak / 1e12:8.3f}" if peak else f"{'-':>8}"
        memory = f"{row['peak_bytes'] / 2**30:6.1f}" if row["peak_bytes"] else f"{'-':>6}"
        spread = f"{(max(row['seconds']) - min(row['seconds'])) * 1e3:8.2f}"
        speed = f"{step * 1e3:8.2f} {spread} {items / step:10.0f}"
        print(f"{row['model']:16} {row['contender']:11} {speed} {share} {memory}  {row['device']}")


def main() -> None:
    args = parse_arguments()
    if args.worker:
        work(args, *args.worker)
        return
    results = [row for model in args.models for row in measure(args, model)]
    report(args, results)
    if args.output:
        about = {"arguments": vars(args), "XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}
        about |= environment()
        Path(args.output).write_text(json.dumps({**about, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
