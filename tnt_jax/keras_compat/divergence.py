"""Checks that all processes hold the same training state.

A callback that changes the state on some processes makes results depend on the number of processes.
"""

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tnt_jax.distributed import collectives
from tnt_jax.log import logger
from tnt_jax.train.state import TrainState
from tnt_jax.train.state_arrays import state_arrays

_NAMED_ARRAYS = 8


class Divergence:
    """Compares the processes after each epoch of one training."""

    def __init__(self) -> None:
        self._is_known = False

    def check(self, state: TrainState, *, stop_training: bool) -> None:
        """Compares the processes after an epoch.

        It warns once if the state differs, and fails if not all processes continue.

        Args:
            state: Training state, every array of it replicated.
            stop_training: Whether this process ends training.

        Raises:
            RuntimeError: On all processes, if some end training and others do not.
        """
        if jax.process_count() == 1:
            return
        arrays = state_arrays(state)
        digests = np.array([_digest(x) for x in arrays.values()], np.uint32)
        gathered, stops = collectives.all_gather((digests, np.array(stop_training)))
        names = differing(list(arrays), gathered)
        if names and not self._is_known:
            self._is_known = True
            logger.warning(
                "Training is not reproducible: %s differ from those of process 0. A callback has "
                "changed them on some processes only. It must do the same on every process, and "
                "not inside OnMaster.",
                names,
            )
        if stops.any() and not stops.all():
            raise RuntimeError(
                f"stop_training is True on the process(es) {_numbers(stops)} and False on "
                f"{_numbers(~stops)}. A callback must decide alike on every process: from the "
                "logs, which are the same everywhere, and not inside OnMaster."
            )


def differing(names: Sequence[str], digests: np.ndarray) -> str:
    """Describes which arrays differ between processes, and where; empty if none does.

    Args:
        names: Names of arrays.
        digests: Their digests in each process, `[processes, arrays]`.
    """
    is_other = digests != digests[0]
    found = [name for name, column in zip(names, is_other.T, strict=True) if column.any()]
    more = f" and {len(found) - _NAMED_ARRAYS} more" if len(found) > _NAMED_ARRAYS else ""
    return (
        f"{', '.join(found[:_NAMED_ARRAYS])}{more} of the process(es) "
        f"{_numbers(is_other.any(axis=1))}"
        if found
        else ""
    )


def _digest(x: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(x).tobytes())


def _numbers(flags: np.ndarray) -> str:
    return ", ".join(map(str, np.flatnonzero(flags)))
