"""Every process checks host collectives against NumPy, for a table of dtypes, operations and
shapes; it knows what the others pass.
"""

import time
import warnings

import jax
import ml_dtypes
import numpy as np
import pytest

import tnt_jax as tnt

OPS = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max, "prod": np.prod}
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float16", "float32", "float64", "bfloat16", "complex64", "complex128"]
HALVES = ["float16", "bfloat16"]
DTYPES = ["bool", *INTEGERS, *FLOATS]
SHAPES = [(), (0,), (1,), (3, 5), (2, 0, 3), (300, 7)]
CLOSE = {"float32": 1e-6, "complex64": 1e-6, "float64": 1e-14, "complex128": 1e-14}

process, num_processes = tnt.get_process_index(), tnt.get_process_count()


def values(dtype, shape, of):
    """Returns what process `of` passes: among other numbers the largest of the dtype, but for
    products of 64 bits.
    """
    rng = np.random.default_rng((of, len(shape), DTYPES.index(dtype)))
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if dtype in INTEGERS:
        limits = np.iinfo(dtype)
        # Sums and products of as many as there are processes fit into 64 bits.
        small = int(min(limits.max, 2**60 // 3, 2**20 if "64" in dtype or "32" in dtype else 2**16))
        return rng.integers(max(limits.min, -small), small, shape, dtype=dtype, endpoint=True)
    real = rng.normal(size=shape)
    value = real + 1j * rng.normal(size=shape) if "complex" in dtype else real
    return np.asarray(value).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def same(found, expected, name):
    assert isinstance(found, np.ndarray), name
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), (
        name,
        found.dtype,
        expected.dtype,
        found.shape,
    )
    assert found.tobytes() == expected.tobytes(), (name, found, expected)


def check(dtype, shape, op, found):
    stacked = np.stack([values(dtype, shape, of) for of in range(num_processes)])
    half = dtype in HALVES and op not in ("min", "max")
    expected = np.asarray(OPS[op](stacked.astype("f8") if half else stacked, axis=0))
    expected = expected.astype(stacked.dtype) if half else expected
    if dtype in CLOSE and op != "min" and op != "max":
        assert found.dtype == expected.dtype, (dtype, op)
        np.testing.assert_allclose(found, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    else:
        same(found, expected, (dtype, op, shape))


def refused(function, *args, error, text):
    start = time.monotonic()
    with pytest.raises(error) as raised:
        function(*args)
    assert all(part in str(raised.value) for part in text), raised.value
    assert time.monotonic() - start < 10


tree = {dtype: {str(shape): values(dtype, shape, process) for shape in SHAPES} for dtype in DTYPES}
for op in OPS:
    # One by one, so that small values travel in both ways.
    found = {dtype: tnt.all_reduce(tree[dtype], op) for dtype in DTYPES}
    for dtype in DTYPES:
        for shape in SHAPES:
            check(dtype, shape, op, found[dtype][str(shape)])

exact = {
    **tree,
    "long": 5_000_000_000 + process, "text": np.array(["a", "bcdef"]),
    "day": np.datetime64("2024-01-01") + process,
    "order": np.arange(6, dtype=">i4").reshape(2, 3).T + process,
    "nan": np.array([np.nan, -0.0, np.inf]), "none": None,
    "number": 2.5, "jax": jax.numpy.arange(3) + process,
    "int4": np.arange(4).astype(ml_dtypes.int4),
}  # fmt: skip
for small in (False, True):
    # Only few bytes travel without a device.
    part = (
        {name: exact[name] for name in ("long", "text", "day", "order", "number")}
        if small
        else exact
    )
    gathered = jax.tree.leaves(tnt.all_gather(part))
    for root in range(num_processes):
        sent = jax.tree.leaves(tnt.broadcast(part, root=root))
        for index, own in enumerate(jax.tree.leaves(part)):
            if root == process:
                same(sent[index], np.asarray(own), index)
                same(np.asarray(gathered[index][root]), np.asarray(own), index)
            same(np.asarray(gathered[index][root]), sent[index], index)

assert tnt.all_reduce(np.uint8(200)) == 200 * num_processes
assert tnt.all_reduce(5_000_000_000) == 5_000_000_000 * num_processes
assert tnt.all_reduce(np.array(7, ml_dtypes.int4)) == 7 * num_processes
assert (
    tnt.all_reduce(np.full(3, 2**63 - 1 if process else -(2**62)))[0] == 2**63 - 1 - 2**62
    if num_processes == 2
    else True
)
large = np.arange(3_000_000, dtype=np.int64) + process
same(
    tnt.all_reduce({"a": large, "b": np.float32(1)})["a"],
    num_processes * np.arange(3_000_000) + sum(range(num_processes)),
    "large",
)
same(
    tnt.broadcast(large, root=num_processes - 1), np.arange(3_000_000) + num_processes - 1, "large"
)

last = num_processes - 1
is_last = process == last > 0
for function in (tnt.all_reduce, tnt.all_gather, tnt.broadcast):
    if num_processes > 1:
        ragged = {"a": 1, "b": [np.zeros(3, np.float32), np.zeros((2, 3 + is_last))]}
        refused(
            function,
            ragged,
            error=ValueError,
            text=["['b'][1]", "[2, 3] on process 0", f"[2, 4] on process {last}"],
        )
        refused(
            function,
            np.zeros(2, f"f{4 + 4 * is_last}"),
            error=ValueError,
            text=["float32[2]", "float64[2]", f"process {last}"],
        )
        refused(
            function,
            [1, 2, 3][: 2 + is_last],
            error=ValueError,
            text=["2 leaves", "3 leaves", f"process {last}"],
        )
    refused(
        function,
        object() if process == last else 3,
        error=(TypeError, RuntimeError),
        text=["object", "takes numbers and arrays"],
    )
refused(tnt.all_reduce, "text", error=TypeError, text=["<U4"])
refused(
    tnt.all_reduce,
    1,
    "median" if process == last else "sum",
    error=(ValueError, RuntimeError),
    text=[],
)
if num_processes > 1:
    refused(
        tnt.all_reduce,
        [np.full(2, 2**63 - 1)],
        error=OverflowError,
        text=["int64", "more than 64 bits"],
    )
    refused(
        tnt.all_reduce, [np.uint64(2**63)], "prod", error=OverflowError, text=["prod", "uint64"]
    )
    refused(
        tnt.all_reduce if is_last else tnt.all_gather,
        1,
        error=RuntimeError,
        text=["different calls", f"process(es) {last}: all_reduce"],
    )
    refused(
        tnt.all_reduce,
        1,
        "min" if is_last else "max",
        error=RuntimeError,
        text=["op=min", "op=max"],
    )
with warnings.catch_warnings():
    warnings.simplefilter("error")
    tnt.barrier()
    assert tnt.all_reduce(1) == num_processes
print("exact on", process, flush=True)
