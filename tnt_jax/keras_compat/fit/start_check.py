"""Comparisons of processes: the same call, at its start, and the same training state, every epoch.

A process with another seed, learning rate or package would train on without a word, and one with
another number of steps would leave the others waiting. Copies of the state are never exchanged: if
a callback on one process, or faulty memory, changes one of them, every later result is wrong.
"""

import functools
import json
import platform
import re
import sys
import zlib
from collections.abc import Sequence
from importlib import metadata
from types import FunctionType
from typing import Any, NamedTuple

import jax
import numpy as np

from tnt_jax.cluster.devices import cpu_kind
from tnt_jax.data.arguments import is_arrays
from tnt_jax.data.sources import Source
from tnt_jax.data.streams import facts_of
from tnt_jax.distributed.host.comparison import compare, name_processes
from tnt_jax.distributed.joining import runtime
from tnt_jax.distributed.joining.runtime import get_process_count
from tnt_jax.distributed.liveness.rendezvous import meet
from tnt_jax.keras_compat.comparable import class_name, comparable, flat
from tnt_jax.keras_compat.compiling.compiled import Compilation
from tnt_jax.keras_compat.fit.data_intake import DataArguments, FitArguments
from tnt_jax.keras_compat.keras_objects import is_keras
from tnt_jax.keras_compat.optimizers.from_keras import KerasOptimizer
from tnt_jax.keras_compat.optimizers.lookup import OptaxOptimizer
from tnt_jax.keras_compat.state.core import Core
from tnt_jax.keras_compat.state.optimizer_view import OptimizerView
from tnt_jax.log import logger
from tnt_jax.train.health.state_checksums import (
    local_checksums,
    replicated_arrays,
    replicated_paths,
)
from tnt_jax.train.state import TrainState, state_arrays

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
    call: str, core: Core, data: DataArguments, arguments: FitArguments | None = None, **others: Any
) -> None:
    """Raises an error on all processes unless all begin the same call in the same way."""
    if get_process_count() == 1:
        return
    values = others | describe_call(core, data, arguments)
    options = vars(core.options) | {"sync": comparable(core.options.sync)}
    values |= flat("Model", options) | describe_model(core) | _of_variables(core)
    if (compilation := core.compilation) is not None:
        values |= describe_compilation(core, compilation) | {
            "steps_per_execution": compilation.steps_per_execution,
            "compile was called since the last fit": compilation.functions is None,
        }
    settings = {name: getattr(jax.config, name, None) for name in _JAX_SETTINGS}
    reduction = getattr(core.trainer.steps, "reduction", None)
    settings |= {"sum of gradients": str(reduction), "platform": core.trainer.runtime.platform}
    compare(call, values | installed_versions() | settings, advice=_ADVICE)


def compare_sources(call: str, what: str, source: Source) -> None:
    """Raises an error on all processes unless they have the same data."""
    if get_process_count() == 1:
        return
    values = {f"{name} of {what}": value for name, value in facts_of(source).items()}
    compare(call, values | {f"steps of {what}": source.num_batches}, advice=_ADVICE)


def describe_call(
    core: Core, data: DataArguments, arguments: FitArguments | None
) -> dict[str, Any]:
    """Returns what a call was given, and what `compile` says of steps that are not finite."""
    values = {
        "kind of data": _kind(data.x),
        "kind of targets": _kind(data.y),
        "kind of sample_weight": _kind(data.sample_weight),
        "batch_size": data.batch_size,
        "tnt_micro_batch_size": data.micro_batch_size,
        "shuffle": data.shuffle,
        "tnt_distribute_dataset": data.distribute,
        "on_nan": core.compilation and core.compilation.on_nan,
    }
    if arguments is None:
        return values
    held_out = arguments.validation_data
    is_pair = isinstance(held_out, (tuple, list)) and bool(held_out)
    values["kind of validation_data"] = _kind(held_out[0] if is_pair else held_out)
    others = {name: x for name, x in vars(arguments).items() if name != "validation_data"}
    return values | {name: comparable(value) for name, value in others.items()}


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
    if is_keras(module):
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
    for name, value in vars(compilation.arguments).items():
        values |= flat(name, comparable(value))
    return values


# They do not change while a process runs.
@functools.cache
def installed_versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that compute."""
    python = ".".join(platform.python_version_tuple()[:2])
    found = {name: _version(name) for name in _PACKAGES}
    return {"Python": python} | {name: version for name, version in found.items() if version}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # A source tree in PYTHONPATH.
        return None


def _kind(data: Any) -> str:
    """Returns what kind of data an argument is; arrays of all libraries are alike."""
    if data is None:
        return "None"
    return "arrays" if is_arrays(data) else f"{type(data).__module__}.{type(data).__qualname__}"


_NAMED_ARRAYS, _MOST_SPEAKERS = 4, 8
_IN_TRAINING = (
    "Results would be wrong. A callback must do the same on every process, and not inside "
    "OnMaster; if no callback changes the state, the memory or the device of that rank is faulty. "
    "Go on from a checkpoint that was written before."
)
_AT_START = (
    "Load the same file on every process, or call model.set_weights(model.get_weights()) on all, "
    "which takes the weights of process 0."
)


class _Brought(NamedTuple):
    """The message of a process."""

    ranks: list[int]
    sums: list[int]
    stops: bool


class Divergence:
    """Compares the ranks during one training."""

    def __init__(self, *, forbids_single_stop: bool) -> None:
        self._forbids_single_stop = forbids_single_stop
        self._is_warned = False

    def check_start(self, state: TrainState) -> None:
        """Compares what training starts from; an error is raised on all processes."""
        self._compare(state, "start of training", _AT_START, stops=False)

    def check(self, state: TrainState, *, epoch: int, stop_training: bool) -> bool:
        """Compares the ranks after an epoch; returns whether any process ends training."""
        where = f"end of epoch {epoch}"
        stops = self._compare(state, where, _IN_TRAINING, stops=stop_training)
        if self._forbids_single_stop and any(stops) and not all(stops):
            stopping, others = (
                ", ".join(str(process) for process, stop in enumerate(stops) if stop == wanted)
                for wanted in (True, False)
            )
            raise RuntimeError(
                f"stop_training is True on the process(es) {stopping} and False on {others}. A "
                "callback must decide alike on every process: from the logs, which are the same "
                "everywhere, and not inside OnMaster."
            )
        return any(stops)

    def _compare(self, state: TrainState, where: str, advice: str, *, stops: bool) -> list[bool]:
        """Returns which processes end training, if the state is the same on all ranks."""
        job = runtime.init()
        if job.num_ranks == 1:
            return [stops]
        local = local_checksums(replicated_arrays(state), job.mesh)
        own = _Brought(job.local_ranks, [zlib.crc32(row.tobytes()) for row in local], stops)
        brought = [_Brought(*json.loads(text)) for text in meet(where, json.dumps(own))]
        if len({total for one in brought for total in one.sums}) > 1:
            self._report(replicated_paths(state), local, brought, where, advice)
        return [one.stops for one in brought]

    def _report(
        self, names: list[str], local: np.ndarray, brought: list[_Brought], where: str, advice: str
    ) -> None:
        """Raises or warns, on all processes alike, of ranks that differ."""
        ranks: dict[int, list[int]] = {}
        process_of = {}
        for process, one in enumerate(brought):
            for rank, total in zip(one.ranks, one.sums, strict=True):
                ranks.setdefault(total, []).append(rank)
                process_of[rank] = process
        # One rank tells the checksums of all arrays for those that have the same.
        speakers = [alike[0] for alike in list(ranks.values())[:_MOST_SPEAKERS]]
        own_ranks = brought[jax.process_index()].ranks
        told = {
            rank: local[own_ranks.index(rank)].tolist() for rank in speakers if rank in own_ranks
        }
        # What decides how the devices of this process round.
        kinds = sorted({device.device_kind for device in jax.local_devices()})
        own_kind = f"CPU {cpu_kind()}" if kinds == ["cpu"] else ", ".join(kinds)
        answers = [json.loads(text) for text in meet(where, json.dumps([told, own_kind]))]
        sums = {int(rank): row for rows, _ in answers for rank, row in rows.items()}
        text = describe_drift(names, sums, list(ranks.values()), process_of)
        text = f"At the {where}, the ranks do not hold the same training state: {text}."
        processors = {kind for _, kind in answers}
        if len(processors) == 1:
            raise RuntimeError(f"{text} {advice}")
        if not self._is_warned:
            self._is_warned = True
            logger.warning(
                "%s The processes run on different processors (%s), which may round differently; "
                "results then depend on which process saves them.",
                text,
                ", ".join(sorted(processors)),
            )


def describe_drift(
    names: Sequence[str],
    sums: dict[int, list[int]],
    alike: list[list[int]],
    process_of: dict[int, int],
) -> str:
    """Returns which arrays differ from those of most ranks; sums are of the first of a group."""
    told = [group for group in alike if group[0] in sums]
    # Of two groups of equal size it is not known which is wrong.
    reference = max(told, key=len)
    parts = []
    for group in told:
        if group is reference:
            continue
        pairs = zip(names, sums[reference[0]], sums[group[0]], strict=False)
        differing = [name for name, expected, found in pairs if expected != found]
        more = f" and {len(differing) - _NAMED_ARRAYS} more" * (len(differing) > _NAMED_ARRAYS)
        of_group = name_processes(sorted({process_of[rank] for rank in group}))
        parts.append(
            f"{', '.join(differing[:_NAMED_ARRAYS])}{more} on {_name_ranks(group)} ({of_group})"
        )
    of_reference = name_processes(sorted({process_of[rank] for rank in reference}))
    rest = f"; {len(alike) - len(told)} more kinds" * (len(alike) > len(told))
    return f"{'; '.join(parts)}{rest} differ from {_name_ranks(reference)} ({of_reference})"


def _name_ranks(ranks: Sequence[int]) -> str:
    return name_processes(ranks).replace("processes", "ranks").replace("process", "rank")
