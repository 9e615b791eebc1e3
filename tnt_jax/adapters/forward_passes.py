"""Forward passes inside `shard_map`: random numbers by row, loops from constants, and own losses.

A recurrent layer of any library starts its `scan` from zeros, which are the same on every rank, and
continues with activations, which are not. A layer may keep a state value in one branch of a `cond`
and compute it in the other. `shard_map` requires equal types, but models are written without it in
mind. Losses that a model adds itself become parts of the loss of the global batch.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax import _jax
from tnt_jax.distributed.sums.random_rows import (
    DrawError,
    data_key,
    key_for,
    key_of_part,
    keys_of_parts,
)
from tnt_jax.distributed.sums.reduction import psum
from tnt_jax.log import logger

Kind = Literal["mean", "sum"]
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


def with_penalty_of_real_rows(apply: Callable) -> Callable:
    """Decorates an adapter's `apply`: a loss that is a mean over rows leaves out padded rows.

    It is computed again for each row by itself, unless that would change it: then it warns.
    """

    @functools.wraps(apply)
    def wrapped(
        self: Any, params: Any, model_state: Any, inputs: Any, *, key: Any, train: bool, mask: Any
    ) -> Any:
        forward = functools.partial(apply, self, params, model_state, train=train)
        applied = forward(inputs, key=key, mask=mask)
        if not train or mask is None or not isinstance(applied.penalty, jax.Array):
            return applied

        def added(inputs: Any, params: Any, model_state: Any, key: Any, mask: Any) -> Any:
            applied = apply(self, params, model_state, inputs, key=key, train=train, mask=mask)
            return {"penalty": applied.penalty, "state": applied.model_state}

        # Values that a traced function is closed over would be operands, too.
        traced = jax.jit(added).trace(inputs, params, model_state, key, mask)
        flags = jax.tree.map(lambda _: False, traced.out_info)
        if not _depends(traced, {**flags, "penalty": True}):
            return applied
        rows_differ = jax.tree.leaves(inputs)[0].shape[0] != mask.shape[0]
        state_flags = {**flags, "state": jax.tree.map(lambda _: True, flags["state"])}
        if not (rows_differ or _jax.communicates(traced) or _depends(traced, state_flags)):
            with suppress(DrawError):
                return applied._replace(penalty=_penalty_of_rows(forward, inputs, key, mask))
        warn_of_repeated_rows(self)
        return applied

    return wrapped


def _depends(traced: Any, results: Any) -> bool:
    inputs, *_ = _jax.needed_operands(traced, results)
    return any(jax.tree.leaves(inputs))


def _penalty_of_rows(forward: Callable, inputs: Any, key: Any, mask: jax.Array) -> jax.Array:
    """Returns a rank's part of the mean over the real rows of all ranks."""

    def of_row(words: jax.Array, row: Any) -> jax.Array:
        alone = jax.tree.map(lambda x: x[None], row)
        return forward(alone, key=key_of_part(words), mask=None).penalty

    by_row = jax.vmap(of_row)(keys_of_parts(key, len(mask), 1), inputs)
    real = psum(jnp.sum(mask))
    share = jnp.sum(by_row * mask) / jnp.maximum(real, 1) * jax.lax.axis_size(_jax.rank_axes())
    # Where each rank's rows are computed by themselves, all of them may be padded.
    return jnp.where(real == 0, jnp.mean(by_row), share)


def warn_of_repeated_rows(adapter: Any, advice: str = "") -> None:
    """Warns once for each adapter that padded rows count in scalar losses of its model."""
    if not adapter.has_warned:
        adapter.has_warned = True
        logger.warning(
            "The model %r adds a scalar loss. In batches whose rows do not divide evenly among the "
            "ranks, often the last one, it includes repeated rows, so it depends on the number of "
            "devices. %sChoose a batch size that avoids them, or leave out the last batch.",
            adapter.name,
            advice,
        )


def kinds_of_losses(once: list[Any], twice: list[Any]) -> tuple[Kind, ...]:
    """Returns for each added loss of some rows, and of these twice, if it is a mean or a sum."""
    pairs = enumerate(zip(once, twice, strict=True))
    return tuple(_kind(index, float(np.sum(a)), float(np.sum(b))) for index, (a, b) in pairs)


def penalty_of(
    losses: list[jax.Array], kinds: tuple[Kind, ...], mask: jax.Array | None, num_rows: int
) -> jax.Array | float:
    """Returns the added losses of one rank; their mean over ranks is that of the global batch.

    Padded rows of losses `[rows, ...]`, which Keras sums, are left out. A scalar is weighted by its
    rank's share of the real rows, which is exact for regularizers, and without padding.
    """
    num_ranks = jax.lax.axis_size(_jax.rank_axes())
    penalty = 0.0
    for loss, kind in zip(losses, kinds, strict=True):
        factor: jax.Array | float = 1.0
        if mask is not None and loss.shape[:1] == (num_rows,):
            loss = jnp.where(mask.reshape(-1, *(1,) * (loss.ndim - 1)) != 0, loss, 0)
        elif mask is not None:
            real = jnp.sum(mask)
            total = psum(real)
            # Where each rank's rows are computed by themselves, all of them may be padded.
            share = jnp.where(total == 0, 1.0, real / jnp.maximum(total, 1) * num_ranks)
            factor = real / num_rows if kind == "sum" else share
        penalty += jnp.sum(loss.astype(jnp.float32)) * factor * (num_ranks if kind == "sum" else 1)
    return penalty


def _kind(index: int, once: float, twice: float) -> Kind:
    # A mean, like a weight regularizer, does not change if each row is repeated; a sum doubles. The
    # ranges are wide, because noise is drawn anew for each row.
    ratio = twice / once if once else np.inf
    if once == twice or 0.7 < ratio < 1.4:
        return "mean"
    if 1.4 <= ratio < 2.8:
        return "sum"
    raise ValueError(
        f"The loss number {index} that the model adds (add_loss) is neither a mean nor a sum over "
        f"the rows of a batch: it was {once:.6g} for some rows and {twice:.6g} when each was "
        "repeated. Training on parts of a batch needs one of the two."
    )
