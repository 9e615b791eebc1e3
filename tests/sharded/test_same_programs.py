"""Which equations of traced programs compute the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tnt_jax.sharded.blocks.equal_blocks import same_equation, same_literal

X = jnp.ones((2, 3))


@jax.custom_jvp
def straight(x):
    return x * 1.0


straight.defjvp(lambda primals, tangents: (straight(*primals), tangents[0]))


@jax.custom_jvp
def doubled_backward(x):
    return x * 1.0


doubled_backward.defjvp(lambda primals, tangents: (doubled_backward(*primals), 2 * tangents[0]))


@jax.custom_vjp
def kept(x):
    return x * 1.0


kept.defvjp(lambda x: (x, None), lambda _, grad: (grad,))


def only_equation(function):
    [equation] = jax.make_jaxpr(function)(X).eqns
    return equation


def scaled_by(scale):
    return jax.jit(lambda x: jnp.sin(x) * scale)


def looped(length):
    return lambda x: jax.lax.scan(lambda c, _: (c + 1, None), x, None, length=length)[0]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (jnp.sin, jnp.sin, True),
        (jnp.sin, jnp.cos, False),
        (lambda x: jnp.sum(x, 0), lambda x: jnp.sum(x, 1), False),
        (lambda x: jax.lax.reshape(x, (6,)), lambda x: jax.lax.reshape(x, (3, 2)), False),
        (scaled_by(2.0), scaled_by(2.0), True),
        (scaled_by(2.0), scaled_by(3.0), False),
        (scaled_by(2.0), jax.jit(lambda x: 2.0 * jnp.sin(x)), False),
        (scaled_by(np.ones((2, 3))), scaled_by(np.ones((2, 3))), True),
        (scaled_by(np.ones((2, 3))), scaled_by(np.zeros((2, 3))), False),
        (looped(2), looped(2), True),
        (looped(2), looped(3), False),
        (jax.checkpoint(looped(2)), jax.checkpoint(looped(2)), True),
        (jax.checkpoint(looped(2)), jax.checkpoint(looped(3)), False),
        (straight, straight, True),
        # They differ in their derivatives alone.
        (straight, doubled_backward, False),
        (kept, kept, True),
    ],
)
def test_equations_are_compared_by_what_they_compute(a, b, expected):
    assert same_equation(only_equation(a), only_equation(b)) is expected


def test_literals_are_compared_by_type_and_value():
    def literal(value):
        return only_equation(lambda x: jax.lax.pow(x, value)).invars[1]

    def sameness(*values):
        return same_literal(*map(literal, values))

    assert sameness(2, 2)
    assert not sameness(2, 3)
    assert not sameness(np.int32(2), np.float32(2))
    assert sameness(np.float32("nan"), np.float32("nan"))
