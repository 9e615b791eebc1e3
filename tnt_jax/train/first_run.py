"""First runs of programs that compute as many rows at once as should fit the memory of a device.

A device may have less than it states, because other programs use it.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import process_count

from tnt_jax.distributed.host import collectives
from tnt_jax.log import logger
from tnt_jax.train.execution import lacks_memory
from tnt_jax.train.memory_choice import equal_rows

_T = TypeVar("_T")


def first_run(
    start: Callable[[], _T],
    *,
    devices: Sequence[Any],
    computed_bytes: Callable[[], int],
    fewer_rows: Callable[[], bool],
    put_back: Callable[[], None] = lambda: None,
) -> _T:
    """Runs a program for the first time; without memory for it, one with fewer rows at once.

    A process that is alone runs it and sees. Of several, one that lacks memory within a program
    would leave the others waiting for it: all ask beforehand for what it computes, and go on alike.

    Args:
        start: Starts the program that there is by then, and returns its results.
        devices: Devices of this process.
        computed_bytes: Returns the bytes that the program holds on each besides its operands.
        fewer_rows: Lets the program compute fewer rows at once, and returns whether that is
            possible.
        put_back: Replaces operands that a program has taken and that failed.
    """
    if process_count() > 1:
        while True:
            lacks = not _find_memory(devices, computed_bytes())
            if not collectives.any_process(lacks, where="the first step") or not fewer_rows():
                return start()
    while True:
        try:
            return jax.block_until_ready(start())
        except jax.errors.JaxRuntimeError as error:
            if not lacks_memory(error):
                raise
            put_back()
            if not fewer_rows():
                raise


def _find_memory(devices: Sequence[Any], nbytes: int) -> bool:
    """Returns whether each device has memory for an array of so many bytes, which is dropped."""
    try:
        shape = (-(-nbytes // 2**20), 2**20)
        jax.block_until_ready([jnp.zeros(shape, np.uint8, device=device) for device in devices])
    except jax.errors.JaxRuntimeError as error:
        if not lacks_memory(error):
            raise
        return False
    return True


def half_as_many(num_rows: int, most: int | None) -> int | None:
    """Returns the rows of passes half as large, and warns; None if a pass has one row.

    Args:
        num_rows: Rows of a rank.
        most: Rows of a pass; None for all.
    """
    most = most or num_rows
    if most == 1:
        return None
    fewer = equal_rows(num_rows, most // 2)
    logger.warning(
        "A device has no memory for %d rows at once, although the compiler stated that they "
        "fit: %d are computed at once from here on. TNT_DEVICE_MEMORY sets the limit.",
        most,
        fewer,
    )
    return fewer


def found_no_memory(name: str, less: str) -> None:
    """Warns that a step, by its name, gives way to one that needs less memory."""
    logger.warning(
        "A device has no memory for a step of %s, although the compiler stated that it fits: %s "
        "from here on. TNT_DEVICE_MEMORY sets the limit.",
        name,
        less,
    )
