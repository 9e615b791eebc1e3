"""Lower precision for any Flax model.

Either bfloat16 arithmetic with float32 master weights, or bfloat16 throughout.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from tnt_jax.adapters.base import Adapter, Applied, Variables

PRECISIONS = ("float32", "mixed_bfloat16", "bfloat16")


class LowPrecision:
    """An adapter that computes in bfloat16.

    Parameters and floating inputs are cast before the forward pass, outputs to float32 after it.
    Model state keeps its precision: moving averages of bfloat16 stop moving. Layers with a dtype of
    their own keep it.

    Args:
        adapter: Adapter of the model.
        master: Dtype of the parameters, the gradients and the optimizer state: float32
            ("mixed_bfloat16") or bfloat16.
    """

    def __init__(self, adapter: Adapter, *, master: Any) -> None:
        self.inner = adapter
        self.name = adapter.name
        self.holds_variables = adapter.holds_variables
        self._master = master

    def sample_inputs(self) -> Any:
        """Returns what the wrapped adapter returns."""
        return self.inner.sample_inputs()

    def init(self, inputs: Any, *, seed: int) -> Variables:
        """Returns the model's variables, with the parameters in the dtype of the master weights."""
        return self._lowered(self.inner.init(inputs, seed=seed))

    def initializer(self, inputs: Any, *, seed: int) -> Callable[[], Variables] | None:
        """Returns what makes the variables that `init` returns, or None."""
        make = self.inner.initializer(inputs, seed=seed)
        return None if make is None else lambda: self._lowered(make())

    def _lowered(self, variables: Variables) -> Variables:
        return Variables(_cast(variables.params, self._master), variables.model_state)

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
        """Returns the forward pass in bfloat16, with float32 outputs; see `Adapter.apply`."""
        low_params, low_inputs = _cast((params, inputs), jnp.bfloat16)
        applied = self.inner.apply(
            low_params, model_state, low_inputs, key=key, train=train, mask=mask
        )
        changed = jax.tree.map(
            lambda new, old: jnp.asarray(new, old.dtype), applied.model_state, model_state
        )
        return applied._replace(outputs=_cast(applied.outputs, jnp.float32), model_state=changed)

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
        """Returns the model's own metrics; see `Adapter.metric_results`."""
        return self.inner.metric_results(sums)

    def export(self, variables: Variables) -> Any:
        """Returns variables in the form that the model's library uses."""
        return self.inner.export(variables)

    def has_changed(self) -> bool:
        """Returns whether the user has changed the variables of the wrapped object."""
        return self.inner.has_changed()

    def write_back(self, variables: Variables) -> None:
        """Stores variables in the user's own object.

        Its parameters then have the master dtype.
        """
        self.inner.write_back(variables)


def with_precision(adapter: Adapter, precision: str) -> Adapter:
    """Returns an adapter that computes in the given precision.

    Args:
        adapter: Adapter of a Flax model.
        precision: One of `PRECISIONS`.

    Raises:
        ValueError: If the precision is unknown.
    """
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
