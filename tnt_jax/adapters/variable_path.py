"""Paths of variables that have another name in files."""

from typing import Self


class VariablePath(str):
    """A path in a library that numbers objects, with the variable's name in files.

    It is a key of parameters or model state, such as `dense_3/kernel`, whose last parts the library
    numbers anew for every object.

    It equals the plain string. Two of them are equal if they also have the same name in files.

    Args:
        path: Path in the library.
        saved_as: Name of the variable in files, which depends only on the structure of the model.
    """

    __slots__ = ("saved_as",)
    saved_as: str

    def __new__(cls, path: str, saved_as: str) -> Self:
        """Returns the path, with the name beside it."""
        made = super().__new__(cls, path)
        made.saved_as = saved_as
        return made

    def __eq__(self, other: object) -> bool:
        """Compares paths, and names in files where both have one."""
        return str.__eq__(self, other) is True and self.saved_as == getattr(
            other, "saved_as", self.saved_as
        )

    def __ne__(self, other: object) -> bool:
        """Returns whether paths differ."""
        return not self == other

    __hash__ = str.__hash__

    def __reduce__(self) -> tuple[type[Self], tuple[str, str]]:
        """Pickles and copies with the name."""
        return type(self), (str(self), self.saved_as)
