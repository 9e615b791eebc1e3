"""`distributed_gradients` in shard_map, pmap and jit: the gradients of the global batch, once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tnt_jax as tnt
from tnt_jax.distributed.sums import optax_gradients
from tnt_jax.distributed.sums.reduction import Reduction

RNG = np.random.default_rng(0)
NUM_RANKS = 4


def problem(dtype=np.float32):
    """Returns parameters of several sizes, and rows; the loss is a mean over rows."""
    params = {
        "first": RNG.normal(size=(3, 5)), "last": [RNG.normal(size=5), RNG.normal(size=())],
        "unused": np.zeros((0, 2)),
    }  # fmt: skip
    x = RNG.normal(size=(8, 3)).astype(np.float32)
    return jax.tree.map(lambda a: np.asarray(a, dtype), params), x


def loss_fn(params, x):
    hidden = jnp.tanh(x @ params["first"].astype(jnp.float32)) * params["last"][0]
    return jnp.mean((hidden.sum(-1) + params["last"][1]) ** 2)


gradient = jax.jit(jax.grad(loss_fn))


def gradients_by_rank(params, x):
    return [gradient(params, part) for part in np.split(x, NUM_RANKS)]


def mesh(num_ranks=NUM_RANKS, axis_name="data"):
    return Mesh(np.asarray(jax.devices()[:num_ranks]), (axis_name,))


def local_grads(params, x, axis_name="data", *, varying=True):
    if varying:
        params = jax.tree.map(lambda w: jax.lax.pcast(w, axis_name, to="varying"), params)
    return jax.grad(loss_fn)(params, x)


def in_shard_map(
    optimizer, params, x, *, check_vma, axis_name="data", num_ranks=NUM_RANKS, calls=1
):
    def step(params, state, x):
        grads = local_grads(params, x, axis_name, varying=check_vma)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    specs = tnt.state_specs(state, axis_name)
    mapped = jax.jit(
        jax.shard_map(
            step, mesh=mesh(num_ranks, axis_name), in_specs=(P(), specs, P(axis_name)),
            out_specs=(P(), specs), check_vma=check_vma,
        )
    )  # fmt: skip
    return after_each_call(mapped, params, state, x, calls)


def after_each_call(step, params, state, x, calls):
    found = []
    for _ in range(calls):
        params, state = step(params, state, x)
        found.append(params)
    return found


def in_pmap(optimizer, params, x, calls=1):
    def step(params, state, x):
        updates, state = optimizer.update(jax.grad(loss_fn)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    stack = lambda tree: jax.tree.map(lambda a: np.stack([a] * NUM_RANKS), tree)  # noqa: E731
    mapped = jax.pmap(step, axis_name="data", devices=jax.devices()[:NUM_RANKS])
    params, state = stack(params), stack(optimizer.init(params))
    x = x.reshape(NUM_RANKS, -1, *x.shape[1:])
    found = jax.device_get(after_each_call(mapped, params, state, x, calls))
    for leaf in jax.tree.leaves(found):
        np.testing.assert_array_equal(leaf, np.broadcast_to(leaf[:1], leaf.shape))
    return jax.tree.map(lambda a: a[0], found)


def in_jit(optimizer, params, x, calls=1):
    return on_one_device(
        optimizer, params, jax.device_put(x, NamedSharding(mesh(), P("data"))), calls
    )


def on_one_device(optimizer, params, x, calls):
    @jax.jit
    def step(params, state, x):
        updates, state = optimizer.update(jax.grad(loss_fn)(params, x), state, params)
        return optax.apply_updates(params, updates), state

    state = optimizer.init(params)
    return after_each_call(step, params, state, x, calls)


# They return the parameters after each call.
def checked(optimizer, params, x, **arguments):
    return in_shard_map(optimizer, params, x, check_vma=True, **arguments)


def unchecked(optimizer, params, x, **arguments):
    return in_shard_map(optimizer, params, x, check_vma=False, **arguments)


MAPPED = [checked, unchecked, in_pmap]
PLACES = [*MAPPED, in_jit]


def assert_close(found, expected, tolerance=1e-5):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance),
        found,
        expected,
    )


@pytest.mark.parametrize(
    ("place", "optimizer"),
    [*((place, optax.sgd(0.1, momentum=0.9)) for place in PLACES), (checked, optax.adam(0.1))],
)
def test_steps_are_those_of_one_device_with_the_whole_batch(place, optimizer):
    params, x = problem()
    expected = on_one_device(optimizer, params, x, calls=3)
    assert_close(place(tnt.distributed_gradients(optimizer), params, x, calls=3), expected)


@pytest.mark.parametrize("place", MAPPED)
@pytest.mark.parametrize(
    ("arguments", "tolerance"),
    [
        ({"op": "sum"}, 1e-5),
        ({"gradient_predivide_factor": 2.5}, 1e-5),
        ({"compression": "bfloat16"}, 2**-7),
    ],
)
def test_options_give_the_sum_or_the_average(place, arguments, tolerance):
    params, x = problem()
    parts = gradients_by_rank(params, x)
    divisor = 1 if arguments.get("op") == "sum" else NUM_RANKS
    expected = jax.tree.map(lambda w, *g: w - sum(g) / divisor, params, *parts)
    optimizer = tnt.distributed_gradients(optax.sgd(1.0), **arguments)
    assert_close(place(optimizer, params, x)[-1], expected, tolerance)


def numpy_adasum(vectors):
    """Adasum as Maleki et al. 2020 write it, in float64: in pairs, then pairs of pairs."""
    if len(vectors) == 1:
        return vectors[0]
    a, b = (
        numpy_adasum(half) for half in (vectors[: len(vectors) // 2], vectors[len(vectors) // 2 :])
    )
    dot = np.sum(a * b)
    share = lambda v: 1 - (dot / (2 * np.sum(v * v)) if np.any(v) else 0)  # noqa: E731
    return share(a) * a + share(b) * b


@pytest.mark.parametrize("place", MAPPED)
def test_adasum_is_that_of_the_paper(place):
    params, x = problem()
    parts = gradients_by_rank(params, x)
    expected = jax.tree.map(
        lambda w, *g: w - numpy_adasum([np.float64(part) for part in g]), params, *parts
    )
    optimizer = tnt.distributed_gradients(optax.sgd(1.0), op="adasum")
    assert_close(place(optimizer, params, x)[-1], expected)


@pytest.mark.parametrize(
    ("vectors", "expected"),
    [
        ([[2.0, 0], [0, 3]], [2, 3]),  # Orthogonal: the sum.
        ([[2.0, 4], [2, 4]], [2, 4]),  # Equal: the mean.
        ([[1.0, 0], [3, 0]], [2, 0]),  # Parallel: (1 - 3/2) + (1 - 3/18) * 3.
        ([[0.0, 0], [3, 1]], [3, 1]),  # Nothing from one rank.
        ([[1.0, 0], [-1, 0]], [0, 0]),  # Opposite: 3/2 - 3/2.
    ],
)
def test_adasum_of_two_ranks(vectors, expected):
    optimizer = tnt.distributed_gradients(optax.sgd(-1.0), op="adasum")

    def step(grads):
        return optimizer.update(grads[0], optimizer.init(grads[0]))[0]

    mapped = jax.jit(jax.shard_map(step, mesh=mesh(2), in_specs=P("data"), out_specs=P()))
    np.testing.assert_allclose(mapped(np.float32(vectors)), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("place", "op"),
    [*((place, "average") for place in PLACES), (checked, "sum"), (checked, "adasum")],
)
def test_several_passes_make_one_update(place, op):
    params, x = problem()
    sgd = optax.sgd(0.3, momentum=0.9)
    several = tnt.distributed_gradients(sgd, op=op, backward_passes_per_step=3)
    # Between updates parameters stay, so that three passes see the same gradients.
    found = place(several, params, x, calls=6)
    assert_close(found[:2], [params] * 2, 0)
    if op == "adasum":
        expected = place(tnt.distributed_gradients(sgd, op=op), params, x, calls=2)
    else:
        scale = 3 * NUM_RANKS if op == "sum" else 1
        expected = on_one_device(optax.chain(optax.scale(scale), sgd), params, x, calls=2)
    assert_close(found[2::3], expected)


@pytest.mark.parametrize(
    ("place", "op", "passes"),
    [(checked, "average", 1), (checked, "adasum", 2), (unchecked, "average", 2), (unchecked, "adasum", 1)],
)  # fmt: skip
def test_one_rank_keeps_its_gradients(place, op, passes):
    params, x = problem()
    optimizer = tnt.distributed_gradients(
        optax.sgd(1.0), op=op, axis_name="batch", backward_passes_per_step=passes
    )
    found = place(optimizer, params, x, axis_name="batch", num_ranks=1, calls=passes)
    expected = jax.tree.map(lambda w, g: w - g, params, gradient(params, x))
    assert_close(found[-1], expected)


def sum_twice(reduce, *, check_vma=None):
    """Runs a step whose gradients are reduced before they come to the optimizer."""
    params, x = problem()
    optimizer = tnt.distributed_gradients(optax.sgd(1.0), op="sum")

    def step(params, x):
        grads = reduce(params, x)
        return optimizer.update(grads, optimizer.init(params))[0]

    if check_vma is None:
        devices = jax.devices()[:NUM_RANKS]
        mapped = jax.pmap(step, axis_name="data", in_axes=(None, 0), devices=devices)
        return mapped(params, x.reshape(NUM_RANKS, -1, 3))
    mapped = jax.shard_map(
        step, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma
    )
    return jax.jit(mapped)(params, x)


@pytest.mark.parametrize("check_vma", [True, False, None])
@pytest.mark.parametrize("reduce", [jax.lax.psum, jax.lax.pmean])
def test_gradients_that_were_reduced_before_are_refused(reduce, check_vma):
    with pytest.raises(ValueError, match=r"\['first'\].*reduced twice.*pcast"):
        sum_twice(
            lambda params, x: reduce(local_grads(params, x, varying=check_vma is True), "data"),
            check_vma=check_vma,
        )


def test_gradients_that_shard_map_has_summed_are_refused():
    with pytest.raises(ValueError, match=r"reduced twice.*shard_map, which sums gradients of rep"):
        sum_twice(jax.grad(loss_fn), check_vma=True)


def test_sums_of_the_forward_pass_are_no_reduction_of_gradients():
    # Statistics of the global batch, as of synchronised BatchNorm, lie behind these gradients.
    def grads(params, x):
        def loss(params):
            shifted = x - jax.lax.pmean(jnp.mean(x), "data")
            return loss_fn(params, shifted) / jax.lax.psum(1.0, "data")

        return jax.grad(loss)(params)

    updates = jax.tree.leaves(sum_twice(grads, check_vma=False))
    assert all(np.isfinite(x).all() for x in updates)
    assert any(np.any(x != 0) for x in updates)


@pytest.mark.parametrize(
    "arguments",
    [
        {"op": "sum"},
        {"op": "adasum"},
        {"compression": "bfloat16"},
        {"gradient_predivide_factor": 2.0},
        {"process_set": tnt.ProcessSet([0])},
    ],
)
def test_what_needs_single_ranks_is_refused_for_global_gradients(arguments):
    with pytest.raises(ValueError, match=r"not mapped here.*cannot be applied.*shard_map"):
        in_jit(tnt.distributed_gradients(optax.sgd(1.0), **arguments), *problem())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"op": "mean"}, "op must be one of average, sum, adasum, but is 'mean'"),
        ({"compression": "float16"}, "'bfloat16' or None"),
        ({"compression": "bfloat16", "op": "adasum"}, "works on sums"),
        ({"backward_passes_per_step": 0}, "at least 1, but is 0"),
        ({"gradient_predivide_factor": 2.0, "op": "sum"}, "divides an average"),
        ({"gradient_predivide_factor": 0.0}, "must be positive"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments, text):
    with pytest.raises(ValueError, match=text):
        tnt.distributed_gradients(optax.sgd(1.0), **arguments)


def test_another_axis_than_the_mapped_one_is_refused():
    with pytest.raises(ValueError, match="'data' is not mapped here, but 'batch' is: pass axis_na"):
        checked(tnt.distributed_gradients(optax.sgd(1.0)), *problem(), axis_name="batch")


def test_adasum_needs_a_power_of_two():
    params, x = problem()
    with pytest.raises(ValueError, match="power of two of them, but 'data' has 3"):
        checked(tnt.distributed_gradients(optax.sgd(1.0), op="adasum"), params, x[:6], num_ranks=3)


def test_a_replicated_state_of_several_passes_is_refused():
    params, x = problem()
    optimizer = tnt.distributed_gradients(optax.sgd(1.0), backward_passes_per_step=2)
    mapped = jax.shard_map(
        lambda p, s, x: optimizer.update(local_grads(p, x), s, p),
        mesh=mesh(), in_specs=(P(), P(), P("data")), out_specs=P(),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"came to shard_map as replicated.*state_specs"):
        jax.eval_shape(mapped, params, optimizer.init(params), x)


def test_a_process_set_runs_over_its_own_mesh(use_ranks):
    use_ranks(NUM_RANKS)
    params, x = problem()
    half = tnt.ProcessSet([2, 3])
    optimizer = tnt.distributed_gradients(optax.sgd(1.0), process_set=half)

    def step(params, x):
        return optimizer.update(local_grads(params, x), optimizer.init(params))[0]

    mapped = jax.jit(
        jax.shard_map(step, mesh=half.mesh(), in_specs=(P(), P("data")), out_specs=P())
    )
    found = mapped(params, x)
    assert_close(found, jax.tree.map(np.negative, gradient(params, x)))
    assert {d.id for d in jax.tree.leaves(found)[0].devices()} == {2, 3}
    whole = jax.shard_map(step, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P())
    with pytest.raises(ValueError, match=r"has 4 ranks, but the process set 2 .ranks 2, 3"):
        jax.eval_shape(whole, params, x)


@pytest.mark.parametrize("place", MAPPED)
def test_half_precision_stays_half_precision(place):
    params, x = problem(jnp.bfloat16)
    [found] = place(tnt.distributed_gradients(optax.sgd(1.0)), params, x)
    parts = gradients_by_rank(params, x)
    expected = jax.tree.map(lambda w, *g: w - sum(map(np.float32, g)) / NUM_RANKS, params, *parts)
    assert_close(jax.tree.map(np.float32, found), expected, 2**-6)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(found))


@pytest.mark.parametrize(("bucket_bytes", "num_sums"), [(1, 3), (10**6, 1)])
def test_gradients_travel_in_the_buckets_of_the_platform(bucket_bytes, num_sums, monkeypatch):
    chosen = Reduction(bucket_bytes, chained=True)
    monkeypatch.setattr(optax_gradients, "default_reduction", lambda *_: chosen)
    optimizer, (params, x) = tnt.distributed_gradients(optax.sgd(1.0)), problem()

    def step(params, x):
        return optimizer.update(local_grads(params, x), optimizer.init(params))[0]

    mapped = jax.shard_map(step, mesh=mesh(), in_specs=(P(), P("data")), out_specs=P())
    lowered = jax.jit(mapped).lower(params, x)
    assert lowered.as_text().count("all_reduce") == num_sums
    assert_close(lowered.compile()(params, x), jax.tree.map(np.negative, gradient(params, x)))
