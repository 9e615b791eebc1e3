"""Imports Optuna where something needs it, or says how to install it."""

from typing import Any


def import_optuna(needed_by: str) -> Any:
    """Returns the module `optuna`; a ModuleNotFoundError says what to install for a caller."""
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{needed_by} needs Optuna, but {error.name} is not installed here. Install it with: "
            'pip install "tnt-jax[optuna]"',
            name=error.name,
        ) from error
    return optuna
