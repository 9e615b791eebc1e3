"""Objects that remember how they were made, so that a saved model can make them again."""

from typing import Any, Self


class Recorded:
    """Base class of objects that are rebuilt from their constructor's arguments.

    Attributes:
        given_arguments: Positional and keyword arguments of the constructor.
    """

    given_arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Notes the arguments before the constructor runs."""
        made = super().__new__(cls)
        made.given_arguments = (args, kwargs)
        return made
