"""Every process checks groups, rows, objects, joins and hostile calls against NumPy; it knows what
the others pass.
"""

import threading
import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tnt_jax as tnt

OPS = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max, "prod": np.prod}
DTYPES = ["bool", "int8", "uint64", "float16", "float64", "complex64", "bfloat16"]
EXACT = [*DTYPES, "U5", "S3", "M8[s]", "m8[us]", ">i4", "float128", "V7"]
SHAPES = [(), (0,), (3, 5), (0, 2), (400, 7)]

process, num_processes = tnt.get_process_index(), tnt.get_process_count()
last = num_processes - 1
groups = [
    tuple(range(num_processes)), tuple(range(0, num_processes, 2)),
    tuple(range(1, num_processes, 2)), tuple(sorted({0, last})), (last,),
]  # fmt: skip


def values(dtype, shape, of, seed=0):
    """Returns what process `of` passes."""
    rng = np.random.default_rng((seed, of, len(shape), len(dtype)))
    small = rng.integers(0 if "u" in dtype or dtype in ("bool", "V7") else -3, 4, shape)
    if dtype in ("U5", "S3"):
        return np.asarray(small).astype(dtype)
    if dtype == "V7":
        return np.frombuffer(rng.bytes(7 * int(np.prod(shape))), "V7").reshape(shape)
    return np.asarray(small).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


def same(found, expected, name):
    assert isinstance(found, np.ndarray), name
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), (name, found, expected)
    if found.dtype == np.longdouble:  # Of its 16 bytes 10 count.
        np.testing.assert_array_equal(found, expected, err_msg=str(name))
    else:
        assert found.tobytes() == expected.tobytes(), (name, found, expected)


def refused(function, *args, error, text, **kwargs):
    start = time.monotonic()
    with pytest.raises(error) as raised:
        function(*args, **kwargs)
    assert all(part in str(raised.value) for part in text), raised.value
    assert time.monotonic() - start < 10


def check_groups():
    for number, members in enumerate(groups):
        if process not in members:
            continue
        group, stacked, own = tnt.ProcessSet(members), {}, {}
        for dtype in EXACT:
            for shape in SHAPES:
                rows = {of: values(dtype, shape, of, number) for of in members}
                stacked[f"{dtype}{shape}"] = np.stack(list(rows.values())).astype(
                    rows[process].dtype
                )
                own[f"{dtype}{shape}"] = rows[process]
        for name, found in tnt.all_gather(own, process_set=group).items():
            same(found, stacked[name], name)
        for root in (members[0], members[-1]):
            for name, found in tnt.broadcast(own, root=root, process_set=group).items():
                same(found, stacked[name][members.index(root), ...], name)
        numbers = {name: rows for name, rows in own.items() if any(map(name.startswith, DTYPES))}
        for op, function in OPS.items():
            for name, found in tnt.all_reduce(numbers, op, process_set=group).items():
                half = "float16" in name and op not in ("min", "max")
                rows = stacked[name].astype("f8") if half else stacked[name]
                expected = np.asarray(function(rows, axis=0))
                same(found, expected.astype(stacked[name].dtype) if half else expected, (op, name))
        assert tnt.all_gather_object({process}, process_set=group) == [{of} for of in members]
        assert (
            tnt.broadcast_object(process, root_rank=members[-1], process_set=group) == members[-1]
        )


def random_tree(rng, depth=0):
    """Returns a pytree of arrays of random kinds and shapes, the same on every process."""
    kind = rng.integers(0, 4 if depth < 3 else 1)
    if kind == 1:
        return [random_tree(rng, depth + 1) for _ in range(rng.integers(0, 4))]
    if kind == 2:
        return {f"k{i}": random_tree(rng, depth + 1) for i in range(rng.integers(0, 4))}
    if kind == 3:
        return (None, random_tree(rng, depth + 1))
    dtype = DTYPES[rng.integers(0, len(DTYPES))]
    shape = tuple(int(n) for n in rng.integers(0, 5, rng.integers(0, 4)))
    return (dtype, shape, int(rng.integers(2**30)))


def is_kind(node):
    return isinstance(node, tuple) and len(node) == 3


def check_random_trees(num_trees):
    for seed in range(num_trees):
        kinds = random_tree(np.random.default_rng(seed))
        trees = [
            jax.tree.map(lambda kind, of=of: values(*kind[:2], of, kind[2]), kinds, is_leaf=is_kind)
            for of in range(num_processes)
        ]
        if seed % 2:
            found = tnt.all_gather(trees[process])
            expected = jax.tree.map(lambda *rows: np.stack(rows), *trees)
        else:
            found = tnt.all_reduce(trees[process], "max")
            expected = jax.tree.map(lambda *rows: np.max(np.stack(rows), axis=0), *trees)
        assert jax.tree.structure(found) == jax.tree.structure(expected), seed
        jax.tree.map(lambda a, b, seed=seed: same(a, b, seed), found, expected)


def check_rows():
    for large in (False, True):
        width = 900 if large else 2
        parts = [
            {"x": np.full((of, width), of, np.int16), "s": np.array(["ab"] * of + ["cd"])}
            for of in range(num_processes)
        ]
        found = tnt.all_gather_rows(parts[process])
        for name in ("x", "s"):
            same(found[name], np.concatenate([part[name] for part in parts]), name)
        for splits in (None, [1 + (of + 1) % num_processes for of in range(num_processes)]):
            given = [2] * num_processes if splits is None else splits
            rows = [
                np.arange(sum(given) * width, dtype=np.int64).reshape(-1, width) + 10**6 * of
                for of in range(num_processes)
            ]
            begin = sum(given[:process])
            expected = np.concatenate([row[begin : begin + given[process]] for row in rows])
            same(tnt.all_to_all(rows[process], splits), expected, splits)
            counts = tnt.all_to_all(np.asarray(given))
            same(counts, np.full(num_processes, given[process]), "counts")
        base = np.arange(7 * width).reshape(7, width) % 97
        stacked = np.stack([base**of for of in range(num_processes)])
        for op, function in OPS.items():
            expected = np.array_split(function(stacked, axis=0), num_processes)[process]
            same(tnt.reduce_scatter(stacked[process], op), expected, op)
    same(tnt.all_to_all(np.zeros((num_processes, 0))), np.zeros((num_processes, 0)), "empty")
    assert tnt.all_gather_rows({}) == {}


def check_large():
    large = np.full(25 * 2**20, process + 1, np.float32)  # 100 MiB.
    assert (tnt.all_reduce(large) == sum(range(1, num_processes + 1))).all()
    assert (tnt.broadcast(large, root=last)[:: 2**20] == num_processes).all()


def check_objects():
    assert tnt.all_gather_object("x" * 5000 * process) == [
        "x" * 5000 * of for of in range(num_processes)
    ]
    assert tnt.broadcast_object(b"" if process == last else None, root_rank=last) == b""
    state = TrainState.create(
        apply_fn=lambda x: x, params={"w": jnp.full(3, process, jnp.bfloat16)}, tx=optax.adam(0.1)
    )
    given = {
        "state": state, "key": jax.random.key(process), "int": process, "float": 0.5 + process,
        "flag": process == last, "numpy": np.int8(process), "array": np.arange(2) + process,
    }  # fmt: skip
    found = tnt.broadcast_state(given, root_rank=last)
    for name, value in found.items():
        assert type(value) is type(given[name]), name
    assert (found["int"], found["float"], found["flag"], found["numpy"]) == (
        last, last + 0.5, True, last,
    )  # fmt: skip
    assert found["state"].params["w"].tolist() == [last] * 3
    assert found["state"].params["w"].dtype == jnp.bfloat16
    assert found["state"].params["w"].sharding == state.params["w"].sharding
    assert jax.random.key_data(found["key"]).tolist() == [0, last]


def check_barriers():
    from tnt_jax import _jax

    client = _jax.coordination_client()
    for number, members in enumerate(groups):
        group = tnt.ProcessSet(members)
        if process not in members:
            text = [f"Process {process} is no member of the process set"]
            refused(tnt.barrier, error=ValueError, text=text, process_set=group)
            continue
        if process == members[-1]:
            time.sleep(0.2)
        client.key_value_set(f"test/came/{number}/{process}", "")
        tnt.barrier(process_set=group)
        came = client.key_value_dir_get(f"test/came/{number}")
        assert {int(key.rsplit("/", 1)[1]) for key, _ in came} == set(members)
    if num_processes > 2 and process == 0:
        alone = tnt.ProcessSet([0, last])
        text = [f"waited 0.1 s in barrier for process(es) {last} of 2"]
        refused(tnt.barrier, error=RuntimeError, text=text, timeout_s=0.1, process_set=alone)


def check_join():
    # Process p has p + 1 batches, small and large ones.
    for index in range(process + 1):
        there = range(index, num_processes)
        mean = tnt.all_reduce(np.float64(10 * process + index), "mean")
        assert mean == np.mean([10 * of + index for of in there])
        total = tnt.all_reduce(np.full(3000, process))
        assert (total == sum(there)).all()
        assert tnt.all_gather_rows(np.full(process, process)).tolist() == [
            of for of in there for _ in range(of)
        ]
    assert tnt.join() == last
    assert tnt.all_reduce(1) == num_processes
    if num_processes > 1:
        text = ["Process(es) 0 have called join", "barrier", "needs all of them"]
        refused(tnt.barrier if process else tnt.join, error=RuntimeError, text=text)


class Local:
    """A class whose pickle cannot be read on one process."""

    def __reduce__(self):
        return (_fail_on, (last,))


def _fail_on(where):
    if process == where:
        raise ModuleNotFoundError("no such module here")
    return "read"


def average_step(group=None):
    """Returns parameters after a step of the ranks of a group, whose rows hold their rank."""
    mesh = tnt.init().mesh if group is None else group.mesh()
    optimizer = tnt.distributed_gradients(optax.sgd(1.0), process_set=group)

    def step(params, x):
        own = jax.lax.pcast(params, "data", to="varying")
        grads = jax.grad(lambda p: jnp.mean(x @ p["w"]))(own)
        return optax.apply_updates(params, optimizer.update(grads, optimizer.init(params))[0])

    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    x = jax.make_array_from_callback(
        (2 * mesh.size, 3), NamedSharding(mesh, P("data")),
        lambda index: np.full((2, 3), tnt.get_rank(), np.float32),
    )  # fmt: skip
    return np.asarray(jax.jit(mapped)({"w": np.zeros(3, np.float32)}, x)["w"].addressable_data(0))


def check_gradients():
    np.testing.assert_allclose(average_step(), np.full(3, -(num_processes - 1) / 2), rtol=1e-6)
    if num_processes == 1:
        return
    half = num_processes // 2
    groups = [tnt.ProcessSet(range(half)), tnt.ProcessSet(range(half, num_processes))]
    (own,) = (group for group in groups if group.is_member)
    np.testing.assert_allclose(average_step(own), np.full(3, -np.mean(own.ranks)), rtol=1e-6)
    optimizer = tnt.distributed_gradients(optax.sgd(1.0))

    @jax.jit
    def step(grads):
        return optimizer.update(grads, optimizer.init(grads))[0]

    text = ["not mapped here", "nothing tells", "of all processes"]
    refused(step, jnp.ones(3), error=ValueError, text=text)
    refused(lambda: optimizer.update(jnp.ones(3), ()), error=ValueError, text=text)
    whole = jax.device_put(np.ones(3, np.float32), NamedSharding(tnt.init().mesh, P()))
    assert np.asarray(step(whole)).tolist() == [-1] * 3


def check_errors():
    is_last = process == last
    others = tnt.ProcessSet([rank for rank in range(num_processes + 1) if rank != process])
    refused(tnt.all_reduce, 1, process_set=others, error=ValueError, text=["The job has ranks"])
    for ranks in ([], [0, 0], [-1]):
        refused(tnt.ProcessSet, ranks, error=ValueError, text=["distinct ranks"])
    refused(tnt.broadcast_object, 1, root_rank=9, error=ValueError, text=["root_rank", "is 9"])
    refused(jax.jit(tnt.all_reduce), 1.0, error=TypeError, text=["the value is traced", "psum"])
    refused(tnt.all_gather_rows, {"a": 3}, error=ValueError, text=["['a']", "without a dimension"])
    unpicklable = (lambda: 1) if is_last else 1
    refused(tnt.all_gather_object, unpicklable, error=Exception, text=["lambda"])
    refused(tnt.broadcast_object, Local(), error=Exception, text=["no such module here"])
    if num_processes == 1:
        return
    outside = tnt.ProcessSet([(process + 1) % num_processes])
    refused(
        tnt.all_reduce, 1, process_set=outside, error=ValueError,
        text=[f"Process {process} is no member", "if process_set.is_member"],
    )  # fmt: skip
    refused(
        tnt.all_gather_rows, [np.zeros((2, 3 + is_last))], error=ValueError,
        text=["[0] is float64[rows, 3] on process 0", f"[0] is float64[rows, 4] on process {last}"],
    )  # fmt: skip
    refused(
        tnt.all_to_all, np.zeros(num_processes + is_last), error=(ValueError, RuntimeError),
        text=[f"the value has {num_processes + 1}", "splits="],
    )  # fmt: skip
    refused(
        tnt.all_to_all, np.zeros(2), [2] * num_processes, error=ValueError, text=["add up to the 2"]
    )
    refused(
        tnt.reduce_scatter, np.zeros(2 + is_last), error=ValueError,
        text=["float64[2] on process 0", f"float64[3] on process {last}"],
    )  # fmt: skip
    pair = tnt.ProcessSet([0, last])
    if process in pair.processes:
        refused(
            tnt.all_reduce, [np.zeros(2 + is_last)], process_set=pair, error=ValueError,
            text=["[0] is float64[2] on process 0", f"[0] is float64[3] on process {last}"],
        )  # fmt: skip
        refused(
            tnt.all_reduce if is_last else tnt.all_gather, 1, process_set=pair, error=RuntimeError,
            text=["different calls", f"process(es) {last}: all_reduce"],
        )  # fmt: skip


def check_differing_sets():
    if num_processes == 1:
        return
    # Each waits for the other among other processes.
    pair = tnt.ProcessSet(range(min(2, num_processes - 1)))
    for alone in pair.processes:
        if len(pair.processes) == 2:
            refused(
                tnt.all_reduce, 1, process_set=pair if process == alone else None,
                error=RuntimeError,
                text=["different calls", f"process(es) {alone}: all_reduce (op=sum) among"],
            )  # fmt: skip
    if process in pair.processes:
        assert tnt.all_reduce(1, process_set=pair) == pair.size


def check_threads():
    found = []
    thread = threading.Thread(target=lambda: found.append(tnt.all_reduce(process)))
    thread.start()
    thread.join()
    assert found == [sum(range(num_processes))]
    if num_processes == 1:
        return
    # While one thread waits for process 0, another is refused at once.
    if process == last:
        thread = threading.Thread(target=lambda: found.append(tnt.all_gather(process)))
        thread.start()
        while not tnt_calls():
            time.sleep(0.01)
        refused(tnt.all_reduce, 1, error=RuntimeError, text=["MainThread", "in one thread"])
        open_gate()
        thread.join()
    else:
        wait_for_gate()
        found.append(tnt.all_gather(process))
    assert found[1].tolist() == list(range(num_processes))


def tnt_calls():
    from tnt_jax.distributed.liveness.phases import here

    return here().calls


def open_gate():
    from tnt_jax import _jax

    _jax.coordination_client().key_value_set("test/gate", "open")


def wait_for_gate():
    from tnt_jax import _jax

    _jax.coordination_client().blocking_key_value_get("test/gate", 20_000)


check_groups()
check_random_trees(200)
check_rows()
if num_processes == 2:
    check_large()
check_objects()
check_join()
check_gradients()
check_errors()
check_differing_sets()
check_threads()
check_barriers()
tnt.barrier()
print("exact on", process, flush=True)
