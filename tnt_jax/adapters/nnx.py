"""Flax NNX modules as pure functions, with all kinds of variables; results are written back."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from tnt_jax import _jax
from tnt_jax.adapters.base import (
    LOSSES,
    TRAIN_FLAGS,
    Adapter,
    Applied,
    CallStyle,
    Variables,
)
from tnt_jax.adapters.batch_statistics import normalize, real_row_moments
from tnt_jax.adapters.call_errors import explained
from tnt_jax.adapters.forward_passes import (
    with_draws_by_row,
    with_penalty_of_real_rows,
    with_varying_loops,
)
from tnt_jax.distributed.sums.random_rows import Draws

_RNGS_OF_CALL = 2**31  # Distinct from the numbers of the module's own streams.


class NnxAdapter(Adapter):
    """An NNX module, which holds its own variables: training starts there and writes them back.

    Params are the variables of type `nnx.Param`; all other variables and arrays are model state,
    except random streams, and losses that the module adds itself (variables of a class `Loss` or
    `losses`), which count in training. The streams are reseeded in every step from its key and the
    position of the stream in the module. A `__call__` that takes `rngs` gets such streams.
    """

    holds_variables = True
    knows_penalty = False

    def __init__(self, module: nnx.Module) -> None:
        if not callable(module):
            kind = type(module).__name__
            raise TypeError(
                f"An NNX module must be callable to be trained, but {kind} has no __call__."
            )
        self.module = module
        self.name = type(module).__name__
        self._takes_rngs = "rngs" in inspect.signature(module).parameters
        self._style = CallStyle.of(module)
        self._seen: list[tuple[tuple[str, ...], nnx.Variable, Any]] = []
        self.has_warned = False
        self._split()

    def sample_inputs(self) -> tuple[()]:
        """Returns no inputs: the module holds its variables already."""
        return ()

    def init(self, inputs: Any, *, seed: int) -> Variables:
        """Returns the variables that the module holds, whatever the inputs and the seed."""
        self._seen = self._held_arrays()
        return self._split()

    def _split(self) -> Variables:
        """Takes the module's graph, which steps are traced with, and returns its variables."""
        parts = nnx.split(self.module, _is_left, nnx.Param, is_random, ...)
        self._graph, self._left, params, self._random, rest = parts
        self._settings = self._read_settings()
        self.draws: dict[Any, Draws] = {}
        return Variables(_nested(params), _nested(rest))

    @with_penalty_of_real_rows
    @with_draws_by_row
    @with_varying_loops
    def apply(
        self, params: Any, model_state: Any, inputs: Any, *, key: jax.Array, train: bool, mask: Any
    ) -> Applied:
        """Returns the module's forward pass, in `train()` or `eval()`; see `Adapter.apply`."""
        random = reseeded(self._random, key)
        # A copy, because the variables of the user's own object belong to another trace.
        variables = self._state(Variables(params, model_state))
        module = nnx.merge(self._graph, variables, random, self._left, copy=True)
        module.train() if train else module.eval()
        if train and mask is not None:
            _leave_out_padding(module, mask)
        args, kwargs = self._style.arguments(inputs, train=train)
        if self._takes_rngs:
            kwargs = {**kwargs, "rngs": nnx.Rngs(jax.random.fold_in(key, _RNGS_OF_CALL))}
        with explained(self.name, inputs, train=train):
            outputs = module(*args, **kwargs)
        if not train:
            return Applied(outputs, model_state, 0.0)
        losses = jax.tree.leaves(nnx.pop(module, is_loss))
        penalty = sum((jnp.sum(loss) for loss in losses), start=0.0)
        after = traverse_util.flatten_dict(_nested(nnx.state(module)))
        # Without sown and other new variables.
        state = {path: after[path] for path in traverse_util.flatten_dict(model_state)}
        return Applied(outputs, traverse_util.unflatten_dict(state), penalty)

    def axis_names(self) -> Mapping[str, tuple[str | None, ...]]:
        """Returns the metadata `sharding` of the module's parameters, by path."""
        params = nnx.state(self.module, nnx.Param)
        leaves = nnx.to_flat_state(params)
        named = (("/".join(_names(path)), _axis_names(leaf)) for path, leaf in leaves)
        return {path: names for path, names in named if names}

    def export(self, variables: Variables) -> nnx.State:
        """Returns variables as a state for `nnx.update(module, state)`."""
        return self._state(jax.tree.map(jnp.asarray, variables))

    def trains_others(self) -> bool:
        """Returns whether the module has other variables or settings than when last read."""
        both = (self._held_arrays(), self._seen)
        held, seen = ([(path, id(leaf)) for path, leaf, _ in listed] for listed in both)
        return held != seen or not _are_same(self._read_settings(), self._settings)

    def has_assigned(self) -> bool:
        """Returns whether an array was assigned to a variable since it was last read."""
        return any(leaf.get_value() is not array for _, leaf, array in self._seen)

    def with_assigned(self, variables: Variables) -> Variables:
        """Returns variables with the arrays that were assigned to the module's own."""
        news = {id(leaf.get_value()) for _, leaf, old in self._seen if leaf.get_value() is not old}
        leaves = nnx.to_flat_state(nnx.state(self.module, _is_kept))
        held = {_names(path): leaf.get_value() for path, leaf in leaves}
        assigned = {path: array for path, array in held.items() if id(array) in news}
        self._seen = self._held_arrays()
        flat = map(traverse_util.flatten_dict, variables)
        parts = ({path: assigned.get(path, array) for path, array in x.items()} for x in flat)
        return Variables(*map(traverse_util.unflatten_dict, parts))

    def write_back(self, variables: Variables) -> None:
        """Stores variables in the user's module, whose random streams do not change."""
        nnx.update(self.module, self.export(variables))
        self._seen = self._held_arrays()

    def _held_arrays(self) -> list[tuple[tuple[str, ...], nnx.Variable, Any]]:
        return [
            (_names(path), leaf, leaf.get_value())
            for path, leaf in nnx.iter_graph(self.module)
            if isinstance(leaf, nnx.Variable) and _is_kept(path, leaf)
        ]

    def _read_settings(self) -> list[tuple[tuple[Any, ...], Any]]:
        """Returns what the module has besides variables, except the flags of its mode, by path."""
        return [
            (path, value)
            for path, value in nnx.iter_graph(self.module)
            if not isinstance(value, (nnx.Variable, jax.Array, np.ndarray))
            and not (path and (path[-1] in TRAIN_FLAGS or str(path[-1]).startswith("_pytree__")))
        ]

    def _state(self, variables: Variables) -> nnx.State:
        """Returns the given arrays as the state of the module without its random streams."""
        params, model_state = map(traverse_util.flatten_dict, variables)
        arrays = {**params, **model_state}
        leaves = nnx.to_flat_state(nnx.state(self.module, _is_kept))
        missing = ["/".join(_names(path)) for path, _ in leaves if _names(path) not in arrays]
        if missing:
            raise ValueError(
                f"The module {self.name} has the variables {', '.join(missing)}, which the "
                "variables given to it lack. A view needs a module with the same attributes."
            )
        found = [(path, _with_value(leaf, arrays[_names(path)])) for path, leaf in leaves]
        return nnx.from_flat_state(found)


class _BatchNormOfRealRows(nnx.BatchNorm):
    """A batch normalisation that leaves out padded rows by the mask `real_rows` `[rows]`."""

    real_rows: jax.Array

    def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        return batch_norm_of(self.real_rows)(self, x, *args, **kwargs)


def batch_norm_of(real_rows: jax.Array) -> Callable:
    """Returns an `nnx.BatchNorm.__call__` that leaves out rows with a 0 in `real_rows`."""
    original = nnx.BatchNorm.__call__

    # NNX's own `mask` averages the means of ranks without weighting them by their rows.
    def call(
        layer: nnx.BatchNorm,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        average = layer.use_running_average if use_running_average is None else use_running_average
        is_elsewhere = x.shape[0] != real_rows.shape[0] or layer.axis % x.ndim == 0
        if average or mask is not None or is_elsewhere or layer.axis_index_groups is not None:
            return original(layer, x, use_running_average, mask=mask)
        mean, var = real_row_moments(
            x, real_rows, feature_dim=layer.axis, axis_name=layer.axis_name
        )
        for moving, value in ((layer.mean, mean), (layer.var, var)):
            moving[...] = layer.momentum * moving[...] + (1 - layer.momentum) * value
        scale = None if layer.scale is None else layer.scale[...]
        bias = None if layer.bias is None else layer.bias[...]
        y = normalize(
            x, mean, var, scale=scale, bias=bias, feature_dim=layer.axis, epsilon=layer.epsilon
        )
        given = (v for v in (x, scale, bias) if v is not None)
        return y.astype(layer.dtype or jnp.result_type(*given))

    return call


def _leave_out_padding(module: nnx.Module, mask: jax.Array) -> None:
    """Keeps masked rows out of the statistics of each `BatchNorm` in a copy of a module."""
    for _, layer in nnx.iter_graph(module):
        # A subclass with its own call computes its own statistics.
        if isinstance(layer, nnx.BatchNorm) and type(layer).__call__ is nnx.BatchNorm.__call__:
            layer.__class__ = _BatchNormOfRealRows
            layer.real_rows = mask  # type: ignore[attr-defined]


def reseeded(random: nnx.State, key: jax.Array) -> nnx.State:
    """Returns random state with counts of 0, and keys by `key` and the position in the state."""
    streams = []
    for index, (path, leaf) in enumerate(nnx.to_flat_state(random)):
        value = leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        fresh = jax.random.fold_in(key, index) if _jax.is_key(value) else jnp.zeros_like(value)
        if _jax.is_key(value) and value.shape:
            fresh = jax.random.split(fresh, value.shape)
        streams.append((path, _with_value(leaf, fresh)))
    return nnx.from_flat_state(streams)


def is_random(path: Any, value: Any) -> bool:
    """Returns whether a variable, at some path, belongs to a random stream."""
    return isinstance(value, nnx.RngState) or _jax.is_key(value)


def is_loss(path: Any, value: Any) -> bool:
    """Returns whether a variable is a loss of the module's own, by the name of its class."""
    return any(base.__name__ in LOSSES for base in type(value).__mro__)


def _is_left(path: Any, value: Any) -> bool:
    """Returns whether a variable is what calls leave in the module: a loss, or a sown value."""
    return is_loss(path, value) or isinstance(value, nnx.Intermediate)


def _is_kept(path: Any, value: Any) -> bool:
    return not is_random(path, value) and not _is_left(path, value)


def _are_same(found: list[Any], known: list[Any]) -> bool:
    def comparable(settings: list[Any]) -> list[Any]:
        plain = (bool, int, float, str)
        return [(path, x if isinstance(x, plain) else id(x)) for path, x in settings]

    return comparable(found) == comparable(known)


def _nested(state: nnx.State) -> dict[str, Any]:
    """Returns the arrays of a state as nested dicts with strings as keys."""
    flat = {
        _names(path): leaf.get_value() if isinstance(leaf, nnx.Variable) else leaf
        for path, leaf in nnx.to_flat_state(state)
    }
    return traverse_util.unflatten_dict(flat)


def _with_value(leaf: Any, value: Any) -> Any:
    return leaf.replace(value) if isinstance(leaf, nnx.Variable) else value


def _axis_names(variable: Any) -> tuple[str | None, ...]:
    """Returns the names of the dimensions in a variable's metadata; none if it has none."""
    # Differs by version of Flax: "sharding", "sharding_names" or "out_sharding".
    found = map(variable.get_metadata().get, ("sharding_names", "out_sharding", "sharding"))
    return tuple(next(filter(None, found), ()))


def _names(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(map(str, path))


def is_nnx_module(x: Any) -> bool:
    """Returns whether `x` is an NNX module."""
    return isinstance(x, nnx.Module)


def check_unshared(tree: Any) -> None:
    """Raises a TypeError if an NNX variable occurs twice in a tree."""
    seen: dict[int, Any] = {}
    leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, nnx.Variable))
    for path, leaf in leaves:
        if isinstance(leaf, nnx.Variable) and id(leaf) in seen:
            first, second = map(jax.tree_util.keystr, (seen[id(leaf)], path))
            raise TypeError(
                f"The state holds one variable twice, at {first} and {second}, and a step would "
                "treat them as two. Pass nnx.split's parts of an object with shared variables, and "
                "nnx.merge them inside the step."
            )
        seen[id(leaf)] = path


class OpenModule:
    """An NNX module inside a step as a function of its variables of type `nnx.Param`, `params`.

    `close` updates the others. The streams of a module that draws random numbers are seeded from
    the key of the step.
    """

    def __init__(self, module: nnx.Module, key: jax.Array | None) -> None:
        self._module = module
        self._graph, self.params, random, self._rest = nnx.split(module, nnx.Param, is_random, ...)
        if jax.tree.leaves(random) and key is None:
            raise TypeError(
                f"{type(module).__name__} draws random numbers, for which a step needs a key: let "
                "it take one, step(state, batch, key)."
            )
        self._random = random if key is None else reseeded(random, key)

    def pure(self, loss_fn: Callable) -> Callable:
        """Returns a function of parameters: `loss_fn`'s result, and other variables after it."""

        def function(params: nnx.State, *args: Any, **kwargs: Any) -> tuple[Any, nnx.State]:
            module = nnx.merge(self._graph, params, self._random, self._rest, copy=True)
            result = loss_fn(module, *args, **kwargs)
            known = {path for path, _ in nnx.to_flat_state(self._rest)}
            after = nnx.to_flat_state(nnx.state(module))
            return result, nnx.from_flat_state([item for item in after if item[0] in known])

        return function

    def close(self, rest: nnx.State) -> None:
        """Stores the other variables, as the differentiated call left them, in the module."""
        nnx.update(self._module, rest)
