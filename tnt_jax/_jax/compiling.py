"""The place where JAX compiles programs, for all that have a part in it."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from tnt_jax.job import Slot

_PARAMETERS = (
    "backend", "computation", "devices", "compile_options", "host_callbacks",
    "executable_devices", "pgle_profiler",
)  # fmt: skip


class _Compilation:
    """Stands for JAX's function until the job ends.

    Args:
        plain: JAX's function.
    """

    def __init__(self, plain: Callable) -> None:
        self.plain = plain
        self.stages: list[Callable] = []

    def __call__(self, *args: Any, **named: Any) -> Any:
        call = self.plain
        for stage in self.stages:
            call = partial(stage, call)
        return call(*args, **named)


def _restore(compilation: _Compilation | None) -> None:
    if compilation is not None:
        # Private. Checked with JAX 0.10.0, 0.10.2 and 0.12.0.
        from jax._src import compiler

        compiler.compile_or_get_cached = compilation.plain


_compilation = Slot[_Compilation | None](lambda: None, close=_restore)


def stand_around(stage: Callable, *, outermost: bool = False) -> None:
    """Has a function called for every program that this process compiles, until its job ends.

    Args:
        stage: Called as `stage(compile, backend, computation, devices, compile_options,
            host_callbacks, executable_devices, pgle_profiler)`, where `compile` takes the arguments
            after itself; returns the loaded program.
        outermost: Whether it comes before those that stand there now.

    Raises:
        TypeError: If JAX's function has other parameters in this version.
    """
    # Private. Checked with JAX 0.10.0, 0.10.2 and 0.12.0. No setting has processes other than the
    # first write programs, and none changes a program before it is compiled.
    from jax._src import compiler

    compilation = _compilation.get()
    if compilation is None:
        names = tuple(inspect.signature(compiler.compile_or_get_cached).parameters)
        if names != _PARAMETERS:
            raise TypeError(f"compile_or_get_cached takes {', '.join(names)}")
        compilation = _Compilation(compiler.compile_or_get_cached)
        _compilation.set(compilation)
        compiler.compile_or_get_cached = compilation
    compilation.stages.insert(len(compilation.stages) if outermost else 0, stage)
