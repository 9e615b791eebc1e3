"""Views: models that apply another module to the variables of a model."""

from typing import Any, TypeVar, cast

_M = TypeVar("_M")


def view(model: _M, module: Any) -> _M:
    """Returns a model that applies another module to this model's current variables.

    It evaluates (after its own `compile`) and predicts but cannot be trained. Use it, for instance,
    to decode token after token with a Transformer that was trained in parallel.

    Args:
        model: The model.
        module: Module of the same library, whose variables are among this model's, at the same
            paths.
    """
    core = cast(Any, model)._core
    other = cast(Any, type(model))(module, seed=core.options.seed, **core.options.for_adapter())
    other._core.view(core.trainer)
    return other
