"""Convolutions are transposed to have their features last, also those within loops; the truth is JAX.

XLA's CPU compiler gives a convolution within a loop to its library in this form alone.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tnt_jax import _jax

pytestmark = pytest.mark.usefixtures("all_optimizations")
RNG = np.random.default_rng(0)


def array(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def convolve(x, kernel, **options):
    return jnp.sum(jnp.sin(lax.conv_general_dilated(x, kernel, **options)))


FIRST = ("NCHW", "OIHW", "NCHW")
LAST = ("NHWC", "HWIO", "NHWC")
KINDS = {
    "last": (array(2, 6, 5, 3), array(3, 3, 3, 4), {"dimension_numbers": LAST, "padding": "SAME"}),
    "first": (array(2, 3, 6, 5), array(4, 3, 3, 3), {"dimension_numbers": FIRST, "padding": "SAME"}),
    "strides": (array(2, 3, 7, 6), array(4, 3, 3, 2), {"window_strides": (2, 3)}),
    "transposed": (array(2, 3, 4, 4), array(4, 3, 3, 3), {"lhs_dilation": (2, 2), "padding": [(2, 2), (2, 2)]}),
    "dilated": (array(2, 3, 9, 8), array(4, 3, 3, 3), {"rhs_dilation": (2, 1)}),
    "groups": (array(2, 6, 5, 5), array(4, 3, 3, 3), {"feature_group_count": 2}),
    "batch groups": (array(4, 3, 5, 5), array(4, 3, 3, 3), {"batch_group_count": 2}),
    "one dimension": (array(2, 3, 9), array(4, 3, 3), {}),
    "three dimensions": (array(2, 3, 4, 5, 4), array(4, 3, 2, 3, 2), {}),
    "mixed": (array(6, 2, 3, 5), array(3, 4, 3, 3),
              {"dimension_numbers": ("HNCW", "IOHW", "CWNH"), "padding": "SAME"}),
}  # fmt: skip


def looped(function):
    """Returns a function that sums results of three calls in a loop, within other calls."""
    called = jax.checkpoint(jax.jit(function))

    def run(x, kernel):
        def add(total, factor):
            return jax.tree.map(jnp.add, total, called(factor * x, kernel)), None

        zeros = jax.tree.map(jnp.zeros_like, (jnp.float32(0), (x, kernel)))
        return lax.scan(add, zeros, jnp.arange(1.0, 4))[0]

    return run


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrap", [lambda function: function, looped])
def test_results_are_those_of_jax(kind, wrap):
    x, kernel, options = KINDS[kind]
    options = {"window_strides": (1,) * (x.ndim - 2), "padding": "VALID"} | options
    function = wrap(jax.value_and_grad(lambda x, kernel: convolve(x, kernel, **options), (0, 1)))
    traced = jax.make_jaxpr(function)(x, kernel)
    program = _jax.with_features_last(traced)
    found = jax.jit(_jax.jaxpr_as_fun(program))(x, kernel)
    for result, expected in zip(found, jax.tree.leaves(jax.jit(function)(x, kernel)), strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
    convolutions = _jax.convolutions_in(program.jaxpr)
    before = _jax.convolutions_in(traced.jaxpr)
    assert len(convolutions) == len(before) >= 3
    # Errors and profiles name the lines of the user.
    assert [x.source_info for x in convolutions] == [x.source_info for x in before]
    last = x.ndim - 1
    for equation in convolutions:
        numbers = equation.params["dimension_numbers"]
        assert numbers.lhs_spec == numbers.out_spec == (0, last, *range(1, last))
        assert numbers.rhs_spec == (last, last - 1, *range(last - 1))


def test_a_program_without_convolutions_stays_as_it_is():
    program = jax.make_jaxpr(lambda x: jnp.sin(x) @ x)(array(3, 3))
    assert _jax.with_features_last(program).jaxpr.eqns == program.jaxpr.eqns
