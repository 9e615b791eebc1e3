"""What `fit` reports of its start, of waiting for data, and of losses that are no numbers."""

import math

from tnt_jax.distributed import runtime
from tnt_jax.job import Slot
from tnt_jax.log import logger

# What this process has warned of, and started, already in its job.
_warned = Slot[set[str]](set)
_started = Slot[set[str]](set)


def has_started() -> bool:
    """Returns whether a step of training has started in this job."""
    return "training" in _started.get()


def note_start() -> None:
    """Logs how long the first step of the job took to start."""
    if "training" not in _started.get():
        _started.get().add("training")
        runtime.log_start_phase("first step compiled and started")


def report_waiting(epoch: int, input_wait_s: float, epoch_s: float) -> None:
    """Reports how long the devices waited for data.

    If that is more than a tenth of the time, it says once what to do about it.
    """
    logger.info("Epoch %d: input_wait_s %.2f of %.2f s.", epoch + 1, input_wait_s, epoch_s)
    if input_wait_s > 0.1 * epoch_s and epoch_s > 1 and "input" not in _warned.get():
        _warned.get().add("input")
        logger.warning(
            "Training waits for its data: %.1f of the %.1f s of epoch %d. Prepare it in parallel "
            "(dataset.map(..., "
            "num_parallel_calls=tf.data.AUTOTUNE) and prefetch, or more workers), cache it, or "
            "decode less per step.",
            input_wait_s, epoch_s, epoch + 1,
        )  # fmt: skip


def report_loss(epoch: int, loss: float) -> None:
    """Warns of a loss that is no number."""
    if not math.isfinite(loss):
        logger.warning(
            "The training loss of epoch %d is %s: inputs or weights hold NaN or infinity, or an "
            "embedding lacks ids of the inputs. "
            "compile(on_nan=...) keeps such steps out of the weights.",
            epoch + 1,
            loss,
        )
