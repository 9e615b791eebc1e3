"""Parameters in parts are gathered where a program uses them: results and gradients are those of
whole parameters, and no program gathers what a loop or a rematerialized function can.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from tnt_jax import _jax
from tnt_jax.sharded.gathering import Cut, gather_where_used

WIDTH, LAYERS, ROWS = 16, 3, 8


def layer(w, h):
    return jnp.tanh(h @ w)


def plain(params, x):
    return jnp.sum(layer(params["w"][1], layer(params["w"][0], x)) ** 2)


def scanned(params, x):
    return jnp.sum(jax.lax.scan(lambda h, w: (layer(w, h), None), x, params["w"])[0] ** 2)


def scanned_remat(params, x):
    body = jax.checkpoint(lambda h, w: (layer(w, h), None))
    return jnp.sum(jax.lax.scan(body, x, params["w"])[0] ** 2)


def jitted(params, x):
    return jnp.sum(jax.jit(layer)(params["w"][0], x) ** 2) + jnp.sum(x @ params["w"][2])


def carried(params, x):
    """The array is part of the state of a loop, and of a branch."""
    w = jax.lax.fori_loop(0, 2, lambda _, w: w * 0.5, params["w"])
    return jax.lax.cond(jnp.sum(w) > 0, lambda w: jnp.sum(layer(w[0], x)), lambda w: w[0, 0, 0], w)


def used_twice(params, x):
    return jnp.sum(x @ params["w"][0] @ params["w"][0].T)


def whole_twice(params, x):
    h = jnp.tanh(jnp.einsum("bi,lij->bj", x, params["w"]))
    return jnp.sum(jnp.einsum("bi,lij->bj", h, params["w"]) ** 2)


def data():
    rng = np.random.default_rng(0)
    w = rng.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / 4
    return {"w": w}, rng.normal(size=(ROWS, WIDTH)).astype(np.float32)


def in_parts(function, dim, *, dtype=None):
    """Returns the jitted loss and gradients of parts over two copies of four devices."""
    mesh = Mesh(
        np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2
    )
    spec = {"w": P(*[None] * dim, "fsdp")}

    def work(params, x):
        def loss(params):
            return gather_where_used(
                lambda whole: function(whole if dtype is None else cast(whole, dtype), x),
                params, [Cut(dim)], has_remat=False,
            )  # fmt: skip

        value, grads = jax.value_and_grad(loss)(_jax.make_varying(params))
        grads = jax.tree.map(lambda g: jax.lax.psum(g, "data"), grads)
        return jax.lax.psum(value, ("data", "fsdp")), grads

    return jax.jit(
        _jax.shard_map(work, mesh=mesh, in_specs=(spec, P(("data", "fsdp"))), out_specs=(P(), spec))
    )


def cast(params, dtype):
    return jax.tree.map(lambda x: x.astype(dtype), params)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize(
    "function",
    [plain, scanned, scanned_remat, jitted, used_twice, whole_twice],
    ids=lambda f: f.__name__,
)
def test_results_and_gradients_are_those_of_whole_parameters(function, dim):
    params, x = data()
    value, grads = in_parts(function, dim)(params, x)
    expected, expected_grads = jax.value_and_grad(function)(params, x)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(grads["w"], expected_grads["w"], rtol=1e-4, atol=1e-5)


def test_what_a_loop_carries_is_gathered_before_it():
    params, x = data()
    params["w"] = np.abs(params["w"])
    value, grads = in_parts(carried, 1)(params, x)
    expected = [jax.value_and_grad(carried)(params, part) for part in np.split(x, 8)]
    np.testing.assert_allclose(value, sum(v for v, _ in expected), rtol=1e-5)
    np.testing.assert_allclose(grads["w"], sum(g["w"] for _, g in expected), rtol=1e-4, atol=1e-6)


def test_a_loop_gathers_one_layer_at_a_time():
    text = in_parts(scanned_remat, 1).lower(*data()).as_text()
    gathers = [line for line in text.splitlines() if "stablehlo.all_gather" in line]
    assert gathers
    assert all(f"-> tensor<{WIDTH}x{WIDTH}xf32>" in line for line in gathers)


def test_no_barrier_keeps_activations_from_being_computed_where_they_are_read():
    assert "optimization_barrier" not in in_parts(whole_twice, 1).lower(*data()).as_text()


def test_half_precision_is_gathered_in_half_precision_and_summed_in_single():
    lowered = in_parts(plain, 1, dtype=jnp.bfloat16).lower(*data()).as_text()
    lines = lowered.splitlines()
    gathers = [line for line in lines if "stablehlo.all_gather" in line]
    assert gathers
    assert all("xbf16>" in line for line in gathers)
    # The region of a sum names its dtype in the line that follows.
    after = [lines[i + 1] for i, line in enumerate(lines) if "stablehlo.reduce_scatter" in line]
    assert after
    assert all("tensor<f32>" in line for line in after)
    params, x = data()
    _, grads = in_parts(plain, 1, dtype=jnp.bfloat16)(params, x)
    assert grads["w"].dtype == jnp.float32


def test_numbers_in_results_stay_numbers():
    mesh = Mesh(np.array(jax.devices()[:2]), ("fsdp",), axis_types=(AxisType.Auto,))
    seen = []

    def work(params):
        result = gather_where_used(
            lambda whole: (jnp.sum(whole["w"]), 2.0, None), params, [Cut(1)], has_remat=False
        )
        seen.append(result[1:])
        return jax.lax.psum(result[0], "fsdp") / 2

    params, _ = data()
    spec = {"w": P(None, "fsdp")}
    total = jax.jit(_jax.shard_map(work, mesh=mesh, in_specs=(spec,), out_specs=P()))(params)
    np.testing.assert_allclose(total, params["w"].sum(), rtol=1e-5)
    assert seen == [(2.0, None)]


def test_communication_over_some_of_the_axes_is_refused():
    def averaging(params, x):
        return jnp.sum(jax.lax.pmean(x @ params["w"][0], "data"))

    with pytest.raises(ValueError, match=r"communicates over \['data'\].*split over \['data', 'fs"):
        in_parts(averaging, 1)(*data())
