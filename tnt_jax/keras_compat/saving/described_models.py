"""Creates models from descriptions, as written by `Model.get_config` and `Model.save`."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tnt_jax.keras_compat.saving.rebuild import Rebuilder, construct

_M = TypeVar("_M")


def model_from(config: Any, rebuild: Rebuilder, kind: Callable[..., _M]) -> _M:
    """Returns a model from a result of `Model.get_config`, with fresh weights, not compiled."""
    if (
        not isinstance(config, Mapping)
        or "options" not in config
        or not {"keras", "module"} & set(config)
    ):
        raise ValueError(
            "A configuration is what Model.get_config returned: a dict with 'options' and with "
            "'module' or 'keras'."
        )
    module = rebuild({"keras": config["keras"]} if "keras" in config else config["module"])
    return model_around(module, config["options"], rebuild, kind)


def model_around(module: Any, options: Any, rebuild: Rebuilder, kind: Callable[..., _M]) -> _M:
    """Returns a model that wraps a module, with the described options."""
    given = described_arguments(
        rebuild(options), kind, leave_out=("module", "variables", "ranks_per_host")
    )
    return construct(kind, "tnt_jax.Model", [module], given)


def described_arguments(
    given: Any, function: Any, *, leave_out: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns a description, which must be the arguments of a function."""
    parameters = inspect.signature(function).parameters
    takes_any = any(x.kind is inspect.Parameter.VAR_KEYWORD for x in parameters.values())
    known = parameters.keys() - set(leave_out)
    named = given.keys() if isinstance(given, dict) else {None}
    if not (named <= known or (takes_any and named.isdisjoint({None, *leave_out}))):
        raise ValueError(
            f"A saved model has these arguments of {function.__name__}: {sorted(known)}, but this "
            f"one has {given!r:.200}."
        )
    return given
