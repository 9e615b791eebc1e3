"""Replaces functions of other libraries while one of their models is traced."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Of the process, as the libraries are. Two threads that replace the same function must not undo one
# another.
_lock = threading.RLock()


@contextmanager
def replaced(owner: Any, functions: dict[str, Callable]) -> Iterator[None]:
    """Replaces attributes of a module or class in the `with` block.

    Other threads that call them meanwhile get the originals.

    Args:
        owner: Module or class that defines them itself.
        functions: Replacement of each attribute, by name.
    """
    thread = threading.get_ident()
    with _lock:
        # As they are stored: reading a static method through its class would unwrap it.
        originals = {name: vars(owner)[name] for name in functions}
        for name, function in functions.items():
            setattr(owner, name, _in_thread(thread, function, getattr(owner, name)))
        try:
            yield
        finally:
            for name, original in originals.items():
                setattr(owner, name, original)


def _in_thread(thread: int, function: Callable, original: Callable) -> Callable:
    def call(*args: Any, **kwargs: Any) -> Any:
        return (function if threading.get_ident() == thread else original)(*args, **kwargs)

    return call
