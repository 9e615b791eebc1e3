"""Lower precision for any Flax model.

Either bfloat16 arithmetic with float32 master weights, or bfloat16 throughout.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tnt_jax.adapters.base import Adapter, Applied, Variables
from tnt_jax.adapters.wrapping import WrappingAdapter

PRECISIONS = ("float32", "mixed_bfloat16", "bfloat16")


class LowPrecision(WrappingAdapter):
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
        super().__init__(adapter)
        self._master = master

    def outer(self, variables: Variables) -> Variables:
        """Returns the model's variables, with the parameters in the dtype of the master weights."""
        return Variables(_cast(variables.params, self._master), variables.model_state)

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
        applied = super().apply(
            low_params, model_state, low_inputs, key=key, train=train, mask=mask
        )
        changed = jax.tree.map(
            lambda new, old: jnp.asarray(new, old.dtype), applied.model_state, model_state
        )
        return applied._replace(outputs=_cast(applied.outputs, jnp.float32), model_state=changed)


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
