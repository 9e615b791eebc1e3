import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax.distributed.sums.reduction import prepend_to_order, trace_grads


def finished(objective, params):
    """Returns the names of the gradients in the order in which they are finished, checking their
    values on the way.
    """
    differentiated = jax.value_and_grad(objective)
    value, grads, order = trace_grads(differentiated, params)
    expected_value, expected = differentiated(params)
    np.testing.assert_array_equal(value, expected_value)
    jax.tree.map(np.testing.assert_array_equal, grads, expected)
    names = list(params)
    return [sorted(names)[index] for index in order]


def ones(*names):
    return {name: jnp.ones((3, 3)) for name in names}


def test_layers_finish_from_the_last_to_the_first_whatever_their_names():
    names = [f"block_{index}" for index in (1, 2, 10, 11, 3)]

    def objective(params):
        x = jnp.ones(3)
        for name in names:
            x = jnp.tanh(params[name] @ x)
        return x.sum()

    assert finished(objective, ones(*names)) == names[::-1]


def test_a_shared_matrix_finishes_with_its_first_use():
    def objective(params):
        x = params["embedding"] @ jnp.ones(3)
        x = jnp.tanh(params["a"] @ x)
        x = jnp.tanh(params["b"] @ x)
        return (params["embedding"] @ x).sum()

    assert finished(objective, ones("a", "b", "embedding")) == ["b", "a", "embedding"]


def test_an_encoder_finishes_after_the_decoder_that_needs_it():
    def objective(params):
        memory = jnp.tanh(params["encoder"] @ jnp.ones(3))
        return jnp.tanh(params["decoder"] @ memory).sum()

    assert finished(objective, ones("encoder", "decoder")) == ["decoder", "encoder"]


def test_called_programs_are_looked_into():
    def objective(params):
        @jax.jit
        def inner(params, x):
            return jnp.tanh(params["second"] @ jnp.tanh(params["first"] @ x))

        return jnp.tanh(params["third"] @ inner(params, jnp.ones(3))).sum()

    assert finished(objective, ones("first", "second", "third")) == ["third", "second", "first"]


def test_loops_conditions_and_unused_parameters_have_a_position():
    def objective(params):
        x = jax.lax.scan(
            lambda x, _: (jnp.tanh(params["loop"] @ x), None), jnp.ones(3), None, length=3
        )[0]
        x = jax.lax.cond(x.sum() > 0, lambda x: params["branch"] @ x, lambda x: x, x)
        return jnp.tanh(params["last"] @ x).sum()

    order = finished(objective, ones("branch", "last", "loop", "unused"))
    assert sorted(order) == ["branch", "last", "loop", "unused"]
    assert order.index("last") < order.index("branch") < order.index("loop")


def test_results_beside_the_gradients_are_returned():
    def objective(params):
        return params["w"].sum(), {"size": params["w"].size}

    (value, others), grads, order = trace_grads(
        jax.value_and_grad(objective, has_aux=True), ones("w")
    )
    assert (value, others["size"], order) == (9, 9, [0])
    np.testing.assert_array_equal(grads["w"], np.ones((3, 3)))


def test_leaves_that_come_first_keep_their_order():
    assert prepend_to_order({"loss": 1.0, "metric": [2.0, 3.0]}, [1, 0]) == [0, 1, 2, 4, 3]
