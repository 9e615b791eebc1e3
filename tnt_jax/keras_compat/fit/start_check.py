"""Compares, at the start of a call, what all processes must have alike, before data is opened.

A process with another seed, learning rate or package would train on without a word, and one with
another number of steps would leave the others waiting.
"""

import functools
import platform
import re
import sys
from dataclasses import fields
from importlib import metadata
from types import FunctionType
from typing import Any

import jax
import numpy as np

from tnt_jax.data.arguments import is_arrays
from tnt_jax.data.opening import facts_of
from tnt_jax.data.sources import Source
from tnt_jax.distributed.host.comparison import compare
from tnt_jax.distributed.joining.runtime import get_process_count
from tnt_jax.keras_compat.comparable import class_name, comparable, flat
from tnt_jax.keras_compat.compiling.compilation import Compilation
from tnt_jax.keras_compat.fit.data_intake import DataArguments, FitArguments
from tnt_jax.keras_compat.keras_objects import is_keras
from tnt_jax.keras_compat.optimizers.from_keras import KerasOptimizer
from tnt_jax.keras_compat.optimizers.lookup import OptaxOptimizer
from tnt_jax.keras_compat.state.core import Core
from tnt_jax.keras_compat.state.optimizer_view import OptimizerView
from tnt_jax.train.state_arrays import state_arrays

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "tnt-jax")
# Settings of JAX that change programs or their results.
_JAX_SETTINGS = """
    jax_enable_x64 jax_default_matmul_precision jax_default_prng_impl jax_disable_jit jax_debug_nans
    jax_numpy_dtype_promotion
""".split()
_ADVICE = (
    "Run the same script with the same arguments, files and packages on every process, and choose "
    "nothing by rank but what one process alone prints or writes."
)


def compare_starts(
    call: str,
    core: Core,
    data: DataArguments,
    arguments: FitArguments | None = None,
    **others: Any,
) -> None:
    """Raises an error on all processes unless all begin the same call in the same way."""
    if get_process_count() == 1:
        return
    values = others | _of_data(data)
    if arguments is not None:
        values |= _of_fit(arguments)
    options = _named(core.options) | {"sync": comparable(core.options.sync)}
    values |= flat("Model", options) | describe_model(core) | _of_variables(core)
    if (compilation := core.compilation) is not None:
        values |= describe_compilation(core, compilation) | {
            "on_nan": compilation.on_nan,
            "steps_per_execution": compilation.steps_per_execution,
            "compile was called since the last fit": compilation.functions is None,
        }
    compare(call, values | installed_versions() | _of_jax(core), advice=_ADVICE)


def compare_sources(call: str, what: str, source: Source) -> None:
    """Raises an error on all processes unless they have the same data."""
    if get_process_count() == 1:
        return
    values = {f"{name} of {what}": value for name, value in facts_of(source).items()}
    compare(call, values | {f"steps of {what}": source.num_batches}, advice=_ADVICE)


def _of_data(data: DataArguments) -> dict[str, Any]:
    return {
        "kind of data": _kind(data.x),
        "kind of targets": _kind(data.y),
        "kind of sample_weight": _kind(data.sample_weight),
        "batch_size": data.batch_size,
        "tnt_micro_batch_size": data.micro_batch_size,
        "shuffle": data.shuffle,
        "tnt_distribute_dataset": data.distribute,
    }


def _of_fit(arguments: FitArguments) -> dict[str, Any]:
    """Returns the arguments of `fit`, by name."""
    values = {
        name: comparable(value)
        for name, value in _named(arguments).items()
        if name != "validation_data"
    }
    held_out = arguments.validation_data
    is_pair = isinstance(held_out, (tuple, list)) and bool(held_out)
    return values | {"kind of validation_data": _kind(held_out[0] if is_pair else held_out)}


def describe_model(core: Core) -> dict[str, str]:
    """Returns the settings of the module and its parts, by name, without addresses in memory."""
    return flat("model", _described(core.module))


def _of_variables(core: Core) -> dict[str, Any]:
    """Returns the shapes and dtypes of the variables, by name."""
    state = core.trainer.state
    if state is None:
        return {"variables of the model": "not yet made"}
    arrays = state_arrays((state.params, state.model_state))
    return {
        f"shape of {path.removeprefix('0/').removeprefix('1/')}": f"{x.dtype}{list(x.shape)}"
        for path, x in arrays.items()
    }


def _described(module: Any) -> Any:
    """Returns the settings of a module, as far as it tells them."""
    if is_keras(module, "models.Model"):
        layers = [_described(layer) for layer in module.layers]
        return {"class": class_name(type(module)), "layers": layers}
    if is_keras(module, "layers.Layer"):
        return _without_names(comparable(module))
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(module, nnx.Module):
        graph = _ADDRESS.sub("", repr(nnx.graphdef(module)))
        nodes = [node for _, node in nnx.iter_graph(module) if isinstance(node, nnx.Module)]
        return {"graph": graph, "parts": [_code_of(node) for node in nodes]}
    return comparable(module)


def _code_of(node: Any) -> dict[str, Any]:
    """Returns the class of an NNX module and the functions that it holds, such as activations."""
    functions = {name: x for name, x in vars(node).items() if isinstance(x, FunctionType)}
    return {"class": class_name(type(node))} | comparable(functions)


def _without_names(value: Any) -> Any:
    """Leaves out names, which Keras numbers by the objects that were made before."""
    if isinstance(value, dict):
        if "DTypePolicy" in str(value.get("class_name")):
            return value  # Its name is the dtype.
        return {key: _without_names(item) for key, item in value.items() if key != "name"}
    return [_without_names(item) for item in value] if isinstance(value, list) else value


def describe_compilation(core: Core, compilation: Compilation) -> dict[str, str]:
    """Returns the choices of `compile` that decide the result, by name, without addresses."""
    optimizer = compilation.optimizer
    if isinstance(optimizer, OptaxOptimizer):
        settings = comparable(optimizer.transformation())
    elif isinstance(optimizer, KerasOptimizer):
        settings = _without_names(comparable(optimizer.keras_optimizer))
    else:
        settings = comparable(optimizer)
    values = flat("optimizer", settings)
    values["optimizer.exclude_from_weight_decay"] = str(getattr(optimizer, "_undecayed", ()))
    rate = getattr(
        OptimizerView(optimizer, core.trainer, core.use_optimizer), "learning_rate", None
    )
    if rate is not None and not callable(optimizer.learning_rate):
        values["optimizer.learning_rate"] = str(np.float32(rate))
    for name, value in _named(compilation.arguments).items():
        values |= flat(name, comparable(value))
    return values


def _of_jax(core: Core) -> dict[str, Any]:
    """Returns the settings of JAX, and how gradients are summed."""
    values = {name: getattr(jax.config, name, None) for name in _JAX_SETTINGS}
    reduction = getattr(core.trainer.steps, "reduction", None)
    return values | {"sum of gradients": str(reduction), "platform": core.trainer.runtime.platform}


# They do not change while a process runs.
@functools.cache
def installed_versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that compute."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python} | {name: metadata.version(name) for name in _PACKAGES}


def _kind(data: Any) -> str:
    """Returns what kind of data an argument is; arrays of all libraries are alike."""
    if data is None:
        return "None"
    return "arrays" if is_arrays(data) else f"{type(data).__module__}.{type(data).__qualname__}"


def _named(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}
