"""Models as pure functions of arrays; no other modules import a library of models."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from tnt_jax.adapters.base import Adapter
from tnt_jax.adapters.wrapping import PartlyTrained, with_precision


def wrap(
    module: Any,
    *,
    variables: Mapping[str, Any] | None,
    precision: str,
    trainable: Sequence[str] | None,
    frozen: Sequence[str],
    synchronize_batch_norm: bool,
) -> Adapter:
    """Returns the adapter for a model with the options of `tnt_jax.Model`, which it checks."""
    for name, paths in (("trainable", trainable), ("frozen", frozen)):
        if isinstance(paths, str):
            raise TypeError(
                f"{name} must be a sequence of paths, such as [{paths!r}], but is a string."
            )
    adapter = adapter_for(
        module, variables=variables, synchronize_batch_norm=synchronize_batch_norm
    )
    if precision != "float32" and _kind_with_variables(module) == "Keras":
        raise ValueError(
            f"precision={precision!r} is for Flax modules. A Keras model is built under a policy: "
            f"call keras.config.set_dtype_policy({precision!r}) before its layers are made."
        )
    adapter = with_precision(adapter, precision)
    if trainable is None and not frozen:
        return adapter
    return PartlyTrained(adapter, trainable=trainable, frozen=frozen)


def adapter_for(
    module: Any, *, variables: Mapping[str, Any] | None = None, synchronize_batch_norm: bool = False
) -> Adapter:
    """Returns the adapter for a model; `variables` to start from are for Linen modules alone."""
    if isinstance(module, type):
        raise TypeError(
            f"tnt_jax.Model needs a module, but got the class {module.__name__}. Create one: "
            f"{module.__name__}(...)."
        )
    if synchronize_batch_norm and _kind_with_variables(module) != "Keras":
        raise ValueError(
            "synchronize_batch_norm is for Keras models; give the BatchNorm layers of a Flax "
            "module axis_name='data'."
        )
    linen = sys.modules.get("flax.linen")
    if linen is not None and isinstance(module, linen.Module):
        from tnt_jax.adapters.linen import LinenAdapter

        return LinenAdapter(module, variables=variables)
    kind = _kind_with_variables(module)
    if kind is None:
        raise TypeError(
            "tnt_jax.Model needs a flax.linen.Module, a flax.nnx.Module or a keras.Model, but got "
            f"{type(module).__module__}.{type(module).__qualname__}."
        )
    if variables is not None:
        raise ValueError(
            f"variables are for Linen modules; a {kind} model holds its own. Set them in the model "
            "before it is wrapped."
        )
    if kind == "Keras":
        from tnt_jax.adapters.keras import KerasAdapter

        return KerasAdapter(module, synchronized=synchronize_batch_norm)
    from tnt_jax.adapters.nnx import NnxAdapter

    return NnxAdapter(module)


@contextmanager
def batch_norm_off() -> Iterator[None]:
    """Lets batch normalisation of any library use its moving statistics in the `with` block."""
    with ExitStack() as stack:
        if "flax.linen" in sys.modules or "flax.nnx" in sys.modules:
            from tnt_jax.adapters.any_flax import flax_batch_norm_off

            stack.enter_context(flax_batch_norm_off())
        if "keras" in sys.modules:
            from tnt_jax.adapters.keras_layers import keras_batch_norm_off

            stack.enter_context(keras_batch_norm_off())
        yield


def _kind_with_variables(module: Any) -> str | None:
    """Returns the library, if it is in use, of a module that holds its own variables."""
    keras, nnx = sys.modules.get("keras"), sys.modules.get("flax.nnx")
    # Keras first: with its NNX integration switched on, its models are NNX modules, too.
    if keras is not None and isinstance(module, keras.Model):
        return "Keras"
    return "NNX" if nnx is not None and isinstance(module, nnx.Module) else None
