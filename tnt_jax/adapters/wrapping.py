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


class WrappingAdapter(Adapter):
    """An adapter that does what the one inside does, on the same variables.

    Subclasses say which variables training sees (`outer`), which the wrapped adapter gets
    (`inside`), and how `apply` differs.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.inner = adapter
        self.name = adapter.name
        self.holds_variables = adapter.holds_variables
        self.knows_penalty = adapter.knows_penalty

    def outer(self, variables: Variables) -> Variables:
        """Returns the variables that training sees, made of those of the wrapped adapter."""
        return variables

    def inside(self, variables: Variables) -> Variables:
        """Returns the variables of the wrapped adapter, made of those that training sees."""
        return variables

    def sample_inputs(self) -> Any:
        """Returns inputs to build the wrapped adapter with, or None."""
        return self.inner.sample_inputs()

    def init(self, inputs: Any, *, seed: int) -> Variables:
        """Returns fresh variables that training sees."""
        return self.outer(self.inner.init(inputs, seed=seed))

    def initializer(self, inputs: Any, *, seed: int) -> Callable[[], Variables] | None:
        """Returns a function like `init` that JAX can trace; None if the variables exist."""
        make = self.inner.initializer(inputs, seed=seed)
        return None if make is None else lambda: self.outer(make())

    def fresh_variables(self, inputs: Any, *, seed: int) -> FreshVariables | None:
        """Returns the program that makes what `init` returns; None if that exists."""
        fresh = self.inner.fresh_variables(inputs, seed=seed)
        if fresh is None:
            return None
        return fresh._replace(finish=lambda results: self.outer(fresh.finish(results)))

    def attach(self, inputs: Any) -> None:
        """Prepares the wrapped adapter to compute with variables of another model."""
        self.inner.attach(inputs)

    def apply(self, params: Any, model_state: Any, inputs: Any, **options: Any) -> Applied:
        """Returns the wrapped adapter's forward pass; see `Adapter.apply`."""
        variables = self.inside(Variables(params, model_state))
        return self.inner.apply(*variables, inputs, **options)

    def axis_names(self) -> Mapping[str, tuple[str | None, ...]]:
        """Returns the wrapped adapter's names of dimensions; see `Adapter.axis_names`."""
        return self.inner.axis_names()

    def held_variables(self) -> Mapping[str, Any]:
        """Returns a Keras model's variables; see `Adapter.held_variables`."""
        return self.inner.held_variables()

    def held_metrics(self) -> dict[str, Any]:
        """Returns the model's own metrics; see `Adapter.held_metrics`."""
        return self.inner.held_metrics()

    def metric_results(self, sums: Any) -> dict[str, float]:
        """Returns the results of the model's own metrics; see `Adapter.metric_results`."""
        return self.inner.metric_results(sums)

    def export(self, variables: Variables) -> Any:
        """Returns variables in the form that the model's library uses."""
        return self.inner.export(self.inside(variables))

    def trains_others(self) -> bool:
        """Returns whether the user's object trains other variables than when last read."""
        return self.inner.trains_others()

    def has_assigned(self) -> bool:
        """Returns whether arrays were assigned to the user's object; see `Adapter.has_assigned`."""
        return self.inner.has_assigned()

    def with_assigned(self, variables: Variables) -> Variables:
        """Returns variables with the arrays that were assigned to the user's object."""
        return self.outer(self.inner.with_assigned(self.inside(variables)))

    def write_back(self, variables: Variables) -> None:
        """Stores trained variables in the user's own object, if it holds any."""
        self.inner.write_back(self.inside(variables))


PRECISIONS = ("float32", "mixed_bfloat16", "bfloat16")


class LowPrecision(WrappingAdapter):
    """An adapter that computes in bfloat16.

    Parameters and floating inputs are cast before the forward pass, outputs to float32 after it.
    Model state keeps its precision: moving averages of bfloat16 stop moving. Layers with a dtype of
    their own keep it. Parameters, gradients and optimizer state have the dtype `master`: float32
    ("mixed_bfloat16") or bfloat16.
    """

    def __init__(self, adapter: Adapter, *, master: Any) -> None:
        super().__init__(adapter)
        self._master = master

    def outer(self, variables: Variables) -> Variables:
        """Returns the model's variables, with the parameters in the dtype of the master weights."""
        return Variables(_cast(variables.params, self._master), variables.model_state)

    def apply(self, params: Any, model_state: Any, inputs: Any, **options: Any) -> Applied:
        """Returns the forward pass in bfloat16, with float32 outputs; see `Adapter.apply`."""
        low_params, low_inputs = _cast((params, inputs), jnp.bfloat16)
        applied = super().apply(low_params, model_state, low_inputs, **options)
        changed = jax.tree.map(
            lambda new, old: jnp.asarray(new, old.dtype), applied.model_state, model_state
        )
        return applied._replace(outputs=_cast(applied.outputs, jnp.float32), model_state=changed)


def with_precision(adapter: Adapter, precision: str) -> Adapter:
    """Returns an adapter that computes in a precision, one of `PRECISIONS`."""
    if precision not in PRECISIONS:
        raise ValueError(
            f"precision must be one of {', '.join(map(repr, PRECISIONS))}, but is {precision!r}."
        )
    if precision == "float32":
        return adapter
    return LowPrecision(
        adapter, master=jnp.float32 if precision == "mixed_bfloat16" else jnp.bfloat16
    )


def _cast(tree: Any, dtype: Any) -> Any:
    def cast(x: Any) -> Any:
        return jnp.asarray(x, dtype) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x

    return jax.tree.map(cast, tree)


# The key of the parameters that are not trained, beside the model's own state.
_FROZEN = "frozen_params"


class PartlyTrained(WrappingAdapter):
    """An adapter that trains only some of the parameters.

    A parameter's path is written `encoder/Dense_0/kernel`. A pattern names a parameter, or a
    subtree by the beginning of its path, and may contain `*`, which also matches slashes. All
    parameters are trainable if that is None.
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
        return Variables(
            type(variables.params)(unflatten_dict(trained)),
            {**variables.model_state, _FROZEN: unflatten_dict(frozen)},
        )

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
        is_chosen = self._trainable is None or any(
            _matches(name, pattern) for pattern in self._trainable
        )
        return is_chosen and not any(_matches(name, pattern) for pattern in self._frozen)


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or fnmatchcase(name, pattern.rstrip("/") + "/*")
