"""The parts that a generator of random numbers is made of."""

from typing import Any

from tnt_jax._jax.fallbacks import or_plain


def _none() -> tuple[Any, Any, Any]:
    return (lambda **_: None), None, None


@or_plain(_none, lost="Models that draw random numbers are refused on more than one device.")
def _parts() -> tuple[Any, Any, Any]:
    # Outside JAX's promise of compatibility. Checked with JAX 0.10.0, 0.10.2 and 0.12.0. Without
    # them, dropout by row of the global batch would need a generator of its own in every layer.
    from jax.extend import random

    return random.define_prng_impl, random.threefry2x32_p, random.threefry_prng_impl


# `define_prng_impl` makes None where JAX lacks a part.
define_prng_impl, threefry2x32_p, threefry_prng_impl = _parts()
