"""Loops of models run inside `shard_map`, whatever they start from, and other threads keep JAX's
own.
"""

import threading
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tnt_jax import _jax
from tnt_jax.adapters.forward_passes import replaced, with_varying_loops


def cumulated(x):
    return jax.lax.scan(lambda total, row: (total + row, total), jnp.zeros(x.shape[1:]), x)[0]


def halved(x):
    return jax.lax.while_loop(
        lambda pair: pair[1] < 3,
        lambda pair: (pair[0] / 2 + x, pair[1] + 1),
        (jnp.zeros_like(x), 0),
    )[0]


def counted(x):
    return jax.lax.fori_loop(0, 4, lambda index, total: total + index * x, 0.0 * jnp.ones(x.shape))


def chosen(x):
    return (
        x
        + jax.lax.cond(
            jnp.array(True), true_fun=lambda: (jnp.ones(2), x), false_fun=lambda: (x[0], x)
        )[0]
    )


def exact_gelu(x):
    return jax.nn.gelu(x, approximate=False)


@pytest.mark.parametrize("loop", [cumulated, halved, counted, chosen])
def test_loops_that_start_from_constants_run_on_every_rank(loop):
    mesh = _jax.make_data_mesh(jax.devices()[:2])
    x = np.arange(8.0, dtype=np.float32).reshape(4, 2)
    mapped = _jax.shard_map(
        with_varying_loops(loop),
        mesh=mesh,
        in_specs=PartitionSpec("data"),
        out_specs=PartitionSpec("data"),
    )
    np.testing.assert_allclose(
        jax.jit(mapped)(x), np.concatenate([loop(x[:2]), loop(x[2:])]), rtol=1e-6
    )


@pytest.mark.parametrize("function", [exact_gelu, jax.lax.erf, jax.lax.erfc])
def test_gradients_of_erf_are_those_outside(function):
    def slopes(function, x):
        return jax.grad(lambda x: function(x).sum())(x)

    mesh, rows = _jax.make_data_mesh(jax.devices()[:2]), PartitionSpec("data")
    x = np.linspace(-4, 4, 16, dtype=np.float32)
    helped, alone = (
        jax.jit(_jax.shard_map(partial(slopes, each), mesh=mesh, in_specs=rows, out_specs=rows))
        for each in (with_varying_loops(function), function)
    )
    np.testing.assert_allclose(helped(x), slopes(function, x), rtol=1e-6)
    if _jax.polynomials():  # It can go when JAX traces this alone.
        with pytest.raises(ValueError, match="polynomial requires varying"):
            alone(x)


def test_loops_without_help_are_refused():
    mesh = _jax.make_data_mesh(jax.devices()[:2])
    mapped = _jax.shard_map(
        cumulated, mesh=mesh, in_specs=PartitionSpec("data"), out_specs=PartitionSpec("data")
    )
    with pytest.raises(TypeError, match="carry"):
        jax.jit(mapped)(np.ones((4, 2), np.float32))


class Library:
    def answer(self):
        return 42


def fail_while_replaced(seen):
    with replaced(Library, {"answer": lambda library: 0}):
        thread = threading.Thread(target=lambda: seen.append(Library().answer()))
        thread.start()
        thread.join()
        seen.append(Library().answer())
        raise KeyError


def test_replacing_is_undone_after_an_error_and_hidden_from_other_threads():
    seen = []
    with pytest.raises(KeyError):
        fail_while_replaced(seen)
    assert [*seen, Library().answer()] == [42, 0, 42]
