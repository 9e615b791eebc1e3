"""Programs for these tests as those of users, in which the compiler orders operations as it likes."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def all_optimizations():
    """Compiles with all optimizations here and in the processes that these tests start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")
        before = jax.config.read("jax_disable_most_optimizations")
        jax.config.update("jax_disable_most_optimizations", False)
        yield
        jax.config.update("jax_disable_most_optimizations", before)
