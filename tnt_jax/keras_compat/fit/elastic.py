"""Calls of the script in an elastic job, and how they go on with other processes.

The launcher forms the generations of processes (`tnt_jax/launch/membership.py`). `fit` goes on from
its last step (`Recovery`); `evaluate` and `predict`, which change nothing, begin again:

    call = Call(shared, trains=False)
    logs = call.repeat(compute)  # It calls `call.begin` once its data is open.
"""

import importlib
import json
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, TypeVar

import jax
import numpy as np

from tnt_jax.data.permutation import row_order_of
from tnt_jax.data.sources import Source
from tnt_jax.distributed import goodput, stopping
from tnt_jax.distributed.elastic import Generation, Interrupted, Link, link
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.host.comparison import describe_differences
from tnt_jax.distributed.host.objects import broadcast_object
from tnt_jax.distributed.joining import runtime
from tnt_jax.distributed.joining.join import own_address
from tnt_jax.distributed.leaving import flush, gist, tells_of_loss
from tnt_jax.distributed.liveness import phases
from tnt_jax.distributed.stopping import Points
from tnt_jax.job import Slot
from tnt_jax.keras_compat.callbacks import CallbackList
from tnt_jax.keras_compat.callbacks.backup_and_restore import collect, restore
from tnt_jax.keras_compat.fit.hooks import Place
from tnt_jax.keras_compat.fit.preparation import Shared
from tnt_jax.keras_compat.fit.resume import Run, differences
from tnt_jax.log import logger
from tnt_jax.train.contracts import Batch

# How long an error of JAX waits for the launcher to report a loss.
_NEWS_S = 5.0
_calls = Slot(count, lasts=True)
# Obstacles of which the user has been warned, by call.
_warned = Slot[set[tuple[str, str]]](set, lasts=True)
_T = TypeVar("_T")


class HasEnded(Exception):
    """Raised where a process was to join a call that the others have ended meanwhile."""


class Call:
    """A call of the script in an elastic job, and the generations of processes that make it.

    The calls of all processes have the same numbers.

    Args:
        trains: Whether a process can join in it.

    Attributes:
        has_ended: Whether this process, which is to join, takes its value from the others.
        joins: Whether this process is still to join the others.
    """

    def __init__(self, shared: Shared, *, trains: bool) -> None:
        self._shared, self._trains = shared, trains
        # As the user calls it, such as `Model.fit`.
        self._name = phases.here().calls[0]
        # Within another call, as in a callback, it is a part of that one.
        self._line = link() if len(phases.here().calls) == 1 else None
        self._number = -1 if self._line is None else next(_calls.get())
        self.has_ended = self.joins = False
        if self._line is not None and not self._line.has_joined:
            self.has_ended = not trains or self._line.result_of(self._number) is not None
        # None as long as the call cannot go on with other processes.
        self._link: Link | None = None
        # Whether no step of the generation is done.
        self._is_new = False

    @property
    def can_change(self) -> bool:
        """Whether the call can go on with other processes."""
        return self._link is not None

    @property
    def value(self) -> Any:
        """The value that the others have got from it, once they have."""
        assert self._line is not None
        value = self._line.await_result(self._number, trains=self._trains)["value"]
        if value is None:
            self._line.refuse(
                f"it has not the results of {self._name}, which the others have called."
            )
            flush()
            os._exit(1)
        return value

    def report(self, value: Any) -> None:
        """Reports its value for processes that join later; None for one that is not passed on."""
        if self._line is not None:
            plain = json.loads(json.dumps(value, default=lambda x: np.asarray(x).tolist()))
            self._line.report_result(self._number, {"value": plain})

    def begin(self, why_not: Callable[[], str | None]) -> None:
        """Reports whether the call can go on with other processes, or else the obstacle.

        All processes call it. After a loss it does nothing.
        """
        if self._line is None or self._link is not None:
            return
        self._link, self.joins = self._line, not self._line.has_joined
        if self.joins:
            # The first program that jax.export has written imports it, and the others would wait.
            importlib.import_module("scipy.linalg")
            return
        obstacles = collectives.agree(self._name, {}, note=why_not())
        obstacle = next(filter(None, obstacles), "")
        self._report_obstacle(obstacle)
        if not obstacle:
            return
        self._link, name = None, self._name.removeprefix("Model.")
        if (name, obstacle) not in _warned.get():
            _warned.get().add((name, obstacle))
            logger.warning(
                "If a process of this elastic job is lost, %s cannot go on in place, because %s. "
                "The job ends then; --max-restarts starts it again.",
                name,
                obstacle,
            )

    def end(self) -> None:
        """Reports, once all processes are here, that what follows cannot go on with others."""
        if self._link is not None:
            collectives.agree(f"the end of {self._name}", {})
            self._report_obstacle(f"{self._name} has ended")
            self._link = None

    def _report_obstacle(self, obstacle: str) -> None:
        assert self._link is not None
        if self._link.generation.index == 0:
            call = self._number if self._trains else -1
            self._link.report_obstacle(obstacle, call=call, sizes=self._sizes())

    def _sizes(self) -> list[int] | None:
        """Returns the numbers of processes on which the model computes; None for any."""
        assert self._link is not None
        options, ranks_each = self._shared.core.options, len(runtime.init().local_ranks)
        if not options.reproducible:
            return None
        numbers = range(1, self._link.planned + 1)
        possible = [n for n in numbers if options.virtual_ranks % (n * ranks_each) == 0]
        return None if len(possible) == len(numbers) else possible

    def note_step(self) -> None:
        """Reports to the launcher that the call goes on, after the first step of a generation."""
        if not self._is_new:
            return
        assert self._link is not None
        progress = self._shared.progress
        jax.block_until_ready(progress.epoch_sums)
        self._is_new = False
        if self._link.generation.index == 0:
            step = f"step {progress.place.batch} of epoch {progress.place.epoch + 1}"
            self._link.report_step(step if self._trains else f"the beginning of {self._name}")

    def is_loss(self, error: Exception) -> bool:
        """Returns whether an error follows from the end of this process's generation."""
        if self._link is None:
            return False
        if self._link.ended or isinstance(error, Interrupted) or tells_of_loss(error):
            return True
        return isinstance(error, jax.errors.JaxRuntimeError) and self._link.await_end(_NEWS_S)

    def repeat(self, compute: Callable[[], _T]) -> _T:
        """Returns the result of a call that changes nothing; after a loss it begins again."""
        while True:
            try:
                result = compute()
                self.end()
                return result
            except Exception as error:
                if not self.is_loss(error):
                    raise
                kept, points = self.kept(error), stopping.current() or Points()
                self.go_on(
                    error,
                    (0,),  # All have got equally far.
                    kept,
                    lambda _, points=points: stopping.renewed(points),
                )

    def kept(self, error: Exception | None) -> Any:
        """Returns what the trainer keeps of the last complete step, on the host.

        Raises:
            RuntimeError: If something would be lost that was not there when the call began, such as
                a model that a callback has made.
        """
        if obstacle := self._shared.core.why_not_elastic():
            raise RuntimeError(
                f"{self._name} cannot go on with other processes, because {obstacle}. The job "
                "ends; --max-restarts starts it again."
            ) from error
        trainer = self._shared.core.trainer
        for ahead in (trainer.ahead, trainer.evaluation_ahead, trainer.ahead_of_loss):
            ahead.wait()
        return trainer.kept()

    def go_on(
        self,
        error: Exception | None,
        done: Sequence[int],
        kept: Any,
        adopt: Callable[[Generation], _T],
    ) -> _T:
        """Returns what `adopt` does in the next generation; further losses have it done again.

        The error is that of the loss, None in a process that joins. How far this process has come
        is `done`, in numbers that are compared in their order; what it has for the next generation
        is `kept`. `HasEnded` says that the others have ended the call that this process was to
        join.
        """
        with goodput.phase("restarting"):
            while True:
                why = "" if error is None else gist(error)
                logger.debug("Waits for the next generation. %s", why, exc_info=error)
                try:
                    result = adopt(self._next(done, kept, why))
                    break
                except Exception as another:  # A further process was lost meanwhile.
                    if not self.is_loss(another):
                        raise
                    error = another
        self.joins, self._is_new = False, True
        return result

    def _next(self, done: Sequence[int], kept: Any, why: str) -> Generation:
        """Waits for the next generation, and returns it with the state on its devices."""
        assert self._link is not None
        # Before it has joined, a process has no state that others could take.
        message = {"done": [] if self.joins else list(done), "why": why, **_addresses()}
        generation = self._link.next_generation({"call": self._number, **message})
        if generation is None:
            raise HasEnded
        runtime.rejoin(generation)
        self._shared.core.reopen(kept)
        return generation


def why_not_again(
    source: Source, *, is_distributed: bool, rows_per_rank: Sequence[int | None]
) -> str | None:
    """Returns why other processes cannot read a call's data from the same row on, or None."""
    order = row_order_of(source)
    if not is_distributed:
        return "each process brings data of its own, of which a part would be lost"
    if not order.can_go_back:
        return "the data is a generator, which cannot go back"
    if any(rows is not None for rows in rows_per_rank):
        return "the global batch follows from tnt_micro_batch_size and the number of ranks"
    return order.unrepeatable or None


def _addresses() -> dict[str, str]:
    """Returns where a coordinator of this process could listen, for one machine and for several."""
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
    host = own_address() or socket.gethostname()
    host = f"[{host}]" if ":" in host else host
    return {"local_address": f"127.0.0.1:{port}", "address": f"{host}:{port}"}


_WHOSE = ("here", "there")


@dataclass(frozen=True)
class _Progress:
    """How far a process has come in `fit`.

    Attributes:
        step: Steps that it has run.
        place: Where it is, with host sums.
        last_logs: Logs of the epoch before, if this one has just begun.
        given: What `fit` was given, in words.
        watched: What `on_nan` has kept, on the host; None without it.
        known_of_rows: For what it is known whether rows depend on one another.
    """

    step: int
    place: Place
    stops: bool
    steps_per_execution: int | None
    last_logs: dict[str, Any]
    given: dict[str, str]
    run: Run | None
    watched: Any
    known_of_rows: tuple[set[bool], set[bool], bool]


class Recovery:
    """Lets one `fit` go on with other processes; `FitLoop` calls it where an error is a loss.

    Each process keeps the state of its last complete step: steps take no state away (`donated`),
    and the loop waits for each. The launcher forms the next generation of processes; those whose
    state is older, and those that join, take that of a process with the newest one, from its
    memory. The hooks after a step and of an epoch are called once for each; those before a step
    that fails, again.
    """

    def __init__(
        self, shared: Shared, hooks: CallbackList, call: Call, given: Callable[[], dict[str, Any]]
    ) -> None:
        self._shared, self._hooks, self._call, self._given = shared, hooks, call, given
        self._epoch: int | None = None
        # Logs of the epoch before.
        self.logs: dict[str, Any] = {}

    def begin_epoch(self, epoch: int) -> None:
        """Calls the hooks of the beginning of an epoch, unless that was before a loss."""
        if epoch != self._epoch:
            self._epoch = epoch
            self._hooks.call("on_epoch_begin", epoch, {})

    def go_on(self, error: Exception | None, reopen: Callable[[], Batch]) -> Place:
        """Returns where training goes on after a loss, with other processes.

        Without an error the process joins, or raises `HasEnded`. `reopen` opens the data for the
        new processes.
        """
        kept, progress = self._call.kept(error), self._shared.progress
        sums = jax.device_get(jax.tree.leaves(progress.place.sums))
        core = self._shared.core
        compilation, watch = core.require_compiled(), core.trainer.programs.watch
        own = _Progress(
            progress.num_steps,
            progress.place._replace(sums=sums),
            progress.stop_training,
            compilation.steps_per_execution,
            self.logs,
            {name: str(value) for name, value in self._given().items()},
            self._shared.resumption.run,
            watch and watch.kept(),
            (compilation.traced_rows, compilation.checked_rows, core.knows_outputs),
        )
        return self._call.go_on(
            error,
            (own.step, own.place.epoch),
            kept,
            lambda generation: self._adopt(own, kept, generation.source, reopen),
        )

    def _adopt(self, own: _Progress, kept: Any, source: int, reopen: Callable[[], Batch]) -> Place:
        """Returns where all processes go on, with the newest state; all of them call it."""
        core, progress = self._shared.core, self._shared.progress
        compilation, joins = core.require_compiled(), self._call.joins
        place = [own.step, own.place.epoch, own.place.batch, joins]
        note = [place, bool(own.stops), list(map(str, compilation.known_kinds))]
        notes = collectives.agree("Model.fit", {}, note=note)
        # All processes check a kind of data together, or none does.
        known = set.intersection(*(set(kinds) for *_, kinds in notes))
        compilation.known_kinds = {x for x in compilation.known_kinds if str(x) in known}
        newest = own
        if any(other != notes[source][0] for other, *_ in notes):
            traced = core.trainer.traced
            assert traced is not None
            sent = None
            if jax.process_index() == source:
                sent = own, collect(self._hooks.callbacks), traced.programs
            root_rank = runtime.first_rank_of(source)
            newest, states, programs = broadcast_object(sent, root_rank=root_rank)
            if joins:
                self._check_run(own, newest)
                traced.programs.update(programs)
            core.trainer.follow(kept, source)
            compilation.steps_per_execution = newest.steps_per_execution
            if joins:
                of_rows = newest.known_of_rows
                compilation.traced_rows, compilation.checked_rows, core.knows_outputs = of_rows
                restore(self._hooks.callbacks, *states)
        first = reopen()
        progress.stop_training = any(stops for _, stops, _ in notes)
        trainer, place = core.trainer.of_group, newest.place
        of_epoch = own.place.sums if own.place.epoch == place.epoch else []
        leaves = trainer.sums_after_loss(of_epoch, place.sums)
        place = place._replace(sums=trainer.host_sums(leaves, first) if place.sums else None)
        if (watch := core.trainer.programs.watch) is not None:
            watch.take(newest.watched, core.trainer.require_state(), place.sums)
        self._hooks.renew()
        if not joins:
            self._catch_up(own, newest, place.sums)
        self.logs, progress.place, progress.num_steps = newest.last_logs, place, newest.step
        return place

    def _catch_up(self, own: _Progress, newest: _Progress, sums: Any) -> None:
        """Calls the hooks of steps whose results another process has had."""
        num_steps = newest.step - own.step
        is_next = newest.place.epoch > own.place.epoch
        if num_steps:
            logs = newest.last_logs if is_next else self._shared.core.training_logs(sums)
            last = own.place.batch + num_steps - 1
            self._hooks.call_batch("on_train_batch_end", last, logs)
        if is_next:
            self._hooks.call("on_epoch_end", own.place.epoch, newest.last_logs)

    def _check_run(self, own: _Progress, newest: _Progress) -> None:
        """Ends this process, which was to join, if it would train otherwise than the others."""
        line = link()
        assert own.run is not None and newest.run is not None and line is not None
        found = differences(newest.run, own.run, has_ended=False)
        given = own.given | own.run["versions"], newest.given | newest.run["versions"]
        if texts := [*found.values(), *filter(None, [describe_differences(given, whose=_WHOSE)])]:
            line.refuse(f"it would train otherwise than the others: {'; '.join(texts)}.")
            flush()
            os._exit(1)
