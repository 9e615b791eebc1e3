"""The hooks between the loop and the callbacks, and the progress that callbacks read."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax

from tnt_jax.distributed import goodput, timeline
from tnt_jax.distributed.liveness import phases
from tnt_jax.distributed.stopping import SharedStop
from tnt_jax.keras_compat.callbacks import CallbackList, History, LazyLogs
from tnt_jax.keras_compat.callbacks.base import flat
from tnt_jax.keras_compat.callbacks.callback_list import agree_on_callbacks
from tnt_jax.train.execution import DeviceBatches


class Place(NamedTuple):
    """Where training is: an epoch, from 0, and the batches, real rows and sums of it so far."""

    epoch: int = 0
    batch: int = 0
    rows: int = 0
    sums: Any = None  # On the devices.


@dataclass
class Progress:
    """The progress of the running call."""

    stop_training: bool = False
    stop_evaluating: bool = False
    stop_predicting: bool = False
    rows_in_batch: int = 0  # Real rows of the global batch in the current step.
    epoch_sums: Any = None  # On the devices; the logs of the epoch so far come from them.
    history: History | None = None  # Of the last `fit`.
    is_compiling: bool = False
    place: Place = field(default_factory=Place)
    num_steps: int = 0  # Of training so far, those that `on_nan` has left among them.


Phase = Literal["train", "test", "predict"]
# What callbacks set to end a phase.
_FLAGS = {"train": "stop_training", "test": "stop_evaluating", "predict": "stop_predicting"}


@dataclass(frozen=True)
class CallbackArguments:
    """The callbacks of a call, and what they see."""

    callbacks: Any
    verbose: int | str
    model: Any

    @contextmanager
    def open(self, call: str, **params: Any) -> Iterator[CallbackList]:
        """Yields the callbacks, with the default ones, and clears the screen at last."""
        if self.verbose not in (0, 1, 2, "auto"):
            raise ValueError(
                "verbose must be 0 (silent), 1 (bar), 2 (one line per epoch) or 'auto', but is "
                f"{self.verbose!r}."
            )
        opened = CallbackList(
            agree_on_callbacks(flat(self.callbacks), call),
            add_history=call == "Model.fit",
            add_progbar=bool(self.verbose),
            model=self.model,
            verbose=self.verbose,
            **params,
        )
        try:
            yield opened
        finally:
            opened.clear_screen()


@dataclass(eq=False)
class PhaseHooks:
    """Calls the batch hooks of a phase, with logs that are computed on first access."""

    phase: Phase
    callbacks: CallbackList
    progress: Progress
    read: Callable[[Any], dict[str, float]]
    stop: SharedStop | None = None
    before_step: Callable[[], None] = lambda: None
    note_step: Callable[[], None] = lambda: None
    # Callbacks see the first and the last of so many steps, as in Keras also where fewer are left:
    # the end of those then has the number that the last of all would have.
    num_steps: int = 1

    def __post_init__(self) -> None:
        """Looks up what stays the same in all steps."""
        # Number of the last step of each group that runs: workers have several at a time.
        self._group_ends: deque[int] = deque()
        self._start_ns = self._first = 0
        self._here, self._timeline = phases.here(), timeline.current()
        self._trains = self.phase == "train"
        self._program: phases.Phase = "step"
        self._begin, self._end = f"on_{self.phase}_batch_begin", f"on_{self.phase}_batch_end"
        self._has_end = self.callbacks.has_batch_hook(self._end)

    def on_batch_begin(self, index: int) -> None:
        """Runs before step `index`."""
        self._here.step = index + 1
        if not self._group_ends or index > self._group_ends[-1]:
            self._group_ends.append(index + self.num_steps - 1)
            self.progress.rows_in_batch = 0
            self.callbacks.call_batch(self._begin, index, {})
        self.before_step()
        self._here.doing = (self._program, "")
        self._start_ns, self._first = time.perf_counter_ns(), index

    def on_batch_end(self, index: int, sums: Any, num_rows: int) -> bool:
        """Runs after step `index` was started; returns whether the loop ends with it."""
        if self._timeline is not None:
            place = {"epoch": self._here.epoch, "step": index + 1}
            end_ns = time.perf_counter_ns()
            self._timeline.add(f"{self.phase} step", "step", self._start_ns, end_ns, place)
        progress = self.progress
        progress.rows_in_batch += num_rows
        if sums is not None:
            progress.epoch_sums = sums
        if self._trains:
            epoch, _, rows, _ = progress.place
            progress.place = Place(epoch, index + 1, rows + num_rows, sums)
            progress.num_steps += index + 1 - self._first
            goodput.note_steps(index + 1 - self._first, self._start_ns)
        else:
            self.note_step()
        if self._group_ends and index >= self._group_ends[0]:
            self.end_group(sums)
        is_asked = getattr(progress, _FLAGS[self.phase])
        return self.stop is not None and self.stop.after_program(is_asked)

    def end_group(self, sums: Any) -> None:
        """Runs the callbacks after a group of steps, unless they have run."""
        index = self._group_ends.popleft() if self._group_ends else None
        if index is not None and self._has_end:
            logs = {} if sums is None else LazyLogs(lambda: self._logs(sums))
            self.callbacks.call_batch(self._end, index, logs)

    @property
    def is_over(self) -> bool:
        """Whether training has ended within the epoch."""
        return self.stop is not None and self.stop.is_over

    def _logs(self, sums: Any) -> dict[str, float]:
        """Returns the logs, for which the step must have run: a callback waits for the devices."""
        spent: goodput.Phase = "computing" if self._trains else "validating"
        with phases.in_phase("step", spent=spent):
            return self.read(sums)

    def announce(self, group: DeviceBatches, known: set[Any]) -> bool:
        """Adds the kind of the next step to those known; returns whether it is compiled first."""
        kind = (group.num_steps, *[x.shape for x in jax.tree.leaves(group.batch)])
        self.progress.is_compiling = is_new = kind not in known
        known.add(kind)
        if is_new:
            self._program = "compile"
        else:
            self._program = "step" if group.num_steps == 1 else "steps"
        return is_new

    def is_busy(self) -> bool:
        """Returns whether the last step that was started is still running."""
        return not all(x.is_ready() for x in jax.tree.leaves(self.progress.epoch_sums)[:1])
