"""The place where JAX compiles programs, for all that have a part in it."""

import importlib.metadata
import inspect
import os
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from tnt_jax._jax.fallbacks import or_plain
from tnt_jax.job import Slot


def convolution_options(mesh: Mesh) -> dict[str, Any]:
    """Returns compiler options for faster convolutions, whose results differ by rounding."""
    return _without_ynn_convolutions() if mesh.devices.flat[0].platform == "cpu" else {}


# Versions of jaxlib that know the option below; others are asked, which takes a compilation.
_WITH_YNN = ("0.10.0", "0.10.2", "0.12.0.1")


# Depends on the version of XLA alone, so that it outlives the job.
@cache
def _without_ynn_convolutions() -> dict[str, Any]:
    # Experimental. Checked with JAX 0.10.0 to 0.12.0; a version without it does without. XLA hands
    # wide convolutions on CPUs to YNNPACK, which is slower there than Eigen
    # (benchmarks/convolutions.py). The option names the kinds of operations that are left to it:
    # the default without convolutions.
    kinds = "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,LIBRARY_FUSION_TYPE_REDUCE"
    options: dict[str, Any] = {"xla_cpu_experimental_ynn_fusion_type": kinds}
    if importlib.metadata.version("jaxlib") in _WITH_YNN:
        return options
    device = SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    number = jax.ShapeDtypeStruct((), jnp.float32, sharding=device)
    try:
        jax.jit(lambda x: x).lower(number).compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        # An experimental option goes when its time has come.
        if "xla_cpu_experimental_ynn_fusion_type" not in str(error):
            raise
        return {}
    return options


def options_of_one_run() -> dict[str, Any]:
    """Returns the compiler options for a program of the default device that runs once."""
    # On CPUs the compiler then spends a third of the time or less on random numbers. From JAX 0.12
    # on, these differ by rounding.
    return {"xla_backend_optimization_level": 1} if jax.default_backend() == "cpu" else {}


def deterministic_options(mesh: Mesh) -> dict[str, Any]:
    """Returns the compiler options that make every run on `mesh` give the same bits."""
    # It implies xla_gpu_exclude_nondeterministic_ops, and chooses kernels by rule instead of by
    # measuring them.
    is_on_gpus = mesh.devices.flat[0].platform in ("gpu", "cuda")
    return {"xla_gpu_deterministic_ops": True} if is_on_gpus else {}


_PARAMETERS = (
    "backend computation devices compile_options host_callbacks executable_devices pgle_profiler"
)


class _Compilation:
    """Stands for JAX's function `plain` until the job ends."""

    def __init__(self, plain: Callable) -> None:
        self.plain = plain
        self.stages: list[Callable] = []

    def __call__(self, *args: Any, **named: Any) -> Any:
        call = self.plain
        for stage in self.stages:
            call = partial(stage, call)
        return call(*args, **named)


def _restore(compilation: _Compilation) -> None:
    # Private. Checked with JAX 0.10.0, 0.10.2 and 0.12.0.
    from jax._src import compiler

    compiler.compile_or_get_cached = compilation.plain


_compilation = Slot[_Compilation | None](lambda: None, close=_restore)


def stand_around(stage: Callable, *, outermost: bool = False) -> None:
    """Has `stage(compile, *arguments)` called for each program, until the job of the process ends.

    The arguments, which `compile` takes, are those of `_PARAMETERS`; it returns the loaded program.
    The outermost stage comes before those that stand there now.
    """
    # Private. Checked with JAX 0.10.0, 0.10.2 and 0.12.0. No setting has processes other than the
    # first write programs, and none changes a program before it is compiled.
    from jax._src import compiler

    compilation = _compilation.get()
    if compilation is None:
        names = inspect.signature(compiler.compile_or_get_cached).parameters
        if list(names) != _PARAMETERS.split():
            raise TypeError(f"compile_or_get_cached takes {', '.join(names)}")
        compilation = _Compilation(compiler.compile_or_get_cached)
        _compilation.set(compilation)
        compiler.compile_or_get_cached = compilation
    compilation.stages.insert(len(compilation.stages) if outermost else 0, stage)


_FOLDER = str(Path(jax.__file__).parent) + os.sep
_KEPT = str(Path(__file__).with_name("kept_programs.py"))


@cache
@or_plain(
    lambda: (_KEPT,), lost="A long compilation counts as a step, and may be taken for a stall."
)
def _compiling() -> tuple[str, ...]:
    """Returns the files that trace, lower and compile programs."""
    # Private. Checked with JAX 0.10.0, 0.10.2 and 0.12.0; no public question exists before it is
    # done.
    parts = ("compiler.py",), ("interpreters", "partial_eval.py"), ("interpreters", "mlir.py")
    files = [_FOLDER + os.path.join("_src", *names) for names in parts]
    if missing := [file for file in files if not os.path.exists(file)]:
        raise ImportError(f"{missing[0]} does not exist")
    return (*files, _KEPT)


def is_of_jax(frame: FrameType) -> bool:
    """Returns whether a frame runs code of JAX."""
    return frame.f_code.co_filename.startswith(_FOLDER)


def compiles(frames: Iterable[FrameType]) -> bool:
    """Returns whether one of the frames of a stack traces, lowers or compiles a program."""
    return any(frame.f_code.co_filename in _compiling() for frame in frames)
