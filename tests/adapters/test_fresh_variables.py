"""Fresh variables of Linen modules: those of `module.init`, to the last bit."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax.adapters.linen import LinenAdapter

INITIALIZERS = (
    nn.initializers.lecun_normal(),
    nn.initializers.glorot_uniform(),
    nn.initializers.normal(0.02),
    nn.initializers.orthogonal(),
)


class Layers(nn.Module):
    """A layer for each initializer, and variables that are computed from the inputs."""

    @nn.compact
    def __call__(self, x):
        for initializer in INITIALIZERS:
            x = nn.Dense(33, kernel_init=initializer)(x)
        x = nn.Conv(5, (3,), param_dtype=jnp.bfloat16)(x[..., None])
        self.variable("scales", "mean", lambda: jnp.tanh(jnp.mean(x + 1) / 3))
        return nn.BatchNorm(use_running_average=True)(x)


def test_fresh_variables_are_those_of_init_to_the_last_bit():
    x = np.ones((4, 17), np.float32)
    found = LinenAdapter(Layers()).init(x, seed=12345)
    expected = jax.jit(Layers().init)(jax.random.key(12345), np.zeros((1, 17), np.float32))
    params = expected.pop("params")
    for own, other in ((found.params, params), (found.model_state, expected)):
        jax.tree.map(np.testing.assert_array_equal, own, other)
