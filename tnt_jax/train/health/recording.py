"""Records what the first steps of a training do, as lines of JSON that `tnt-jax verify` compares.

A line holds what is known after a step: the checksum of each row of its batch, the metrics, and for
each array of the state its digest, its norm, and eight sums of its values with signs drawn at
random. The sums of two arrays differ, in the root of the mean square, by about the norm of their
difference (Johnson and Lindenstrauss 1984), whichever process or machine has computed them: so
arrays are compared by value without being kept.
"""

import json
import os
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from tnt_jax import _jax
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.joining.runtime import Runtime, is_master_rank
from tnt_jax.log import report_to_launcher
from tnt_jax.settings import RECORD_MARK, Recording, TrialsDone
from tnt_jax.train.contracts import Batch
from tnt_jax.train.execution import local_rows
from tnt_jax.train.state import digest

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "numpy", "keras", "tensorflow")
# Values whose signs are drawn at once.
_CHUNK = 1 << 20
# Of a metric that is an array, such as a confusion matrix.
_MOST_VALUES = 64
# So many rounding errors, of either sign, change each weight where rounding is tried.
_ROUNDINGS = 4


class Recorder:
    """Writes a line before the first step and after each; ends the script after the last.

    All processes must make the same calls; process 0 writes. `gather` returns an array replicated.
    """

    def __init__(self, runtime: Runtime, gather: Callable[[jax.Array], jax.Array]) -> None:
        assert runtime.settings.record_steps is not None, "The environment says what to record."
        self.steps: int = runtime.settings.record_steps
        self.kind: Recording = runtime.settings.record_as
        self.num_steps = 0
        self.has_begun = False
        self._runtime, self._gather = runtime, gather
        self._rows: list[list[int]] | None = None

    def begin(self, step: int, arrays: Mapping[str, Any], *, unit: float, **facts: Any) -> None:
        """Records the state after `step` steps, its `rounding_unit`, and facts as JSON values."""
        self.has_begun = True
        self._write(
            {
                "step": step,
                "ranks": self._runtime.num_ranks,
                "processes": jax.process_count(),
                "device": self._runtime.mesh.devices.flat[0].device_kind,
                "versions": _versions(),
                "unit": unit,
                **facts,
            },
            arrays,
        )

    def note_batch(self, batch: Batch, real_rows: Sequence[slice], *, dim: int = 0) -> None:
        """Notes the rows of the next step's batch, which stand along `dim` of its arrays."""
        self._rows = None
        if self._runtime.shares_ranks:  # Several processes have the same rows.
            return
        inputs = checksums_of_rows(batch.inputs, dim)
        others = checksums_of_rows((batch.targets, batch.weight), dim)
        # There may be neither targets nor weights.
        parts = [inputs, others if len(others) else np.zeros_like(inputs)]
        whole = collectives.all_gather(np.array(parts, np.int64)).swapaxes(0, 1)
        places = np.concatenate([np.arange(rows.start, rows.stop) for rows in real_rows])
        self._rows = [part.reshape(-1)[places].tolist() for part in whole]

    def end_step(
        self, step: int, arrays: Mapping[str, Any], metrics: Mapping[str, Any], **place: int
    ) -> None:
        """Records what a step has done; raises `TrialsDone` after the last."""
        self.num_steps += 1
        numbers = {
            name: np.ravel(np.asarray(x, np.float64))[:_MOST_VALUES].tolist()
            for name, x in metrics.items()
        }
        self._write({"step": step, **place, "rows": self._rows, "metrics": numbers}, arrays)
        if self.num_steps == self.steps:
            raise TrialsDone

    def end_killed(self, save: Callable[[], bool]) -> None:
        """Ends all processes as by a kill after half of the steps, if `save` says that it saved."""
        if self.kind != "killed" or self.num_steps != max(self.steps // 2, 1):
            return
        if not save():
            raise RuntimeError("The backup of the run that is to be resumed was not written.")
        collectives.barrier()
        # As a kill does, it closes and reports nothing, but it is no failure.
        os._exit(0)

    def leave_out(self, reason: str) -> NoReturn:
        """Reports why the steps cannot run as it was asked for, and ends the script."""
        if is_master_rank():
            report_to_launcher(f"{RECORD_MARK}{json.dumps({'left_out': reason})}")
        raise TrialsDone

    def _write(self, known: dict[str, Any], arrays: Mapping[str, Any]) -> None:
        is_master = is_master_rank()
        found = {}
        for path, leaf in arrays.items():
            whole = self._gather(_jax.key_words(leaf))
            if is_master:
                found[path] = describe_array(np.asarray(whole))
        if is_master:
            report_to_launcher(f"{RECORD_MARK}{json.dumps(known | {'arrays': found})}")


def describe_array(x: np.ndarray) -> dict[str, Any]:
    """Returns what is recorded of an array: digest, precision, norm and sums with random signs."""
    found: dict[str, Any] = {"digest": digest(x)}
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return found
    values = np.ravel(x).astype(np.float64)
    sums = signed_sums(values).tolist()
    norm = float(np.linalg.norm(values))
    return found | {"eps": float(jnp.finfo(x.dtype).eps), "norm": norm, "sums": sums}


def signed_sums(values: np.ndarray) -> np.ndarray:
    """Returns eight sums of values `[n]` with signs that depend on `n` alone, float64 `[8]`."""
    # Raw numbers of Philox stay the same in all versions of NumPy (NEP 19).
    bits = np.random.Philox(key=0)
    total = np.zeros(8)
    for start in range(0, len(values), _CHUNK):
        part = values[start : start + _CHUNK]
        drawn = bits.random_raw(-(-len(part) // 8)).astype("<u8").view(np.uint8)[: len(part)]
        total += part @ (1.0 - 2.0 * np.unpackbits(drawn[:, None], axis=1))
    return total


def checksums_of_rows(tree: Any, dim: int = 0) -> np.ndarray:
    """Returns a checksum of each of this process's rows of arrays with rows along `dim`."""
    found: list[int] = []
    for leaf in jax.tree.leaves(tree):
        rows = np.ascontiguousarray(np.moveaxis(_local_rows(leaf, dim), dim, 0))
        found = found or [0] * len(rows)
        found = [zlib.crc32(row.tobytes(), known) for row, known in zip(rows, found, strict=True)]
    return np.array(found, np.int64)


def _local_rows(x: Any, dim: int) -> np.ndarray:
    if not isinstance(x, jax.Array):
        x = np.asarray(x)
        return x.astype(jax.dtypes.canonicalize_dtype(x.dtype))  # As it is on devices.
    return local_rows(x, dim)


def changed_by_rounding(tree: Any, unit: float) -> Any:
    """Returns floating arrays, each value of which is changed by up to four rounding errors.

    A sum or product that is rounded is the exact one of values that differ by a few rounding errors
    (Higham 2002, Accuracy and Stability of Numerical Algorithms, chapter 3), so that what follows
    from the change is of the size of what rounding does to the training.
    """
    leaves, structure = jax.tree.flatten(tree)

    def change(leaves: list[jax.Array]) -> list[jax.Array]:
        changed = []
        for number, x in enumerate(leaves):
            key = jax.random.fold_in(jax.random.key(0), number)
            errors = jax.random.uniform(key, x.shape, minval=-_ROUNDINGS, maxval=_ROUNDINGS)
            wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
            changed.append((wide * (1 + unit * errors)).astype(x.dtype))
        return changed

    places = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.floating)]
    chosen = [leaves[i] for i in places]
    results = jax.jit(change, out_shardings=[x.sharding for x in chosen])(chosen)
    for place, x in zip(places, results, strict=True):
        leaves[place] = x
    return structure.unflatten(leaves)


def rounding_unit(arrays: Mapping[str, Any], program: str, platform: str) -> float:
    """Returns the relative error of one rounding in a step, the coarsest there is.

    The program is StableHLO, empty if it is not known. GPUs and TPUs round the factors of products
    of float32, unless `jax_default_matmul_precision` says otherwise.
    """
    dtypes = {x.dtype for x in arrays.values() if jnp.issubdtype(x.dtype, jnp.floating)}
    units = [float(jnp.finfo(dtype).eps) for dtype in dtypes] or [float(jnp.finfo("float32").eps)]
    if "f16>" in program:  # Also of bf16.
        units.append(float(jnp.finfo("bfloat16").eps))
    if jax.config.jax_default_matmul_precision not in ("highest", "float32"):  # pyright: ignore
        # TF32 has ten bits, and one pass of a TPU eight.
        units.append({"gpu": 2.0**-10, "tpu": 2.0**-7}.get(platform, 0.0))
    return max(units)


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in _LIBRARIES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
