"""Logs that wait for the devices only on access."""

from collections.abc import Callable
from typing import Any

# Methods of dict that read its contents.
_READERS = (
    "__contains__", "__delitem__", "__eq__", "__getitem__", "__ior__", "__iter__", "__len__",
    "__ne__", "__or__", "__repr__",
    "__reversed__", "__ror__", "__setitem__", "clear", "copy", "get", "items", "keys", "pop",
    "popitem", "setdefault", "update",
    "values",
)  # fmt: skip


class LazyLogs(dict[str, float]):
    """The logs of a step: a dict that computes its contents on first access.

    Only then does it wait for the devices.

    Args:
        read: Computes the logs.
    """

    def __init__(self, read: Callable[[], dict[str, float]]) -> None:
        # json.dumps reads the size in C before it calls a method: an empty dict would be written as
        # {}.
        super().__init__(loss=0.0)
        self._read: Callable[[], dict[str, float]] | None = read

    def __bool__(self) -> bool:
        """Returns True: every step has a loss, so `logs or {}` need not wait."""
        return True

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles and copies as a plain dict."""
        return dict, (dict(self),)

    def _fill(self) -> None:
        if self._read is not None:
            read, self._read = self._read, None
            dict.clear(self)
            dict.update(self, read())


def _filled_before(name: str) -> Callable:
    method = getattr(dict, name)

    def call(self: LazyLogs, *args: Any, **kwargs: Any) -> Any:
        self._fill()
        return method(self, *args, **kwargs)

    call.__name__ = name
    call.__doc__ = method.__doc__
    return call


for _name in _READERS:
    setattr(LazyLogs, _name, _filled_before(_name))
