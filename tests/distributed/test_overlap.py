import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from rings import make_rings

from tnt_jax import _jax
from tnt_jax._jax import host_call
from tnt_jax.distributed.cpu_ring.reducer import RingReducer, sum_in_background
from tnt_jax.distributed.hlo import read_collectives, read_planned

SHAPES = [(3, 5), (), (700,), (4, 2)]


def program(reducer, num_devices, *, rounds=1):
    """Returns a jitted function that sums buckets over virtual devices, and again, `rounds`
    times.
    """
    mesh = _jax.make_data_mesh(jax.devices()[:num_devices])

    def total(arrays):
        own = [x[0] for x in arrays]

        def step(own, _):
            (first, second), (third, last) = sum_in_background(
                reducer, [own[:2], own[2:]], after=[jnp.float32(1)]
            )
            return _jax.make_varying([first, second, third, last]), None

        summed, _ = jax.lax.scan(step, own, None, length=rounds)
        return [x[None] for x in summed]

    return jax.jit(_jax.shard_map(total, mesh=mesh, in_specs=P("data"), out_specs=P("data")))


@pytest.mark.parametrize(
    ("num_devices", "shapes"),
    [(1, [(3, 5), (0, 2), (700,), ()]), (2, SHAPES), (4, SHAPES)],
    ids=["one", "two", "four"],
)
def test_the_sum_of_a_program_is_that_of_its_ranks(num_devices, shapes):
    rng = np.random.default_rng(0)
    arrays = [rng.normal(size=(num_devices, *shape)).astype(np.float32) for shape in shapes]
    (ring,) = make_rings(1)
    total = program(RingReducer(ring, num_devices), num_devices)
    for _ in range(3):
        for found, own in zip(total(arrays), arrays, strict=True):
            for row in found:
                np.testing.assert_allclose(
                    row, own.astype(np.float64).sum(axis=0), rtol=1e-5, atol=1e-6
                )


def test_sums_repeat_within_a_program():
    (ring,) = make_rings(1)
    arrays = [np.ones((2, *shape), np.float32) for shape in SHAPES]
    for found in program(RingReducer(ring, 2), 2, rounds=5)(arrays):
        assert np.all(found == 2**5)


def test_the_error_of_a_lost_neighbour_reaches_the_program():
    first, second = make_rings(2)
    second.close()
    with pytest.raises(jax.errors.JaxRuntimeError, match="lost a neighbour"):
        jax.block_until_ready(
            program(RingReducer(first, 1), 1)(
                [np.ones((1, *shape), np.float32) for shape in SHAPES]
            )
        )
    first.close()


def test_the_sums_of_a_program_are_listed():
    (ring,) = make_rings(1)
    mesh = _jax.make_data_mesh(jax.devices()[:1])

    def total(first, second):
        ((one,), (other,)) = sum_in_background(
            RingReducer(ring, 1), [[first + 1], [second @ second]]
        )
        return one, other

    mapped = jax.jit(_jax.shard_map(total, mesh=mesh, in_specs=P("data"), out_specs=P()))
    lowered = mapped.lower(np.ones((3, 5), np.float32), np.ones((70, 70), np.float32))
    assert read_planned(lowered.as_text()) == [("ring-sum", 60), ("ring-sum", 19600)]
    compiled, _ = read_collectives(lowered.compile().as_text())
    assert [(x.kind, x.nbytes) for x in compiled] == [("ring-sum", 60), ("ring-sum", 19600)]


def test_calls_get_arrays_of_numpy_and_nothing_that_a_thread_of_jax_must_copy():
    kinds = []

    def call(*arrays):
        kinds.append([type(x) for x in arrays])
        return [arrays[0] + arrays[1]]

    @jax.jit
    def unused(x, y):
        host_call(call, [jax.ShapeDtypeStruct((3,), np.float32)], x, y)
        return x

    jax.block_until_ready(unused(jnp.ones(3), jnp.ones(3)))
    assert kinds == [[np.ndarray] * 2], "A call is made also if nobody uses what it returns."
