"""Summing gradients between processes on CPUs: what a sum takes, and what a training step with it takes.

Sums: XLA's all-reduce (Gloo), the ring of `benchmarks/ring.py`, and PyTorch's Gloo, for sizes from 1 kB on, in GB/s of array per second.
Steps: an MLP with 28 MB of gradients, whose sums XLA, the ring (started from the program as soon as a gradient is finished) or
PyTorch's DistributedDataParallel exchange. A step without any exchange tells how much of it was hidden, and others how fast a step
could be at best (`benchmarks/ring_steps.py`).

    python benchmarks/allreduce.py --processes 2 --output benchmarks/results/allreduce_local.json

On hosts with rate-limited links, a command prefix places the processes:

    python benchmarks/allreduce.py --prefix "netcluster exec node{number} --" --address 10.77.0.{number} --rate-gbit 1
"""

import argparse
import contextlib
import json
import os
import platform
import shlex
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WIDTH, LAYERS = 936, 8  # 28 MB of float32 gradients.
SUMS = ("xla", "ring", "torch")
LINK_STEPS = ("link", "beside", "from first gradient", "ring deferred")  # See benchmarks/ring_steps.py.
STEPS = ("alone", *LINK_STEPS, "ring", "xla", "xla bfloat16", "torch ddp 4 MB", "torch ddp 25 MB")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--processes", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--prefix", default="", help="command that starts a process elsewhere; {number} is its number from 1")
    parser.add_argument("--address", default="127.0.0.1", help="address of a process; {number} is its number from 1")
    parser.add_argument("--port", type=int, default=23450, help="first of the ports to use (default: 23450)")
    parser.add_argument("--rate-gbit", type=float, help="rate of the links, for the least possible time beside the measured one")
    parser.add_argument("--sizes-kb", nargs="*", type=int, default=[1, 16, 256, 4096, 28000, 65536, 262144], help="sizes of sums")
    parser.add_argument("--sums", nargs="*", choices=SUMS, default=SUMS, help="contenders of the sums (default: all)")
    parser.add_argument("--steps", nargs="*", choices=STEPS, default=STEPS, help="contenders of the steps (default: all)")
    parser.add_argument("--batch-size", type=int, default=256, help="rows of a process in a step (default: 256)")
    parser.add_argument("--rounds", type=int, default=9, help="measured rounds (default: 9)")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process (default: 1)")
    parser.add_argument("--output", help="JSON file for the results")
    parser.add_argument("--worker", nargs=2, metavar=("WHAT", "PROCESS"), help=argparse.SUPPRESS)
    return parser.parse_args()


def address_of(args: argparse.Namespace, process: int, port: int) -> tuple[str, int]:
    return args.address.format(number=process + 1), args.port + port


def link_bytes(processes: int) -> int:
    """Returns the bytes that a process must send so that all have the sum of the gradients."""
    return 2 * (processes - 1) * LAYERS * WIDTH**2 * 4 // processes


# ---- Contenders: each returns what runs one round, and is built on every process.


def join_jax(args: argparse.Namespace, process: int) -> Any:
    import jax

    jax.config.update("jax_platforms", "cpu")
    host, port = address_of(args, 0, 0)
    jax.distributed.initialize(f"{host}:{port}", args.processes, process)
    return jax


def connect(args: argparse.Namespace, process: int) -> tuple[socket.socket, socket.socket]:
    from tnt_jax.ring_connection import Door, connect_neighbours

    listener = socket.create_server(("0.0.0.0", args.port + 1 + process))
    doors = [Door(*address_of(args, other, 1 + other), secret="") for other in range(args.processes)]
    return connect_neighbours(process, doors, listener=listener, timeout_s=300)


def join_torch(args: argparse.Namespace, process: int) -> Any:
    import torch

    torch.set_num_threads(args.threads)
    host, port = address_of(args, 0, 0)
    torch.distributed.init_process_group("gloo", f"tcp://{host}:{port}", rank=process, world_size=args.processes)
    return torch


def sum_xla(args: argparse.Namespace, process: int) -> Callable[[int], Callable[[], Any]]:
    jax = join_jax(args, process)
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from tnt_jax import _jax

    mesh = _jax.make_data_mesh(jax.devices())
    total = jax.jit(_jax.shard_map(lambda x: jax.lax.psum(x[0], "data"), mesh=mesh, in_specs=P("data"), out_specs=P()))

    def prepare(size: int) -> Callable[[], Any]:
        import numpy as np

        rows = jax.make_array_from_process_local_data(NamedSharding(mesh, P("data")), np.ones((1, size), np.float32))
        return lambda: jax.block_until_ready(total(rows))

    return prepare


def sum_ring(args: argparse.Namespace, process: int) -> Callable[[int], Callable[[], Any]]:
    import numpy as np

    from tnt_jax.ring import Ring

    ring = Ring(process, args.processes, *connect(args, process))

    def prepare(size: int) -> Callable[[], Any]:
        array = np.ones(size, np.float32)
        return lambda: ring.wait(ring.start([array]))

    return prepare


def sum_torch(args: argparse.Namespace, process: int) -> Callable[[int], Callable[[], Any]]:
    torch = join_torch(args, process)

    def prepare(size: int) -> Callable[[], Any]:
        array = torch.ones(size)
        return lambda: torch.distributed.all_reduce(array)

    return prepare


def step_jax(args: argparse.Namespace, process: int, exchange: str, leaving: contextlib.ExitStack) -> Callable[[], Any]:
    jax = join_jax(args, process)
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec as P

    from tnt_jax import _jax
    from tnt_jax.backward_order import trace_grads
    from tnt_jax.reduction import Reduction, default_reduction, sum_compressed, sum_over_ranks

    rng = np.random.default_rng(0)
    params = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) * 0.03 for _ in range(LAYERS)]
    rows = np.ones((args.batch_size, WIDTH), np.float32)

    def loss(params: Any, x: Any) -> Any:
        for kernel in params:
            x = jnp.tanh(x @ kernel)
        return jnp.mean(x**2)

    def update(params: Any, grads: Any) -> Any:
        return [param - 0.01 * grad for param, grad in zip(params, grads, strict=True)]

    if exchange in ("alone", *LINK_STEPS):
        return step_without_xla(args, process, exchange, loss, params, rows, leaving)
    mesh = _jax.make_data_mesh(jax.devices())

    def local_step(params: Any, rest: Any, x: Any) -> tuple[Any, Any]:
        varying = _jax.make_varying(params)
        _, grads, order = trace_grads(lambda params: jax.value_and_grad(loss)(params, x), varying)
        if exchange in ("xla", "ring"):
            reduction = Reduction() if exchange == "xla" else default_reduction("cpu", args.processes, args.processes)
            return update(params, sum_over_ranks(grads, reduction, order=order)), rest
        own = [leaf[0] for leaf in rest]
        grads, own = sum_compressed(grads, own, Reduction(0, compression="bfloat16"), order=order)
        return update(params, grads), [leaf[None] for leaf in own]

    specs = (P(), P("data"), P("data"))
    step = jax.jit(_jax.shard_map(local_step, mesh=mesh, in_specs=specs, out_specs=(P(), P("data"))))
    rest = [np.zeros((args.processes, WIDTH, WIDTH), np.float32) for _ in params]
    everybody = np.ones((args.processes * args.batch_size, WIDTH), np.float32)
    state = (_jax.replicate(params, mesh), *_jax.shard_rows((rest, everybody), mesh))
    return repeat(jax, step, state)


def repeat(jax: Any, step: Callable[[Any, Any, Any], Any], state: Any) -> Callable[[], None]:
    """Returns what runs a step on what the one before returned."""
    held = [state]

    def run() -> None:
        params, rest, x = held[0]
        params, rest = jax.block_until_ready(step(params, rest, x))
        held[0] = (params, rest, x)

    return run


def step_without_xla(
    args: argparse.Namespace, process: int, exchange: str, loss: Any, params: Any, rows: Any, leaving: contextlib.ExitStack
) -> Callable[[], Any]:
    """Returns a step whose bytes, if any, do not travel by XLA."""
    import ring_steps

    from tnt_jax.ring import Ring

    if exchange == "alone":
        return step_with_callbacks(exchange, loss, params, rows)
    sockets = connect(args, process)
    if not exchange.startswith("ring"):
        link = ring_steps.Link(*sockets, link_bytes(args.processes))
        run = step_with_callbacks(exchange, loss, params, rows, link=link)
        return ring_steps.beside(run if exchange != "link" else None, link, starts=exchange != "from first gradient")
    ring = Ring(process, args.processes, *sockets)
    leaving.callback(ring.close)  # Sums may still be on their way.
    return step_with_callbacks(exchange, loss, params, rows, ring=ring)


def step_with_callbacks(
    exchange: str, loss: Any, params: Any, x: Any, *, ring: Any = None, link: Any = None
) -> Callable[[], Any]:
    """Returns a step of one process alone, which does what `exchange` says in callbacks."""
    import jax
    import ring_steps

    tickets: list[Any] = [None] * LAYERS

    @jax.jit
    def step(params: Any, rest: Any, x: Any) -> tuple[Any, Any]:
        return ring_steps.step(exchange, loss, params, x, ring=ring, link=link, tickets=tickets)

    return repeat(jax, step, (jax.device_put(params), None, jax.device_put(x)))


def step_torch(args: argparse.Namespace, process: int, bucket_mb: int) -> Callable[[], Any]:
    torch = join_torch(args, process)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    model = torch.nn.parallel.DistributedDataParallel(Net(), bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.ones(args.batch_size, WIDTH)

    def run() -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()

    return run


def work(args: argparse.Namespace, what: str, process: int) -> None:
    """Measures one contender on one process; process 0 prints seconds as JSON."""
    kind, _, name = what.partition(":")
    with contextlib.ExitStack() as leaving:
        if kind == "sum":
            prepare = {"xla": sum_xla, "ring": sum_ring, "torch": sum_torch}[name](args, process)
            results = {size: measure(prepare(size * 256), args.rounds) for size in args.sizes_kb}
        else:
            is_torch = name.startswith("torch")
            run = step_torch(args, process, int(name.split()[2])) if is_torch else step_jax(args, process, name, leaving)
            results = measure(run, args.rounds)
    if process == 0:
        print("RESULT " + json.dumps(results), flush=True)
    # Leaving in order takes seconds and measures nothing.
    sys.stdout.flush()
    time.sleep(1 if process == 0 else 0.5)
    os._exit(0)


def measure(run: Callable[[], Any], rounds: int) -> list[float]:
    times = []
    for round_ in range(rounds + 3):
        start = time.perf_counter()
        run()
        if round_ >= 3:
            times.append(time.perf_counter() - start)
    return times


def start_processes(args: argparse.Namespace, what: str) -> Any:
    """Returns what process 0 measured of a contender."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "PJRT_NPROC": str(max(2, args.threads))}
    own = [sys.executable, os.path.abspath(__file__), *sys.argv[1:]]
    commands = [
        [*shlex.split(args.prefix.format(number=process + 1)), *own, "--worker", what, str(process)]
        for process in range(args.processes)
    ]
    running = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for command in commands]
    outputs = [process.communicate(timeout=600)[0] for process in running]
    found = [line for line in outputs[0].splitlines() if line.startswith("RESULT ")]
    if not found:
        raise RuntimeError(f"{what} measured nothing; its messages stand above.")
    return json.loads(found[0].removeprefix("RESULT "))


def report(args: argparse.Namespace, results: dict[str, Any]) -> None:
    print(f"{args.processes} processes, load {os.getloadavg()[0]:.1f}, medians of {args.rounds} rounds")
    sums = {what: times for what, times in results.items() if what.startswith("sum:")}
    if sums:
        print(f"{'size kB':>9}" + "".join(f"{what.removeprefix('sum:'):>22}" for what in sums))
        for size in args.sizes_kb:
            medians = [statistics.median(times[str(size)]) for times in sums.values()]
            print(f"{size:9}" + "".join(f"{t * 1e3:10.2f} ms {size / 1024**2 / t:6.2f}GB/s" for t in medians))
    steps = {what: times for what, times in results.items() if what.startswith("step:")}
    if steps:
        print(f"{'step':22} {'median ms':>10} {'min':>8} {'max':>8}")
    for what, times in steps.items():
        milliseconds = [t * 1e3 for t in times]
        name = what.removeprefix("step:")
        print(f"{name:22} {statistics.median(milliseconds):10.1f} {min(milliseconds):8.1f} {max(milliseconds):8.1f}")
    if args.rate_gbit:
        print(f"link alone, {args.rate_gbit:g} Gbit/s: {link_bytes(args.processes) * 8 / args.rate_gbit / 1e6:.1f} ms a step")


def main() -> None:
    args = parse_arguments()
    if args.worker:
        work(args, args.worker[0], int(args.worker[1]))
    results = {}
    for what in [*(f"sum:{name}" for name in args.sums), *(f"step:{name}" for name in args.steps)]:
        results[what] = start_processes(args, what)
    report(args, results)
    if args.output:
        about = {"arguments": vars(args), "python": platform.python_version(), "cpus": os.cpu_count(), "load": os.getloadavg()}
        Path(args.output).write_text(json.dumps({**about, "seconds": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
