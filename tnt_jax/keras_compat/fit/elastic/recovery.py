"""How `fit` goes on in an elastic job when processes are lost or join.

    recovery = Recovery(shared, hooks, call)
    while True:
        try:
            ...  # Steps of `start`'s epoch, and the epochs after it.
        except Exception as error:
            if not recovery.is_loss(error):
                raise
            start = recovery.go_on(error, reopen)

Each process keeps the state of its last complete step: steps take no state away (`donated`), and
the loop waits for each. The launcher forms the next generation of processes; those whose state is
older, and those that join, take that of a process with the newest one, from its memory. The hooks
after a step and of an epoch are called once for each; those before a step that fails, again.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from tnt_jax.distributed.elastic import link
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.host.comparison import describe_differences
from tnt_jax.distributed.host.objects import broadcast_object
from tnt_jax.distributed.joining import runtime
from tnt_jax.distributed.leaving import flush
from tnt_jax.keras_compat.callbacks import CallbackList
from tnt_jax.keras_compat.callbacks.backup_and_restore import collect, restore
from tnt_jax.keras_compat.fit.elastic.calls import Call, Generations
from tnt_jax.keras_compat.fit.preparation import Shared
from tnt_jax.keras_compat.fit.resume import Run, Start, differences
from tnt_jax.train.contracts import Batch

_WHOSE = ("here", "there")


@dataclass(frozen=True)
class _Place:
    """How far a process has come in `fit`.

    Attributes:
        step: Steps that its state has behind it.
        epoch, batches, rows: Where it is in the epochs; see `Progress`.
        last_logs: Logs of the epoch before, if this one has just begun.
    """

    step: int
    epoch: int
    batches: int
    rows: int
    stops: bool
    sums: list[np.ndarray]
    steps_per_execution: int | None
    last_logs: dict[str, Any]
    run: Run | None


class Recovery:
    """Lets one `fit` go on with other processes."""

    def __init__(self, shared: Shared, hooks: CallbackList, call: Call) -> None:
        self._shared, self._hooks = shared, hooks
        self.generations = Generations(shared, call)
        self._epoch: int | None = None
        # Logs of the epoch before.
        self.logs: dict[str, Any] = {}

    def begin_epoch(self, epoch: int) -> None:
        """Calls the hooks of the beginning of an epoch, unless that was before a loss."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._hooks.call("on_epoch_begin", epoch, {})

    def go_on(self, error: Exception | None, reopen: Callable[[], Batch]) -> Start:
        """Returns where training goes on after a loss, with other processes.

        Without an error the process joins, or raises `HasEnded`. `reopen` opens the data for the
        new processes.
        """
        place, kept = self._kept(error)
        return self.generations.go_on(
            error,
            (place.step, place.epoch),
            kept,
            lambda generation: self._adopt(place, kept, generation.source, reopen),
        )

    def _kept(self, error: Exception | None) -> tuple[_Place, Any]:
        """Returns the place and the state of the last complete step, on the host."""
        core, progress = self._shared.core, self._shared.progress
        kept = self.generations.kept(error)
        place = _Place(
            self.generations.num_steps,
            progress.epoch,
            progress.batches_done,
            progress.rows_done,
            progress.stop_training,
            jax.device_get(jax.tree.leaves(progress.training_sums)),
            core.require_compiled().steps_per_execution,
            self.logs,
            self._shared.resumption.run,
        )
        return place, kept

    def _adopt(self, own: _Place, kept: Any, source: int, reopen: Callable[[], Batch]) -> Start:
        """Returns where all processes go on, with the newest state; all of them call it."""
        core, progress = self._shared.core, self._shared.progress
        joins = self.generations.joins
        notes = collectives.agree("Model.fit", {}, note=[own.step, own.epoch, own.batches, joins])
        place = own
        if any(note != notes[source] for note in notes):
            sent = (own, collect(self._hooks.callbacks)) if jax.process_index() == source else None
            place, states = broadcast_object(sent, root_rank=runtime.first_rank_of(source))
            if joins:
                self._check_run(own, place)
            core.trainer.follow(kept, source)
            core.require_compiled().steps_per_execution = place.steps_per_execution
            if joins:
                restore(self._hooks.callbacks, *states)
        first = reopen()
        progress.stop_training = collectives.any_process(
            place.stops or own.stops, where="start of a generation"
        )
        trainer = core.trainer.of_group
        of_epoch = own.sums if own.epoch == place.epoch else []
        newest = trainer.sums_after_loss(of_epoch, place.sums)
        sums = trainer.host_sums(newest, first) if place.sums else None
        self._hooks.renew()
        if not joins:
            self._catch_up(own, place, sums)
        self.logs = place.last_logs
        progress.enter_epoch(place.epoch, place.batches, place.rows, sums)
        return Start(place.epoch, place.batches, place.rows, sums)

    def _catch_up(self, own: _Place, place: _Place, sums: Any) -> None:
        """Calls the hooks of steps whose results another process has had."""
        num_steps = place.step - own.step
        is_next = place.epoch > own.epoch
        if num_steps:
            logs = place.last_logs if is_next else self._shared.core.training_logs(sums)
            self._hooks.call_batch("on_train_batch_end", own.batches + num_steps - 1, logs)
        if is_next:
            self._hooks.call("on_epoch_end", own.epoch, place.last_logs)

    def _check_run(self, own: _Place, place: _Place) -> None:
        """Ends this process, which was to join, if it would train otherwise than the others."""
        line = link()
        assert own.run is not None and place.run is not None and line is not None
        found = differences(place.run, own.run, has_ended=False)
        versions = [own.run["versions"], place.run["versions"]]
        texts = [*found.values(), *filter(None, [describe_differences(versions, whose=_WHOSE)])]
        if texts:
            line.refuse(f"it would train otherwise than the others: {'; '.join(texts)}.")
            flush()
            os._exit(1)
