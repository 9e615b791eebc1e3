"""Sums over the ranks of a job, compared with NumPy's sum in the order of the ranks, bit for bit.

The words are the cases to run: `values`, `programs`, `many`, `part`, `random_order`, `slow`,
`differs KIND`, or `waits FILE`.
"""

import os
import re
import signal
import sys
import time
from functools import cache, reduce
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import tnt_jax as tnt
from tnt_jax.distributed.joining.runtime import init
from tnt_jax.distributed.shared_sums import joining

jax.config.update("jax_enable_x64", True)
if "TWO_HOSTS" in os.environ:
    # As if the processes ran on two machines.
    joining.machine_id = lambda namespace: "ABAA"[int(os.environ["TNT_PROCESS_ID"])]
MESH = init().mesh
RANKS = MESH.size
ROWS = PartitionSpec("data")
OTHER = jax.process_index() > 0


def mapped(function):
    return jax.jit(
        jax.shard_map(function, mesh=MESH, in_specs=ROWS, out_specs=ROWS, check_vma=False)
    )


def array(rows):
    """Returns an array `[ranks, ...]` on the devices, of which this process has its own rows."""
    return jax.make_array_from_callback(
        rows.shape, NamedSharding(MESH, ROWS), lambda index: rows[index]
    )


@cache
def numbers(size, seed):
    return np.random.default_rng([size, seed]).normal(size=(RANKS, size)) * 1000


def random(size, dtype, seed=0):
    return numbers(size, seed).astype(dtype)


def total(rows):
    return reduce(np.add, list(rows))


def check(found, expected, *, exact=True):
    for shard in found.addressable_shards:
        if exact:
            np.testing.assert_array_equal(np.asarray(shard.data)[0], expected)
        else:
            np.testing.assert_allclose(np.asarray(shard.data)[0], expected, rtol=1e-5, atol=1e-3)


def values():
    is_exact = "TWO_HOSTS" not in os.environ  # Otherwise hosts are added up in another order.
    sizes = [0, 1, 7, 2047, 70_001, 1_000_003]
    for dtype in (np.float32, np.float64, np.int32, np.int64, np.uint32):
        rows = [random(size, dtype) for size in sizes]
        program = mapped(lambda arrays: jax.lax.psum(arrays, "data"))
        arrays = [array(x) for x in rows]
        text = program.lower(arrays).compile().as_text()
        assert "tnt_jax_sum" in text, text
        for found, own in zip(program(arrays), rows, strict=True):
            check(found, total(own), exact=is_exact)
    rows = random(500, np.float32)

    def nested(x):
        def body(carry, _):
            return jax.lax.psum(carry, "data") / RANKS, None

        once = jax.jit(lambda x: jax.lax.psum(x, "data"))
        first = jax.lax.scan(body, x, None, length=5)[0]
        second = jax.lax.cond(x.size > 0, lambda x: jax.lax.psum(x, "data"), lambda x: x, x)
        grads = jax.grad(lambda x: jnp.sum(jax.lax.pmean(x, "data") ** 2))(x)
        return first, second, once(x), once(x + 1), grads, jax.lax.pmax(x, "data")

    first, second, third, fourth, grads, largest = mapped(nested)(array(rows))
    check(first, total(rows) / RANKS, exact=False)
    check(second, total(rows), exact=False)
    check(third, total(rows), exact=False)
    check(fourth, total(rows + np.float32(1)), exact=False)
    check(grads, 2 * total(rows) / RANKS, exact=False)
    check(largest, rows.max(axis=0))
    half = mapped(lambda x: jax.lax.psum(x.astype(jnp.bfloat16), "data").astype(jnp.float32))
    np.testing.assert_allclose(half(array(np.ones_like(rows))).addressable_data(0), RANKS)


def many():
    rows = [random(5 + number, np.float32, number) for number in range(150)]
    found = mapped(lambda arrays: jax.lax.psum(arrays, "data"))([array(x) for x in rows])
    for one, own in zip(found, rows, strict=True):
        check(one, total(own), exact="TWO_HOSTS" not in os.environ)


def part():
    """Sums over an axis of a mesh of two, which are left to XLA, beside one over both."""
    kinds = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((RANKS // 2, 2), ("a", "b"), axis_types=kinds, devices=MESH.devices.flat)
    program = jax.jit(
        jax.shard_map(
            lambda x: (jax.lax.psum(x, ("a", "b")), jax.lax.psum(x, "b")),
            mesh=mesh, in_specs=PartitionSpec(("a", "b")), out_specs=PartitionSpec(("a", "b")),
            check_vma=False,
        )
    )  # fmt: skip
    rows = random(300, np.float64)
    whole, pairs = program(array(rows))
    check(whole, total(rows))
    for shard in pairs.addressable_shards:
        first = shard.index[0].start // 2 * 2
        np.testing.assert_array_equal(np.asarray(shard.data)[0], total(rows[first : first + 2]))
    text = program.lower(array(rows)).compile().as_text()
    assert text.count('custom_call_target="tnt_jax_sum"') == 1
    assert len(re.findall(r"= \S+ all-reduce\(", text)) == 1, text


def programs():
    """Two programs in turns, whose sums have the same places in memory."""
    small = mapped(lambda x: jax.lax.psum(jnp.sin(jax.lax.psum(x, "data")), "data"))
    large = mapped(lambda x: jax.lax.psum(x, "data") + jax.lax.psum(x[:, ::-1], "data"))
    few, many = random(3, np.float64), random(50_000, np.float64, 1)
    x, y = array(few), array(many)
    for _ in range(500):
        found, other = small(x), large(y)
    check(found, RANKS * np.sin(total(few)), exact=False)
    check(other, total(many) + total(many[:, ::-1]), exact=False)


def random_order():
    """Thousands of sums of all sizes, up to eight programs ahead, on processes that dawdle."""
    choose, dawdle = np.random.default_rng(1), np.random.default_rng(jax.process_index())
    sizes = [0, 1, 7, 100, 2048, 2049, 5000, 65_535, 65_536, 65_537, 70_001, 200_000]
    made = []
    for number in range(8):
        chosen = choose.choice(sizes, size=choose.integers(1, 5))
        rows = [random(int(size), np.float32, number) for size in chosen]
        program = mapped(lambda arrays: jax.lax.psum(arrays, "data"))
        made.append((program, [array(x) for x in rows], [total(x) for x in rows]))
    ahead = []
    for _ in range(2000):
        program, arrays, expected = made[choose.integers(len(made))]
        if dawdle.random() < 0.02:
            time.sleep(0.02 * dawdle.random())
        ahead.append((program(arrays), expected))
        if len(ahead) > 8:
            for found, sums in zip(*ahead.pop(0), strict=True):
                check(found, sums)


def slow():
    program = mapped(lambda x: jax.lax.psum(x, "data"))
    rows = random(10, np.float32)
    for _ in range(3):
        if OTHER:
            time.sleep(0.7)
        check(program(array(rows)), total(rows), exact="TWO_HOSTS" not in os.environ)


def differs(kind):
    """Processes whose programs differ: an error on each instead of a hang or a wrong number, also
    for all later sums.
    """
    program = mapped(lambda x: jax.lax.psum(x, "data"))
    unlike = {"size": random(11, np.float32), "type": random(10, np.int32)}
    alike = random(10, np.float32)
    for rows in unlike[kind] if OTHER else alike, alike:
        try:
            jax.block_until_ready(program(array(rows)))
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            print("refused:", error, flush=True)
        else:
            raise AssertionError("What does not belong together was summed.")


def waits(file):
    """Sums until process 1 ends as the file says; the others tell their error, and after how long."""
    program = mapped(lambda x: jax.lax.psum(x, "data"))
    x = array(random(1000, np.float32))
    how = Path(file).read_text()
    for step in range(10**6):
        if step == 20:
            tnt.barrier()
        if step == 20 and jax.process_index() == 1:
            os.utime(file)
            if how == "stops":
                stop()
            elif how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            elif how == "exits":
                os._exit(3)
            elif how == "leaves":
                return
        if how == "stops" and step == 60:
            return
        try:
            jax.block_until_ready(program(x))
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            print(f"after {time.time() - os.stat(file).st_mtime:.1f} s: {error}", flush=True)
            raise


def stop():
    """Stops this process, which another one continues."""
    child = os.fork()
    if child == 0:
        time.sleep(1.5)
        os.kill(os.getppid(), signal.SIGCONT)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGSTOP)


def main():
    words = iter(sys.argv[1:])
    for word in words:
        globals()[word](*([next(words)] if word in ("waits", "differs") else []))
        print(f"{word} done by {'memory' if joining.are_open() else 'XLA'}", flush=True)
    tnt.shutdown()


main()
