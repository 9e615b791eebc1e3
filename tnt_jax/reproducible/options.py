"""The options of reproducible training: which go with it, and what JAX needs before it starts."""

import os

import jax

from tnt_jax import _jax
from tnt_jax.log import logger
from tnt_jax.reproducible.virtual_ranks import check_count


def check_reproducible(
    virtual_ranks: int, gradient_compression: str | None, shard_optimizer_state: bool
) -> None:
    """Raises a ValueError if options exclude one another; prepares JAX, if it is not in use yet."""
    check_count(virtual_ranks)
    for name, value in (
        ("gradient_compression", gradient_compression),
        ("shard_optimizer_state", shard_optimizer_state),
    ):
        if value:
            raise ValueError(
                f"{name}={value!r} changes how gradients are summed, which reproducible=True "
                f"fixes. Leave one of them out."
            )
    _fix_cpu_threads(virtual_ranks)


def _fix_cpu_threads(virtual_ranks: int) -> None:
    """Sets the size of JAX's pool of CPU threads, which rounds large products; may only warn."""
    threads = str(2 * virtual_ranks)
    if not _jax.backends_are_initialized():
        os.environ["PJRT_NPROC"] = threads
    elif jax.default_backend() == "cpu" and os.environ.get("PJRT_NPROC") != threads:
        logger.warning(
            "JAX was in use before the reproducible model was made, so its pool of CPU threads "
            "keeps its size (PJRT_NPROC=%s): results "
            "equal those of runs with the same size only. Make the model first, or set "
            "PJRT_NPROC=%s before the start.",
            os.environ.get("PJRT_NPROC", "unset"),
            threads,
        )
