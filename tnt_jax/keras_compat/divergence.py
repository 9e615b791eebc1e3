"""Do all processes still hold the same training state? A callback that changes it on some of them makes results depend on their number."""

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tnt_jax import collectives
from tnt_jax.checkpoint import state_arrays
from tnt_jax.log import logger
from tnt_jax.state import TrainState

_NAMED_ARRAYS = 8


class Divergence:
    """Watches over the epochs of one training."""

    def __init__(self) -> None:
        self._is_known = False

    def check(self, state: TrainState, *, stop_training: bool) -> None:
        """Compares the processes after an epoch: warns, once, if the state differs, and fails if not all go on.

        Args:
            state: Training state, every array of it replicated.
            stop_training: Whether this process ends training.

        Raises:
            RuntimeError: On every process, if some end training and others do not: they would wait for the others for ever.
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
                "Training is not reproducible: %s differ from those of process 0. A callback has changed them on some processes only. "
                "It must do the same on every process, and not inside OnMaster.",
                names,
            )
        if stops.any() and not stops.all():
            raise RuntimeError(
                f"stop_training is True on the process(es) {_numbers(stops)} and False on {_numbers(~stops)}. A callback must decide "
                "alike on every process: from the logs, which are the same everywhere, and not inside OnMaster."
            )


def differing(names: Sequence[str], digests: np.ndarray) -> str:
    """Returns which arrays differ between processes, and where, in words; nothing if none does.

    Args:
        names: Names of arrays.
        digests: Their digests in each process, `[processes, arrays]`.
    """
    is_other = digests != digests[0]
    found = [name for name, column in zip(names, is_other.T, strict=True) if column.any()]
    more = f" and {len(found) - _NAMED_ARRAYS} more" if len(found) > _NAMED_ARRAYS else ""
    return f"{', '.join(found[:_NAMED_ARRAYS])}{more} of the process(es) {_numbers(is_other.any(axis=1))}" if found else ""


def _digest(x: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(x).tobytes())


def _numbers(flags: np.ndarray) -> str:
    return ", ".join(map(str, np.flatnonzero(flags)))
