"""Lets `Model` expose methods and attributes of its parts under the same names."""

from collections.abc import Callable
from functools import wraps
from typing import Any, Concatenate, Generic, Never, ParamSpec, TypeVar, overload

_P = ParamSpec("_P")
_T = TypeVar("_T")


def method_of(
    part: str, function: Callable[Concatenate[Any, _P], _T]
) -> Callable[Concatenate[Any, _P], _T]:
    """Returns a method that calls the method of a part.

    Args:
        part: Name of the attribute that holds the part.
        function: Method of its class.
    """

    @wraps(function)
    def call(self: Any, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return function(getattr(self, part), *args, **kwargs)

    return call


class AttributeOf(Generic[_T]):
    """An attribute that reads the same attribute of a part.

    Args:
        part: Name of the attribute that holds the part.
        kind: Class of the part, for the documentation.
        name: Name of the attribute of the part; by default the same name.
    """

    def __init__(self, part: str, kind: type, name: str | None = None) -> None:
        self._part = part
        self._kind = kind
        self._name = name

    def __set_name__(self, owner: type, name: str) -> None:
        """Receives the name of the attribute."""
        self._name = self._name or name
        member = getattr(self._kind, self._name, None)
        # Fields of a dataclass are documented by the class that exposes them.
        self.__doc__ = member.__doc__ if isinstance(member, property) else None

    @overload
    def __get__(self, holder: None, owner: type) -> "AttributeOf[_T]": ...

    @overload
    def __get__(self, holder: Any, owner: type) -> _T: ...

    def __get__(self, holder: Any, owner: type) -> Any:
        """Returns the attribute of the part."""
        return self if holder is None else getattr(getattr(holder, self._part), str(self._name))

    def __set__(self, holder: Any, value: Never) -> None:
        """Raises an AttributeError; see `SettableAttributeOf`."""
        raise AttributeError(f"The attribute {self._name!r} cannot be set.")


class SettableAttributeOf(AttributeOf[_T]):
    """An attribute that reads and sets the same attribute of a part."""

    def __set__(self, holder: Any, value: _T) -> None:
        """Sets the attribute of the part."""
        setattr(getattr(holder, self._part), str(self._name), value)
