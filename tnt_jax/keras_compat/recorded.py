"""Objects that record their constructor arguments, so that a saved model can recreate them."""

from collections.abc import Mapping
from typing import Any, Self

from tnt_jax.keras_compat.configuration import config_of, resolved


class Recorded:
    """Base class of objects that can be recreated from their constructor's arguments.

    Attributes:
        given_arguments: Positional and keyword arguments of the constructor.
    """

    given_arguments: tuple[tuple[Any, ...], dict[str, Any]]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Records the arguments before the constructor runs."""
        made = super().__new__(cls)
        made.given_arguments = (args, kwargs)
        return made

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that make an equal object, by name and as plain values."""
        return config_of(self, "name")

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None
    ) -> Self:
        """Returns the object that a configuration describes, including those of Keras.

        Args:
            config: What `get_config` returned.
            custom_objects: Classes and functions of the user by name, for what the configuration
                names.
        """
        return cls(**resolved(dict(config), _room(cls), custom_objects))


def _room(cls: type) -> str:
    """Returns the package of the first tnt_jax class in a class's bases, such as `"losses"`."""
    names = [base.__module__.split(".") for base in cls.__mro__]
    return next(name[2] for name in names if name[:2] == ["tnt_jax", "keras_compat"])
