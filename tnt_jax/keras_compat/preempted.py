"""How `fit` takes requests to end, and what it does then: save, end the callbacks, exit."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from tnt_jax.distributed import preemption
from tnt_jax.distributed.preemption import Points
from tnt_jax.keras_compat.callbacks import BackupAndRestore, CallbackList
from tnt_jax.keras_compat.progress import Progress
from tnt_jax.log import logger
from tnt_jax.on_ray.worker import role
from tnt_jax.settings import PREEMPTED_EXIT_CODE


@contextmanager
def ending_on_request(callbacks: Sequence[Any]) -> Iterator[Points]:
    """Yields the points at which the `fit` within the block may end.

    If a callback can save the state, signals to this process are requests from here on, and stay
    so if that callback keeps what it has saved when training is over.
    """
    if role() is not None:
        # Ray trains in a thread, which gets no signals, and ends its processes by itself.
        yield Points()
        return
    backups = [item for item in callbacks if isinstance(item, BackupAndRestore)]
    watch = preemption.start() if backups else None
    if watch is None or watch.is_training:
        yield Points()
        return
    watch.is_training = True
    watch.take_signals()
    try:
        yield watch
    finally:
        watch.is_training = False
        if all(backup.delete_checkpoint for backup in backups):
            watch.leave_signals()


def save_and_exit(
    save: Callable[[], bool] | None,
    callbacks: CallbackList,
    progress: Progress,
    logs: Mapping[str, float],
) -> NoReturn:
    """Saves the state, ends the callbacks, and ends the process; all processes call it together.

    Args:
        save: Saves the running `fit` where it is, and returns whether that is written.
        callbacks: The callbacks of it.
        progress: Where it is.
        logs: The logs of the last complete epoch.

    Raises:
        SystemExit: With the exit code of a preempted run, or that of the signal if the state could
            not be saved.
    """
    assert save is not None, "Without a callback that saves, nobody is asked to end."
    watch = preemption.current()
    assert watch is not None
    place = f"after step {progress.batches_done} of epoch {progress.epoch + 1}"
    if save():
        code = PREEMPTED_EXIT_CODE
        logger.warning(
            "%s: the state %s is saved. Ending with exit code %d; the same command goes on from "
            "there.", watch.reason, place, code,
        )  # fmt: skip
    else:
        code = 128 + watch.signum
        logger.error(
            "%s: the state %s could not be saved. Ending with exit code %d; the same command goes "
            "on from the checkpoint before.", watch.reason, place, code,
        )  # fmt: skip
    callbacks.call("on_train_end", logs)
    preemption.leave(code)
