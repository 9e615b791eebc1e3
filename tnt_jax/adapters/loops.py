"""Forward passes inside `shard_map`: random numbers by row, and loops from constants.

A recurrent layer of any library starts its `scan` from zeros, which are the same on every rank, and
continues with activations, which are not. A layer may keep a state value in one branch of a `cond`
and compute it in the other. `shard_map` requires equal types, but models are written without it in
mind.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import jax

from tnt_jax import _jax
from tnt_jax.distributed.sums.random_rows import data_key, key_for

# Of the process, as the libraries are. Two threads that replace the same function must not undo one
# another.
_lock = threading.RLock()


@contextmanager
def replaced(owner: Any, functions: dict[str, Callable]) -> Iterator[None]:
    """Replaces attributes that a module or class defines itself, in this thread alone."""
    thread = threading.get_ident()
    with _lock:
        # As they are stored: reading a static method through its class would unwrap it.
        originals = {name: vars(owner)[name] for name in functions}
        for name, function in functions.items():
            setattr(owner, name, _in_thread(thread, function, getattr(owner, name)))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(owner, name, original)


def _in_thread(thread: int, function: Callable, original: Callable) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if threading.get_ident() == thread else original)(*args, **kwargs)

    return call


_scan, _while_loop = jax.lax.scan, jax.lax.while_loop
_fori_loop, _cond = jax.lax.fori_loop, jax.lax.cond


def with_varying_loops(apply: Callable) -> Callable:
    """Decorates a forward pass: `jax.lax` loops and branches carry values that differ by rank."""

    @functools.wraps(apply)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        loops = {
            "scan": _varying_scan,
            "while_loop": _varying_while_loop,
            "fori_loop": _varying_fori_loop,
            "cond": _varying_cond,
        }
        with ExitStack() as stack:
            stack.enter_context(replaced(jax.lax, loops))
            for owner, polynomial in _jax.polynomials().items():
                varying = functools.partial(_varying_polynomial, polynomial)
                stack.enter_context(replaced(owner, {"polynomial": varying}))
            return apply(*args, **kwargs)

    return wrapped


def with_draws_by_row(apply: Callable) -> Callable:
    """Decorates an adapter's `apply`: its key draws per row of the global batch, by `draws`."""

    @functools.wraps(apply)
    def wrapped(
        self: Any, params: Any, model_state: Any, inputs: Any, *, key: Any, train: bool, mask: Any
    ) -> Any:
        def forward(key: jax.Array, rows: Any) -> Any:
            inputs, mask = rows
            return apply(self, params, model_state, inputs, key=key, train=train, mask=mask)

        rows = inputs, mask
        key = data_key(0) if key is None else key
        return forward(key_for(forward, key, rows, self.draws, kind=train), rows)

    return wrapped


def _varying_scan(f: Callable, init: Any, *args: Any, **kwargs: Any) -> Any:
    def body(carry: Any, x: Any) -> tuple[Any, Any]:
        carry, output = f(carry, x)
        return _jax.make_varying(carry), output

    return _scan(body, _jax.make_varying(init), *args, **kwargs)


def _varying_while_loop(cond_fun: Callable, body_fun: Callable, init_val: Any) -> Any:
    return _while_loop(
        cond_fun, lambda value: _jax.make_varying(body_fun(value)), _jax.make_varying(init_val)
    )


def _varying_fori_loop(
    lower: Any, upper: Any, body_fun: Callable, init_val: Any, **kwargs: Any
) -> Any:
    def body(index: Any, value: Any) -> Any:
        return _jax.make_varying(body_fun(index, value))

    return _fori_loop(lower, upper, body, _jax.make_varying(init_val), **kwargs)


def _varying_polynomial(
    polynomial: Callable, x: jax.Array, coeffs: Sequence[Any], **kwargs: Any
) -> jax.Array:
    axes = _jax.varying_axes(x)
    return polynomial(x, _jax.vary(list(coeffs), axes) if axes else coeffs, **kwargs)


def _varying_cond(
    pred: Any, true_fun: Callable, false_fun: Callable, *operands: Any, **kwargs: Any
) -> Any:
    results = [jax.eval_shape(branch, *operands) for branch in (true_fun, false_fun)]
    if jax.tree.structure(results[0]) != jax.tree.structure(results[1]):
        # It raises the error that explains the problem.
        return _cond(pred, true_fun, false_fun, *operands, **kwargs)
    varies = jax.tree.map(lambda a, b: _jax.is_varying(a) or _jax.is_varying(b), *results)

    def alike(branch: Callable) -> Callable:
        return lambda *args: jax.tree.map(
            lambda x, varying: _jax.make_varying(x) if varying else x, branch(*args), varies
        )

    return _cond(pred, alike(true_fun), alike(false_fun), *operands, **kwargs)
