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

import json
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

import jax
import numpy as np

from tnt_jax.distributed import goodput
from tnt_jax.distributed.elastic.link import Interrupted, link
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.host.comparison import describe_differences
from tnt_jax.distributed.host.objects import broadcast_object
from tnt_jax.distributed.joining import runtime
from tnt_jax.distributed.joining.join import own_address
from tnt_jax.distributed.leaving.last_words import flush, gist, tells_of_loss
from tnt_jax.distributed.liveness import phases
from tnt_jax.job import Slot
from tnt_jax.keras_compat.callbacks import CallbackList
from tnt_jax.keras_compat.callbacks.backup_and_restore import collect, restore
from tnt_jax.keras_compat.fit.preparation import Shared
from tnt_jax.keras_compat.fit.resume import Run, Start, differences
from tnt_jax.log import logger
from tnt_jax.train.contracts import Batch

# How long an error of JAX waits for the launcher to report a loss.
_NEWS_S = 5.0
_calls = Slot(count, lasts=True)
_WHOSE = ("here", "there")


class Call:
    """A call of the script in an elastic job; the calls of all processes have the same numbers.

    Args:
        trains: Whether a process can join in it.

    Attributes:
        number: Its number; -1 if it is none.
        has_ended: Whether this process, which is to join, takes its value from the others.
    """

    def __init__(self, *, trains: bool) -> None:
        # Within another call, as in a callback, it is a part of that one.
        self._link = link() if len(phases.here().calls) == 1 else None
        self._trains = trains
        self.number = -1 if self._link is None else next(_calls.get())
        self.has_ended = False
        if self._link is not None and not self._link.has_joined:
            self.has_ended = not trains or self._link.result_of(self.number) is not None

    @property
    def value(self) -> Any:
        """The value that the others have got from it, once they have."""
        assert self._link is not None
        value = self._link.await_result(self.number, trains=self._trains)["value"]
        if value is None:
            self._link.refuse(
                f"it has not the results of {phases.here().calls[0]}, which the others have called."
            )
            flush()
            os._exit(1)
        return value

    def end(self, value: Any) -> None:
        """Reports its value for processes that join later; None for one that is not passed on."""
        if self._link is not None:
            plain = json.loads(json.dumps(value, default=lambda x: np.asarray(x).tolist()))
            self._link.report_result(self.number, {"value": plain})


class HasEnded(Exception):
    """Raised where a process was to join a call that the others have ended meanwhile."""


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
        self._shared, self._hooks, self._call = shared, hooks, call
        self._link = link() if call.number >= 0 else None
        # Whether this process is still to join those that train.
        self.joins = self._link is not None and not self._link.has_joined
        self._epoch: int | None = None
        # Logs of the epoch before.
        self.logs: dict[str, Any] = {}
        # Whether no step of the generation is done.
        self.is_new = False

    def begin(self, obstacle: str | None) -> None:
        """Reports whether training can go on with other processes, or the obstacle."""
        if self._link is None or not self._link.has_joined:
            return
        obstacles = collectives.agree("Model.fit", {}, note=obstacle)
        obstacle = next(filter(None, obstacles), None)
        if self._link.generation.index == 0:
            self._link.report_obstacle(obstacle or "", self._call.number)
        if obstacle is not None:
            logger.warning(
                "If a process of this elastic job is lost, fit cannot go on in place, because %s. "
                "The job ends then; --max-restarts starts it again.",
                obstacle,
            )
            self._link = None

    def end(self) -> None:
        """Reports that what follows cannot go on with other processes."""
        if self._link is not None and self._link.generation.index == 0:
            self._link.report_obstacle("fit has ended", self._call.number)

    def begin_epoch(self, epoch: int) -> None:
        """Calls the hooks of the beginning of an epoch, unless that was before a loss."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._hooks.call("on_epoch_begin", epoch, {})

    def note_step(self) -> None:
        """Reports to the launcher that training goes on, after the first step of a generation."""
        if self.is_new and self._link is not None:
            self.is_new = False
            if self._link.generation.index == 0:
                progress = self._shared.progress
                self._link.report_step(
                    f"step {progress.batches_done} of epoch {progress.epoch + 1}"
                )

    def go_on(self, error: Exception | None, reopen: Callable[[], Batch]) -> Start:
        """Returns where training goes on after a loss, with other processes.

        Without an error the process joins, or raises `HasEnded`. `reopen` opens the data for the
        new processes.
        """
        with goodput.phase("restarting"):
            place, kept = self._kept()
            why = "" if error is None else gist(error)
            logger.debug("Waits for the next generation. %s", why, exc_info=error)
            while True:
                try:
                    return self._join_next(place, kept, why, reopen)
                except Exception as another:  # A further process was lost meanwhile.
                    if not self.is_loss(another):
                        raise
                    why = gist(another)
                    logger.debug("Waits for the next generation. %s", why, exc_info=another)

    def _join_next(self, place: _Place, kept: Any, why: str, reopen: Callable[[], Batch]) -> Start:
        """Returns where training goes on in the next generation."""
        assert self._link is not None
        generation = self._link.next_generation(
            {
                "call": self._call.number,
                "done": [place.step, place.epoch],
                "why": why,
                **_addresses(),
            }
        )
        if generation is None:
            raise HasEnded
        runtime.rejoin(generation)
        self._shared.core.reopen(kept)
        start = self._adopt(place, kept, generation.source, reopen)
        self.joins, self.is_new = False, True
        return start

    def is_loss(self, error: Exception) -> bool:
        """Returns whether an error follows from the end of this process's generation."""
        if self._link is None:
            return False
        if self._link.ended or isinstance(error, Interrupted) or tells_of_loss(error):
            return True
        return isinstance(error, jax.errors.JaxRuntimeError) and self._link.await_end(_NEWS_S)

    def _kept(self) -> tuple[_Place, Any]:
        """Returns the place and the state of the last complete step, on the host."""
        core, progress = self._shared.core, self._shared.progress
        core.trainer.ahead.wait()
        core.trainer.evaluation_ahead.wait()
        place = _Place(
            int(jax.device_get(core.trainer.require_state().step)),
            progress.epoch,
            progress.batches_done,
            progress.rows_done,
            progress.stop_training,
            jax.device_get(jax.tree.leaves(progress.training_sums)),
            core.require_compiled().steps_per_execution,
            self.logs,
            self._shared.resumption.run,
        )
        return place, core.trainer.kept()

    def _adopt(self, own: _Place, kept: Any, source: int, reopen: Callable[[], Batch]) -> Start:
        """Returns where all processes go on, with the newest state; all of them call it."""
        core, progress = self._shared.core, self._shared.progress
        joins = self.joins
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
        assert own.run is not None and place.run is not None and self._link is not None
        found = differences(place.run, own.run, has_ended=False)
        versions = [own.run["versions"], place.run["versions"]]
        texts = [*found.values(), *filter(None, [describe_differences(versions, whose=_WHOSE)])]
        if texts:
            self._link.refuse(f"it would train otherwise than the others: {'; '.join(texts)}.")
            flush()
            os._exit(1)


def _addresses() -> dict[str, str]:
    """Returns where a coordinator of this process could listen, for one machine and for several."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    host = own_address() or socket.gethostname()
    host = f"[{host}]" if ":" in host else host
    return {"local_address": f"127.0.0.1:{port}", "address": f"{host}:{port}"}
