"""Flax Linen modules as pure functions, with all collections and random streams."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from types import CodeType
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import errors
from flax.core import Scope, unfreeze

from tnt_jax.adapters.base import LOSSES, Adapter, Applied, CallStyle, FreshVariables, Variables
from tnt_jax.adapters.batch_statistics import normalize, real_row_moments
from tnt_jax.adapters.call_errors import explained
from tnt_jax.adapters.forward_passes import (
    replaced,
    with_draws_by_row,
    with_penalty_of_real_rows,
    with_varying_loops,
)
from tnt_jax.distributed.sums.random_rows import Draws

_eval_shape = jax.eval_shape
# The functions that Flax passes to `jax.eval_shape`. Checked with Flax 0.12.8; where there are
# none, each trace takes longer.
_PARAM_CODES = [code for code in Scope.param.__code__.co_consts if isinstance(code, CodeType)]


def _initializer_call(function: Callable) -> Any:
    """Returns an initializer and its arguments if Flax calls it in `function`; None otherwise."""
    code = getattr(function, "__code__", None)
    if code not in _PARAM_CODES:
        return None
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    call = tuple((name, _hashable(cell.cell_contents)) for name, cell in cells)
    try:
        hash(call)
    except TypeError:  # An argument is an array, for example.
        return None
    return call


def _hashable(x: Any) -> Any:
    """Returns arguments, or a shape, without lists and dicts."""
    if isinstance(x, dict):
        return tuple((name, _hashable(value)) for name, value in x.items())
    return tuple(map(_hashable, x)) if isinstance(x, (tuple, list)) else x


class LinenAdapter(Adapter):
    """A Linen module, and the variables to start from, as `module.init` returns them, if given."""

    holds_variables = False
    knows_penalty = False

    def __init__(self, module: nn.Module, *, variables: Mapping[str, Any] | None = None) -> None:
        if variables is not None and "params" not in variables:
            raise ValueError(
                "variables must be what module.init returns, with a collection 'params', but its "
                f"collections are {sorted(variables)}."
            )
        self.module = module
        self.name = module.name or type(module).__name__
        self._given = variables
        self._style = CallStyle.of(module.__call__)
        self._shapes: dict[Any, Any] = {}
        self.draws: dict[Any, Draws] = {}
        self.has_warned = False

    def init(self, inputs: Any, *, seed: int) -> Variables:
        """Returns the given variables, or those of `module.init` with one row of zeros."""
        return self._fresh(inputs, seed) if self._given is None else self._separated(self._given)

    def initializer(self, inputs: Any, *, seed: int) -> Callable[[], Variables] | None:
        """Returns what makes fresh variables; None if variables were given."""
        return None if self._given is not None else lambda: self._fresh(inputs, seed)

    def fresh_variables(self, inputs: Any, *, seed: int) -> FreshVariables | None:
        """Returns the program that makes fresh variables; None if variables were given."""
        if self._given is not None:
            return None
        make, args = self._maker(inputs)
        key = partial(jax.random.key, seed)  # A program of its own.
        with explained(self.name, inputs, train=False):
            traced = make.trace(jax.eval_shape(key), args)
        return FreshVariables(traced, lambda: (key(), args), self._separated)

    @with_penalty_of_real_rows
    @with_draws_by_row
    @with_varying_loops
    def apply(
        self, params: Any, model_state: Any, inputs: Any, *, key: jax.Array, train: bool, mask: Any
    ) -> Applied:
        """Returns the module's forward pass over this rank's rows; see `Adapter.apply`."""
        args, kwargs = self._style.arguments(inputs, train=train)
        variables = {"params": params, **model_state}
        # Linen falls back to the stream "params" for every stream it is not given.
        rngs = {"params": jax.random.fold_in(key, 0)}
        known_shapes = replaced(jax, {"eval_shape": self._eval_shape})
        if not train:
            no_dropout = replaced(nn.Module, {"make_rng": _make_rng_in_evaluation})
            with explained(self.name, inputs, train=False), known_shapes, no_dropout:
                outputs = self.module.apply(variables, *args, rngs=rngs, **kwargs)
                return Applied(outputs, model_state, 0.0)
        rngs["dropout"] = jax.random.fold_in(key, 1)
        real_rows = nullcontext()
        if mask is not None:
            real_rows = nn.intercept_methods(statistics_without_padding(mask))
        with explained(self.name, inputs, train=True), real_rows, known_shapes:
            outputs, changed = self.module.apply(
                variables, *args, rngs=rngs, mutable=[*model_state, *LOSSES], **kwargs
            )
        sown = [changed.get(name, {}) for name in LOSSES]
        penalty = sum((jnp.sum(x) for x in jax.tree.leaves(sown)), start=0.0)
        state = {name: changed.get(name, value) for name, value in model_state.items()}
        return Applied(outputs, state, penalty)

    def _eval_shape(self, function: Callable, *args: Any, **kwargs: Any) -> Any:
        """Stands for `jax.eval_shape`: Flax traces each initializer again in every trace."""
        call = _initializer_call(function)
        if call is None:
            return _eval_shape(function, *args, **kwargs)
        if call not in self._shapes:
            self._shapes[call] = _eval_shape(function, *args, **kwargs)
        return self._shapes[call]

    def export(self, variables: Variables) -> dict[str, Any]:
        """Returns variables in the form that `module.apply` takes."""
        return {"params": variables.params, **variables.model_state}

    def _fresh(self, inputs: Any, seed: int) -> Variables:
        make, args = self._maker(inputs)
        with explained(self.name, inputs, train=False):
            return self._separated(make(jax.random.key(seed), args))

    def _maker(self, inputs: Any) -> tuple[Any, tuple[Any, ...]]:
        """Returns the jitted function of a key and a row that makes fresh variables, and a row."""
        row = jax.tree.map(lambda x: np.zeros((1, *x.shape[1:]), jnp.result_type(x)), inputs)
        args, kwargs = self._style.arguments(row, train=False)
        return jax.jit(lambda key, args: self.module.init(key, *args, **kwargs)), args

    def _separated(self, variables: Mapping[str, Any]) -> Variables:
        left_out = ("params", "intermediates", *LOSSES)
        variables = unfreeze(dict(variables))  # Steps return plain dicts.
        others = {name: value for name, value in variables.items() if name not in left_out}
        return Variables(variables.get("params", {}), others)


_make_rng = nn.Module.make_rng


def _make_rng_in_evaluation(module: nn.Module, name: str = "params") -> jax.Array:
    """Returns a key of a module that samples, and refuses dropout."""
    if name == "dropout" or isinstance(module, nn.Dropout):
        raise errors.InvalidRngError(f'{module.name} needs PRNG for "{name}"')
    return _make_rng(module, name)


def statistics_without_padding(mask: jax.Array) -> Callable:
    """Returns an interceptor that keeps masked rows out of the statistics of `nn.BatchNorm`."""

    # Linen's own `mask` averages the means of ranks without weighting them by their rows.
    def intercept(
        call: Callable, args: tuple, kwargs: dict[str, Any], context: nn.module.InterceptorContext
    ) -> Any:
        layer = context.module
        if not isinstance(layer, nn.BatchNorm) or context.method_name != "__call__":
            return call(*args, **kwargs)
        x, inference = _batch_norm_arguments(layer, *args, **kwargs)
        row_is_elsewhere = x.shape[0] != mask.shape[0] or layer.axis % x.ndim == 0
        is_masked = kwargs.get("mask") is not None
        if inference or row_is_elsewhere or is_masked or layer.axis_index_groups is not None:
            return call(*args, **kwargs)
        mean, var = real_row_moments(x, mask, feature_dim=layer.axis, axis_name=layer.axis_name)
        for name, value in (("mean", mean), ("var", var)):
            moving = layer.momentum * layer.get_variable("batch_stats", name)
            layer.put_variable("batch_stats", name, moving + (1 - layer.momentum) * value)
        return _normalized(layer, x, mean, var)

    return intercept


def _batch_norm_arguments(
    layer: nn.BatchNorm, x: jax.Array, use_running_average: bool | None = None, **_: Any
) -> tuple[jax.Array, bool]:
    return x, bool(
        nn.merge_param("use_running_average", layer.use_running_average, use_running_average)
    )


def by_moving_statistics(
    call: Callable, args: tuple, kwargs: dict[str, Any], context: nn.module.InterceptorContext
) -> Any:
    """An interceptor that lets `nn.BatchNorm` use its moving statistics."""
    layer = context.module
    if not isinstance(layer, nn.BatchNorm) or context.method_name != "__call__":
        return call(*args, **kwargs)
    if layer.axis_name is not None:
        jax.lax.axis_size(layer.axis_name)  # Raises a NameError if there is no such axis.
    moments = (layer.get_variable("batch_stats", name) for name in ("mean", "var"))
    return _normalized(layer, _batch_norm_arguments(layer, *args, **kwargs)[0], *moments)


def _normalized(layer: nn.BatchNorm, x: jax.Array, mean: jax.Array, var: jax.Array) -> jax.Array:
    scale = layer.get_variable("params", "scale") if layer.use_scale else None
    bias = layer.get_variable("params", "bias") if layer.use_bias else None
    y = normalize(
        x, mean, var, scale=scale, bias=bias, feature_dim=layer.axis, epsilon=layer.epsilon
    )
    return y.astype(layer.dtype or x.dtype)
