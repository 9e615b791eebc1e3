"""What adapters that change a part of another one have in common."""

from collections.abc import Callable, Mapping
from typing import Any

import jax

from tnt_jax.adapters.base import Adapter, Applied, FreshVariables, Variables


class WrappingAdapter:
    """An adapter that does what the one inside does, on the same variables.

    Subclasses say which variables training sees (`outer`), which the wrapped adapter gets
    (`inside`), and how `apply` differs.

    Args:
        adapter: Adapter of the model.

    Attributes:
        inner: That adapter.
        name: Name of the model in tables.
        holds_variables: Whether the user's object holds variables.
        knows_penalty: See `Adapter`.
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
        """Returns what the wrapped adapter returns."""
        return self.inner.sample_inputs()

    def init(self, inputs: Any, *, seed: int) -> Variables:
        """Returns the variables that training sees; see `Adapter.init`."""
        return self.outer(self.inner.init(inputs, seed=seed))

    def initializer(self, inputs: Any, *, seed: int) -> Callable[[], Variables] | None:
        """Returns what makes the variables that `init` returns, or None."""
        make = self.inner.initializer(inputs, seed=seed)
        return None if make is None else lambda: self.outer(make())

    def fresh_variables(self, inputs: Any, *, seed: int) -> FreshVariables | None:
        """Returns the program that makes the variables that `init` returns, or None."""
        fresh = self.inner.fresh_variables(inputs, seed=seed)
        if fresh is None:
            return None
        return fresh._replace(finish=lambda results: self.outer(fresh.finish(results)))

    def attach(self, inputs: Any) -> None:
        """Prepares to compute with variables of another model."""
        self.inner.attach(inputs)

    def apply(
        self,
        params: Any,
        model_state: Any,
        inputs: Any,
        *,
        key: jax.Array | None,
        train: bool,
        mask: jax.Array | None,
    ) -> Applied:
        """Returns the wrapped adapter's forward pass; see `Adapter.apply`."""
        variables = self.inside(Variables(params, model_state))
        return self.inner.apply(*variables, inputs, key=key, train=train, mask=mask)

    def axis_names(self) -> Mapping[str, tuple[str | None, ...]]:
        """Returns what the wrapped adapter returns."""
        return self.inner.axis_names()

    def held_variables(self) -> Mapping[str, Any]:
        """Returns what the wrapped adapter returns."""
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
        """Returns whether the user has assigned arrays to variables of the wrapped object."""
        return self.inner.has_assigned()

    def with_assigned(self, variables: Variables) -> Variables:
        """Returns variables with the arrays that the user has assigned."""
        return self.outer(self.inner.with_assigned(self.inside(variables)))

    def write_back(self, variables: Variables) -> None:
        """Stores variables in the user's own object."""
        self.inner.write_back(self.inside(variables))
