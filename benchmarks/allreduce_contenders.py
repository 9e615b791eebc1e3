"""Contenders of `benchmarks/allreduce.py`: each returns what runs one round, and is built on every
process.
"""

import argparse
from collections.abc import Callable
from typing import Any

WIDTH, LAYERS = 936, 8  # 28 MB of float32 gradients.


def address_of(args: argparse.Namespace, process: int, port: int) -> tuple[str, int]:
    return args.address.format(number=process + 1), args.port + port


def link_bytes(processes: int) -> int:
    """Returns the bytes that a process must send so that all have the sum of the gradients."""
    return 2 * (processes - 1) * LAYERS * WIDTH**2 * 4 // processes


def join_jax(args: argparse.Namespace, process: int, exchange: str) -> Any:
    """Returns JAX, connected to the other processes unless the exchange is `alone`."""
    import jax

    from tnt_jax.distributed.shared_sums import joining

    jax.config.update("jax_platforms", "cpu")
    if exchange != "alone":
        host, port = address_of(args, 0, 0)
        jax.distributed.initialize(f"{host}:{port}", args.processes, process)
    if exchange == "shared memory":
        joining.join(jax.devices())
        assert joining.are_open(), "The processes do not share memory."
    return jax


def join_torch(args: argparse.Namespace, process: int) -> Any:
    import torch

    torch.set_num_threads(args.threads)
    host, port = address_of(args, 0, 0)
    torch.distributed.init_process_group(
        "gloo", f"tcp://{host}:{port}", rank=process, world_size=args.processes
    )
    return torch


def sum_jax(
    args: argparse.Namespace, process: int, exchange: str
) -> Callable[[int], Callable[[], Any]]:
    jax = join_jax(args, process, exchange)
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    from tnt_jax import _jax

    mesh = _jax.make_data_mesh(jax.devices())
    total = jax.jit(
        _jax.shard_map(
            lambda x: jax.lax.psum(x[0], "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
        )
    )

    def prepare(size: int) -> Callable[[], Any]:
        import numpy as np

        rows = jax.make_array_from_process_local_data(
            NamedSharding(mesh, P("data")), np.ones((1, size), np.float32)
        )
        return lambda: jax.block_until_ready(total(rows))

    return prepare


def sum_torch(args: argparse.Namespace, process: int) -> Callable[[int], Callable[[], Any]]:
    torch = join_torch(args, process)

    def prepare(size: int) -> Callable[[], Any]:
        array = torch.ones(size)
        return lambda: torch.distributed.all_reduce(array)

    return prepare


def step_jax(args: argparse.Namespace, process: int, exchange: str) -> Callable[[], Any]:
    jax = join_jax(args, process, exchange)
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import PartitionSpec as P

    from tnt_jax import _jax
    from tnt_jax.distributed.sums.reduction import (
        Reduction,
        default_reduction,
        sum_compressed,
        sum_over_ranks,
        trace_grads,
    )

    num_ranks = len(jax.devices())

    rng = np.random.default_rng(0)
    params = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) * 0.03 for _ in range(LAYERS)]

    def loss(params: Any, x: Any) -> Any:
        for kernel in params:
            x = jnp.tanh(x @ kernel)
        return jnp.mean(x**2)

    def update(params: Any, grads: Any) -> Any:
        return [param - 0.01 * grad for param, grad in zip(params, grads, strict=True)]

    mesh = _jax.make_data_mesh(jax.devices())

    def local_step(params: Any, rest: Any, x: Any) -> tuple[Any, Any]:
        varying = _jax.make_varying(params)
        _, grads, order = trace_grads(lambda params: jax.value_and_grad(loss)(params, x), varying)
        if exchange != "xla bfloat16":
            reduction = default_reduction("cpu", num_ranks)
            return update(params, sum_over_ranks(grads, reduction, order=order)), rest
        own = [leaf[0] for leaf in rest]
        grads, own = sum_compressed(grads, own, Reduction(0, compression="bfloat16"), order=order)
        return update(params, grads), [leaf[None] for leaf in own]

    specs = (P(), P("data"), P("data"))
    step = jax.jit(
        _jax.shard_map(local_step, mesh=mesh, in_specs=specs, out_specs=(P(), P("data")))
    )
    rest = [np.zeros((num_ranks, WIDTH, WIDTH), np.float32) for _ in params]
    everybody = np.ones((num_ranks * args.batch_size, WIDTH), np.float32)
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


def step_torch(args: argparse.Namespace, process: int, bucket_mb: int) -> Callable[[], Any]:
    torch = join_torch(args, process)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(
                torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)
            )

        def forward(self, x: Any) -> Any:
            for layer in self.layers:
                x = torch.tanh(layer(x))
            return x

    model = torch.nn.parallel.DistributedDataParallel(
        Net(), bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    x = torch.ones(args.batch_size, WIDTH)

    def run() -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()

    return run
