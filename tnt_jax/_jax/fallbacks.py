"""Plain JAX where a name outside its documented API is missing, or behaves in another way."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from tnt_jax.log import logger

# How a name that is gone, or has other arguments, shows.
CHANGED = (ImportError, AttributeError, TypeError, KeyError, NotImplementedError)


def or_plain(plain: Callable, *, lost: str) -> Callable[[Callable], Callable]:
    """Decorates a function that uses private names; once they fail, `plain` is called instead.

    One warning says what the job does without (`lost`). If `plain` fails as well, the arguments are
    wrong, and its error is raised. Private names are imported inside the function.
    """

    def decorate(function: Callable) -> Callable:
        has_failed = False

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal has_failed
            if has_failed:
                return plain(*args, **kwargs)
            try:
                return function(*args, **kwargs)
            except CHANGED as error:
                result = plain(*args, **kwargs)
                has_failed = True
                logger.warning(
                    "JAX %s differs from the versions that tnt_jax knows (%s: %s). %s",
                    jax.__version__,
                    type(error).__name__,
                    error,
                    lost,
                )
                return result

        call.plain = plain  # type: ignore[attr-defined]
        return call

    return decorate
