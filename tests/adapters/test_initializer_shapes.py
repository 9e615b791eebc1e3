"""The initializers of a Linen module are traced once, and its shapes are compared in each trace."""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.errors import ScopeParamShapeError

from tnt_jax.adapters import linen
from tnt_jax.adapters.linen import LinenAdapter


def noted(calls, name, init=nn.initializers.ones):
    def initializer(key, shape, dtype=jnp.float32):
        calls.append(name)
        return init(key, shape, dtype)

    return initializer


def trace(adapter, variables, x, *, train=False):
    def forward(params, model_state, x):
        key = jax.random.key(0) if train else None
        return adapter.apply(params, model_state, x, key=key, train=train, mask=None).outputs

    return jax.make_jaxpr(forward)(*variables, x)


def test_flax_still_asks_for_the_shapes_in_a_function_that_is_known():
    assert len(linen._PARAM_CODES) == 1
    assert set(linen._PARAM_CODES[0].co_freevars) == {
        "init_fn", "init_args", "init_kwargs",
    }  # fmt: skip


def test_each_initializer_is_traced_once_for_a_shape():
    calls = []
    kernel, scale = noted(calls, "kernel"), noted(calls, "scale")

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            for width in (3, 3, 4):
                x = nn.Dense(width, kernel_init=kernel)(x)
                # Its shape is a list.
                x = nn.BatchNorm(use_running_average=not train, scale_init=scale)(x)
            return x

    adapter, x = LinenAdapter(Net()), np.ones((6, 3), np.float32)
    variables = adapter.init(x, seed=0)
    assert calls == ["kernel", "scale"] * 3
    calls.clear()
    for train in (False, True, False):
        trace(adapter, variables, x, train=train)
    # The first two layers have kernels of one shape.
    assert sorted(calls) == ["kernel"] * 2 + ["scale"] * 2
    # Flax alone traces them each time.
    calls.clear()
    jax.eval_shape(Net().apply, {"params": variables.params, **variables.model_state}, x)
    assert len(calls) == 6


def test_inputs_of_another_width_are_refused_as_before():
    adapter = LinenAdapter(nn.Dense(2))
    variables = adapter.init(np.ones((4, 5), np.float32), seed=0)
    for features in (5, 6, 5, 7):
        x = np.ones((4, features), np.float32)
        if features == 5:
            trace(adapter, variables, x)
            continue
        with pytest.raises(ScopeParamShapeError, match=rf"\({features}, 2\).*\(5, 2\)"):
            trace(adapter, variables, x)


def test_an_initializer_that_changes_with_the_module_is_another_one():
    class Net(nn.Module):
        width: int

        def own(self, key):
            return jnp.zeros(self.width)

        @nn.compact
        def __call__(self, x):
            return x + self.param("bias", self.own).sum() + self.param("scale", scaled, [2.0]).sum()

    def scaled(key, factors):
        return jnp.ones(3) * jnp.asarray(factors)

    adapter, x = LinenAdapter(Net(3)), np.ones((4, 1), np.float32)
    variables = adapter.init(x, seed=0)
    trace(adapter, variables, x)
    adapter.module = Net(4)
    with pytest.raises(ScopeParamShapeError):
        trace(adapter, variables, x)


def test_arguments_that_cannot_be_compared_are_traced_each_time():
    calls = []

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            like = self.param("like", noted_like, np.ones(3, np.float32))
            return x + like.sum() + self.param("named", noted(calls, "named"), shape=(2,)).sum()

    def noted_like(key, array):
        calls.append("like")
        return jnp.zeros_like(array)

    adapter, x = LinenAdapter(Net()), np.ones((4, 1), np.float32)
    variables = adapter.init(x, seed=0)
    trace(adapter, variables, x)
    calls.clear()
    trace(adapter, variables, x)
    # The second initializer is made anew in each trace.
    assert calls == ["like", "named"]


def test_eval_shape_inside_a_module_is_that_of_jax():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            found = jax.eval_shape(partial(jnp.sum, axis=1), x)
            return nn.Dense(found.shape[0])(x)

    adapter, x = LinenAdapter(Net()), np.ones((4, 3), np.float32)
    before = jax.eval_shape
    variables = adapter.init(x, seed=0)
    with pytest.raises(ScopeParamShapeError):  # One row made the parameters.
        trace(adapter, variables, x)
    trace(adapter, variables, x[:1])
    assert jax.eval_shape is before
