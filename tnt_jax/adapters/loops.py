"""Loops of models that start from constants, inside `shard_map`.

A recurrent layer of any library starts its `scan` from zeros, which are the same on every rank, and carries on with activations,
which are not. `shard_map` demands equal types; models are written without it in mind.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tnt_jax import _jax
from tnt_jax.adapters.replacing import replaced

_scan, _while_loop, _fori_loop = jax.lax.scan, jax.lax.while_loop, jax.lax.fori_loop


def with_varying_loops(apply: Callable) -> Callable:
    """Decorates a forward pass: the loops of `jax.lax` that it runs carry values that may differ between ranks."""

    @functools.wraps(apply)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with replaced(jax.lax, {"scan": _varying_scan, "while_loop": _varying_while_loop, "fori_loop": _varying_fori_loop}):
            return apply(*args, **kwargs)

    return wrapped


def _varying_scan(f: Callable, init: Any, *args: Any, **kwargs: Any) -> Any:
    def body(carry: Any, x: Any) -> tuple[Any, Any]:
        carry, output = f(carry, x)
        return _vary(carry), output

    return _scan(body, _vary(init), *args, **kwargs)


def _varying_while_loop(cond_fun: Callable, body_fun: Callable, init_val: Any) -> Any:
    return _while_loop(cond_fun, lambda value: _vary(body_fun(value)), _vary(init_val))


def _varying_fori_loop(lower: Any, upper: Any, body_fun: Callable, init_val: Any, **kwargs: Any) -> Any:
    return _fori_loop(lower, upper, lambda index, value: _vary(body_fun(index, value)), _vary(init_val), **kwargs)


def _vary(carry: Any) -> Any:
    return _jax.make_varying(jax.tree.map(jnp.asarray, carry))
