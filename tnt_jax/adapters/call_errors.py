"""Explains errors inside a Flax module, and how to correct them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flax import errors

from tnt_jax.adapters.base import TRAIN_FLAGS, CallError

_FLAG = (
    f"Let its __call__ take a flag ({', '.join(TRAIN_FLAGS)}), which fit sets to tell training "
    "from evaluation: def __call__(self, x, train: bool)"
)


@contextmanager
def explained(name: str, inputs: Any, *, train: bool) -> Iterator[None]:
    """Turns errors of a forward pass with a missing flag, wrong key or axis into a `CallError`."""
    try:
        yield
    except errors.InvalidRngError as error:
        if train:
            raise
        raise CallError(
            f"The model {name!r} applies dropout in evaluation ({_first_sentence(error)}). "
            f"{_FLAG}, and nn.Dropout(rate, deterministic=not train). For numbers that a model "
            "samples in evaluation, too, take another stream, such as make_rng('sample')."
        ) from None
    except errors.ModifyScopeVariableError as error:
        if train:
            raise
        raise CallError(
            f"The model {name!r} changes its variables in evaluation, as a BatchNorm that always "
            f"trains does ({_first_sentence(error)}). {_FLAG}, and "
            "nn.BatchNorm(use_running_average=not train)."
        ) from None
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise CallError(
            f"The model {name!r} names a mesh axis that does not exist ({_first_sentence(error)}). "
            "The ranks form the axis 'data': BatchNorm(axis_name='data')."
        ) from None
    except KeyError as error:
        if not isinstance(inputs, Mapping) or not error.args or error.args[0] in inputs:
            raise
        raise CallError(
            f"The model {name!r} reads {error.args[0]!r} of its inputs, which are a dict with the "
            f"keys {', '.join(map(str, inputs))}."
        ) from None


def _first_sentence(error: Exception) -> str:
    return str(error).split(". ")[0].split(" (https")[0]
