"""The training state, as one immutable pytree, and its arrays by path, as they are saved."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tnt_jax import _jax
from tnt_jax.adapters.base import VariablePath


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The input and output of a step; the same on every rank."""

    step: jax.Array  # Number of steps so far, int32 scalar.
    params: Any  # Trained arrays.
    model_state: Any  # Arrays that the model itself updates, such as BatchNorm's statistics.
    opt_state: Any  # State of the Optax transformation.
    # Threefry key of the run as its words, uint32 `[2]`; that of a step is `fold_in(key, step)`. A
    # typed key among the results would disable JAX's fast path for starting programs.
    key: jax.Array
    # Sums of each rank's own gradients since the last update, arrays `[ranks, ...]` of which each
    # rank holds its row, or one row of sums over the ranks that all hold; None if all steps update.
    accumulated: Any = None
    # What compression left out of each rank's gradients so far, arrays `[ranks, ...]` of which each
    # rank holds its row; None without compression.
    residual: Any = None
    # Rows of the global batch before those of these ranks, uint32 scalar, where other ranks compute
    # them by themselves; None for the first.
    first_row: Any = None

    def after_step(self, params: Any, opt_state: Any, accumulated: Any, **others: Any) -> Self:
        """Returns the state after a step, with other arrays than those that it leaves."""
        return replace(
            self,
            step=self.step + 1,
            params=params,
            opt_state=opt_state,
            accumulated=accumulated,
            **others,
        )


def updated(
    optimizer: optax.GradientTransformation, grads: Any, params: Any, opt_state: Any
) -> tuple[Any, Any]:
    """Returns parameters and optimizer state after an update."""
    updates, opt_state = optimizer.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def create_state(
    params: Any,
    model_state: Any,
    optimizer: optax.GradientTransformation,
    *,
    seed: int,
    accumulating_ranks: int = 0,
    compressing_ranks: int = 0,
) -> TrainState:
    """Returns the state before the first update.

    The seed is that of dropout and of other random streams of the step. `accumulating_ranks`
    accumulate gradients over several steps, `compressing_ranks` send compressed ones; 0 if none
    does.
    """

    def rows(num_ranks: int) -> Any:
        if num_ranks:
            return jax.tree.map(lambda x: np.zeros((num_ranks, *x.shape), x.dtype), params)
        return None

    zero: Any = np.zeros((), np.int32)
    return TrainState(
        zero,
        params,
        model_state,
        optimizer.init(params),
        jax.random.key_data(jax.random.key(seed, impl="threefry2x32")),
        accumulated=rows(accumulating_ranks),
        residual=rows(compressing_ranks),
    )


def descriptions(tree: Any, *, rows: int | None = None, sharding: Any = None) -> Any:
    """Returns descriptions of arrays on devices; of so many rows, or sharded, if that is given."""

    def describe(x: Any) -> jax.ShapeDtypeStruct:
        shape = x.shape if rows is None else (rows, *x.shape[1:])
        dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return jax.tree.map(describe, tree)


def copied(tree: Any) -> Any:
    """Returns copies of the arrays on devices: a step takes those that it is given."""
    return jax.tree.map(lambda x: jnp.copy(x) if isinstance(x, jax.Array) else x, tree)


def started_at_once(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns a transformation whose `init` runs as one program, if JAX can trace it.

    Run operation by operation, it is several times slower at first: every shape has a program.
    """

    def init(params: Any) -> Any:
        start = jax.jit(optimizer.init, compiler_options=_jax.options_of_one_run())
        try:
            jax.eval_shape(start, params)
        except Exception:
            # It needs the values, or raises its error again.
            return optimizer.init(params)
        return start(params)

    return optax.GradientTransformation(init, optimizer.update)


def moved(state: TrainState, places: TrainState) -> TrainState:
    """Returns a copy of a state in other places on the same devices.

    The places are descriptions of the arrays there, with their shardings. Sums of gradients may
    have more rows there, of which the further ones are zeros, or the one that is their sum.
    """

    def with_rows(x: jax.Array, place: jax.ShapeDtypeStruct) -> jax.Array:
        more = place.shape[0] - x.shape[0] if x.ndim else 0
        if more < 0:
            return jnp.sum(x, 0, keepdims=True)
        return jnp.pad(x, [(0, more), *[(0, 0)] * (x.ndim - 1)]) if more else x

    def copy(state: TrainState) -> TrainState:
        return jax.tree.map(with_rows, state, places)

    return jax.jit(copy, out_shardings=jax.tree.map(lambda x: x.sharding, places))(state)


_ACCUMULATED = ("accumulated/", "residual/")


def state_arrays(state: Any) -> dict[str, Any]:
    """Returns the arrays of a state, or other pytree, by path, such as `params/Dense_0/kernel`."""
    leaves = jax.tree_util.tree_leaves_with_path(state, is_leaf=is_array)
    return by_path(("/".join(map(_saved_part, path)), leaf) for path, leaf in leaves)


def by_path(leaves: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Returns leaves by path; a ValueError for two of one path, as `"a/b"`, and `"b"` in `"a"`."""
    flat: dict[str, Any] = {}
    for path, leaf in leaves:
        if path in flat:
            raise ValueError(
                f"Two arrays of the state have the path {path}, so that a checkpoint could hold "
                "only one of them. Rename one: a slash in a name looks like a level of the tree."
            )
        flat[path] = leaf
    return flat


def digest(x: Any) -> str:
    """Returns a digest of an array's dtype, shape and bits."""
    array = np.asarray(x)
    return hashlib.md5(f"{array.dtype} {array.shape} ".encode() + array.tobytes()).hexdigest()


def with_arrays(state: TrainState, arrays: Mapping[str, Any]) -> TrainState:
    """Returns a state like `state` with other arrays by path, which must fit; see `check_match`."""
    expected = state_arrays(state)
    arrays = for_ranks(arrays, expected)
    check_match(expected, arrays)
    return jax.tree.structure(state).unflatten([arrays[path] for path in expected])


def without_parts(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arrays without what ranks have accumulated, where each process holds a part."""
    return {
        path: leaf
        for path, leaf in arrays.items()
        if not path.startswith(_ACCUMULATED) or not is_spread(leaf)
    }


def is_spread(leaf: Any) -> bool:
    """Returns whether each process holds but a part of an array."""
    return isinstance(leaf, jax.Array) and not (
        leaf.is_fully_addressable or leaf.is_fully_replicated
    )


def check_match(expected: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    """Raises a ValueError unless arrays of a file have the model's paths, shapes and dtypes."""
    problems = {
        "not in the file": [path for path in expected if path not in found],
        "not in the model": [path for path in found if path not in expected],
        "different": [
            f"{path} (file: {_jax.kind_of(found[path])}, model: {_jax.kind_of(leaf)})"
            for path, leaf in expected.items()
            if path in found and _jax.kind_of(found[path]) != _jax.kind_of(leaf)
        ],
    }
    parts = [f"{what}: {listed(paths)}" for what, paths in problems.items() if paths]
    if parts:
        raise ValueError(
            f"What was saved does not fit the model. Leaves {'; '.join(parts)}. Load it into the "
            f"model that was saved."
        )


def for_ranks(arrays: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, Any]:
    """Returns arrays with accumulated gradients `[ranks, ...]` of as many ranks as expected."""
    found = dict(arrays)
    for path, leaf in expected.items():
        if not path.startswith(_ACCUMULATED):
            continue
        saved = found.get(path)
        if saved is None:
            found[path] = np.zeros(leaf.shape, leaf.dtype)
        elif saved.shape[0] != leaf.shape[0] and saved.shape[1:] == leaf.shape[1:]:
            found[path] = np.zeros(leaf.shape, leaf.dtype)
            # Only the sum of the gradients matters.
            found[path][0] = np.sum(saved, axis=0)
    return found


def listed(items: Sequence[Any], *, most: int = 8) -> str:
    """Returns the first items in words, and how many there are besides."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


def _saved_part(entry: Any) -> str:
    is_named = isinstance(entry, jax.tree_util.DictKey) and isinstance(entry.key, VariablePath)
    return entry.key.saved_as if is_named else jax.tree_util.keystr((entry,), simple=True)


def is_array(node: Any) -> bool:
    """Returns whether a node of a pytree is an array or the description of one."""
    # Orbax describes an array by an object that older JAX versions take for a container.
    return hasattr(node, "shape") and hasattr(node, "dtype")
