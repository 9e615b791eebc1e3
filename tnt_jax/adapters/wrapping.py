"""Adapters that change a part of another one.

One trains a part of the parameters; all others become model state, without gradient, reduction and
optimizer state. The other one lowers the precision of any Flax model: bfloat16 arithmetic with
float32 master weights, or bfloat16 throughout.
"""

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import jax
import jax.numpy as jnp

from tnt_jax.adapters.base import Adapter, Applied, FreshVariables, Variables


class _WrappingAdapter(Adapter):
    """An adapter that does what the one inside does, on the same variables.

    Subclasses say which variables training sees (`outer`), made of those of the wrapped adapter,
    which of these the wrapped one gets (`inside`), and how `apply` differs.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.inner = adapter
        self.name = adapter.name
        self.holds_variables = adapter.holds_variables
        self.knows_penalty = adapter.knows_penalty

    def outer(self, variables: Variables) -> Variables:
        return variables

    def inside(self, variables: Variables) -> Variables:
        return variables

    def sample_inputs(self) -> Any:
        return self.inner.sample_inputs()

    def init(self, inputs: Any, *, seed: int) -> Variables:
        return self.outer(self.inner.init(inputs, seed=seed))

    def initializer(self, inputs: Any, *, seed: int) -> Callable[[], Variables] | None:
        make = self.inner.initializer(inputs, seed=seed)
        return None if make is None else lambda: self.outer(make())

    def fresh_variables(self, inputs: Any, *, seed: int) -> FreshVariables | None:
        fresh = self.inner.fresh_variables(inputs, seed=seed)
        if fresh is None:
            return None
        return fresh._replace(finish=lambda results: self.outer(fresh.finish(results)))

    def attach(self, inputs: Any) -> None:
        self.inner.attach(inputs)

    def apply(self, params: Any, model_state: Any, inputs: Any, **options: Any) -> Applied:
        variables = self.inside(Variables(params, model_state))
        return self.inner.apply(*variables, inputs, **options)

    def axis_names(self) -> Mapping[str, tuple[str | None, ...]]:
        return self.inner.axis_names()

    def held_variables(self) -> Mapping[str, Any]:
        return self.inner.held_variables()

    def held_metrics(self) -> dict[str, Any]:
        return self.inner.held_metrics()

    def metric_results(self, sums: Any) -> dict[str, float]:
        return self.inner.metric_results(sums)

    def export(self, variables: Variables) -> Any:
        return self.inner.export(self.inside(variables))

    def trains_others(self) -> bool:
        return self.inner.trains_others()

    def has_assigned(self) -> bool:
        return self.inner.has_assigned()

    def with_assigned(self, variables: Variables) -> Variables:
        return self.outer(self.inner.with_assigned(self.inside(variables)))

    def write_back(self, variables: Variables) -> None:
        self.inner.write_back(self.inside(variables))


class _LowPrecision(_WrappingAdapter):
    """An adapter that computes in bfloat16.

    Parameters and floating inputs are cast before the forward pass, outputs to float32 after it.
    Model state keeps its precision: moving averages of bfloat16 stop moving. Layers with a dtype of
    their own keep it. Parameters, gradients and optimizer state have the dtype `master`.
    """

    def __init__(self, adapter: Adapter, *, master: Any) -> None:
        super().__init__(adapter)
        self._master = master

    def outer(self, variables: Variables) -> Variables:
        return Variables(_cast(variables.params, self._master), variables.model_state)

    def apply(self, params: Any, model_state: Any, inputs: Any, **options: Any) -> Applied:
        low_params, low_inputs = _cast((params, inputs), jnp.bfloat16)
        applied = super().apply(low_params, model_state, low_inputs, **options)
        changed = jax.tree.map(
            lambda new, old: jnp.asarray(new, old.dtype), applied.model_state, model_state
        )
        return applied._replace(outputs=_cast(applied.outputs, jnp.float32), model_state=changed)


# The dtype of the master weights; None where nothing is cast.
_MASTERS = {"float32": None, "mixed_bfloat16": jnp.float32, "bfloat16": jnp.bfloat16}


def with_precision(adapter: Adapter, precision: str) -> Adapter:
    """Returns an adapter that computes in a precision."""
    if precision not in _MASTERS:
        raise ValueError(
            f"precision must be one of {', '.join(map(repr, _MASTERS))}, but is {precision!r}."
        )
    master = _MASTERS[precision]
    return adapter if master is None else _LowPrecision(adapter, master=master)


def _cast(tree: Any, dtype: Any) -> Any:
    def cast(x: Any) -> Any:
        return jnp.asarray(x, dtype) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x

    return jax.tree.map(cast, tree)


# The key of the parameters that are not trained, beside the model's own state.
_FROZEN = "frozen_params"


class PartlyTrained(_WrappingAdapter):
    """An adapter that trains only some of the parameters.

    A pattern names a parameter, such as `encoder/Dense_0/kernel`, or a subtree by the beginning of
    its path, and may contain `*`, which also matches slashes. None makes all trainable.
    """

    def __init__(
        self, adapter: Adapter, *, trainable: Sequence[str] | None, frozen: Sequence[str]
    ) -> None:
        super().__init__(adapter)
        self._trainable = trainable
        self._frozen = tuple(frozen)

    def outer(self, variables: Variables) -> Variables:
        """Returns the trained parameters, and the others as part of the model state."""
        from flax.traverse_util import flatten_dict, unflatten_dict

        paths = flatten_dict(variables.params)
        names = {path: "/".join(path) for path in paths}
        for pattern in (*(self._trainable or ()), *self._frozen):
            if not any(_matches(name, pattern) for name in names.values()):
                known = ", ".join(sorted(names.values()))
                raise ValueError(
                    f"trainable or frozen names {pattern!r}, but there is no such parameter. The "
                    f"parameters are {known}."
                )
        frozen = {path: leaf for path, leaf in paths.items() if not self._is_trained(names[path])}
        trained = {path: leaf for path, leaf in paths.items() if path not in frozen}
        if not trained:
            raise ValueError(
                f"trainable={self._trainable} and frozen={list(self._frozen)} leave no parameter "
                "to train."
            )
        # The kind of dict decides the order of parameters.
        params = type(variables.params)(unflatten_dict(trained))
        return Variables(params, {**variables.model_state, _FROZEN: unflatten_dict(frozen)})

    def inside(self, variables: Variables) -> Variables:
        """Returns all parameters, and the model state without them."""
        from flax.traverse_util import flatten_dict, unflatten_dict

        state = dict(variables.model_state)
        flat = flatten_dict(variables.params) | flatten_dict(state.pop(_FROZEN))
        return Variables(unflatten_dict(flat), state)

    def apply(self, params: Any, model_state: Any, inputs: Any, **options: Any) -> Applied:
        """Returns the model's forward pass with all parameters; see `Adapter.apply`."""
        applied = super().apply(params, model_state, inputs, **options)
        return applied._replace(model_state={**applied.model_state, _FROZEN: model_state[_FROZEN]})

    def _is_trained(self, name: str) -> bool:
        chosen = ("*",) if self._trainable is None else self._trainable
        is_chosen = any(_matches(name, pattern) for pattern in chosen)
        return is_chosen and not any(_matches(name, pattern) for pattern in self._frozen)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, pattern.rstrip("/") + "/*")
