"""Reports on data that processes exchange, from the thread that reads it.

The reports travel through the job's coordination service. No device takes part and the training
step waits for nothing: reports are posted for several batches at once and ahead of their use.
"""

import json
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any, NamedTuple

import jax

from tnt_jax import _jax
from tnt_jax.distributed.leaving import PeerError
from tnt_jax.distributed.liveness.rendezvous import read_key
from tnt_jax.job import Slot

# Set in a thread that reads data once its batches are no longer used: it then stops waiting for
# other processes.
reader_stopped: ContextVar[threading.Event | None] = ContextVar("reader_stopped", default=None)


@dataclass(frozen=True)
class Report:
    """The report of a process on the rows of its next batches, and whether its data ends then."""

    num_rows: list[int]
    has_ended: bool
    local_ranks: int
    error: str = ""
    # Of each batch what must be the same on all processes: rows, structure, shapes and dtypes.
    batches: list[str] = field(default_factory=list)


class CoordinationBoard:
    """Texts that processes show in the key-value store of `jax.distributed`, under equal names.

    One process keeps all to itself.
    """

    def __init__(self) -> None:
        self.num_processes, self.process = jax.process_count(), jax.process_index()
        self._own: dict[str, str] = {}

    def post(self, name: str, text: str) -> None:
        """Shows `text` of this process under `name`."""
        self._own[name] = text
        if self.num_processes > 1:
            _jax.coordination_client().key_value_set(f"tnt_jax/{name}/{self.process}", text)

    def read(self, name: str, process: int) -> str:
        """Waits for what `process` shows under `name`."""
        if process == self.process:
            return self._own[name]
        stopped = reader_stopped.get()
        is_over = (lambda: False) if stopped is None else stopped.is_set
        text = read_key(f"tnt_jax/{name}/{process}", f"data of process {process}", is_over=is_over)
        if text is None:
            raise InterruptedError("The batches of this thread are no longer used.")
        return text

    def remove(self, name: str) -> None:
        """Takes this process's text under `name` away."""
        del self._own[name]
        if self.num_processes > 1:
            _jax.coordination_client().key_value_delete(f"tnt_jax/{name}/{self.process}")


_counts = Slot[dict[str, Iterator[int]]](lambda: defaultdict(count))


def unique_name(kind: str) -> str:
    """Returns a name on the board that no other call has; all processes call it equally often."""
    return f"{kind}/{next(_counts.get()[kind])}"


def gather(board: CoordinationBoard, name: str, value: Any) -> list[Any]:
    """Returns the JSON values of all processes, by process, that each posts under a name."""
    board.post(name, json.dumps(value))
    return [json.loads(board.read(name, process)) for process in range(board.num_processes)]


class Exchange:
    """Rounds in which every process posts one report and reads those of all; its name is unique."""

    def __init__(self, board: CoordinationBoard, name: str) -> None:
        self._board, self._name = board, name
        self._posted = self._read = 0

    def post(self, report: Report) -> None:
        """Posts this process's report of the next round."""
        self._board.post(f"{self._name}/{self._posted}", json.dumps(asdict(report)))
        self._posted += 1

    def read(self) -> list[Report]:
        """Waits for the next round's reports of all processes and returns them, by process.

        An error in the data of one is a PeerError, which names the process and the error.
        """
        reports = self.read_all()
        for process, report in enumerate(reports):
            if report.error:
                raise PeerError(process, f"The data of process {process} failed: {report.error}")
        return reports

    def read_all(self) -> list[Report]:
        """Waits for the next round's reports and returns them, by process, including errors."""
        name = f"{self._name}/{self._read}"
        reports = [
            Report(**json.loads(self._board.read(name, process)))
            for process in range(self._board.num_processes)
        ]
        if self._read:
            # A process that posted this round has read the previous one.
            self._board.remove(f"{self._name}/{self._read - 1}")
        self._read += 1
        return reports


class _Waiting(NamedTuple):
    batch: Any
    num_rows: int
    description: str
    num_bytes: int


class ReadAhead:
    """Batches that this process has read ahead of their use, and reports to the others.

    `describe` returns the rows of a batch, and what must be the same on all processes. An error in
    its data is kept, to be raised once it was reported.
    """

    def __init__(
        self, batches: Iterator[Any], describe: Callable[[Any], tuple[int, str]], local_ranks: int
    ) -> None:
        self._batches = batches
        self._describe = describe
        self._local_ranks = local_ranks
        self._waiting: list[_Waiting] = []
        self._has_ended = False
        self.error: Exception | None = None

    def read(self, num_batches: int, *, at_most: int, most_bytes: float = math.inf) -> None:
        """Reads up to `num_batches` more, until `at_most` wait or they are large."""
        for _ in range(num_batches):
            num_bytes = sum(waiting.num_bytes for waiting in self._waiting)
            if self._has_ended or len(self._waiting) >= at_most or num_bytes >= most_bytes:
                return
            try:
                batch = next(self._batches)
                size = sum(getattr(x, "nbytes", 0) for x in jax.tree.leaves(batch))
                self._waiting.append(_Waiting(batch, *self._describe(batch), size))
            except StopIteration:
                self._has_ended = True
            except Exception as error:
                self._has_ended = True
                self.error = error

    def report(self) -> Report:
        """Returns a report on the waiting batches."""
        text = "" if self.error is None else f"{type(self.error).__name__}: {self.error}"
        rows = [waiting.num_rows for waiting in self._waiting]
        descriptions = [waiting.description for waiting in self._waiting]
        return Report(rows, self._has_ended, self._local_ranks, text, descriptions)

    def take(self, num_batches: int | None = None) -> list[Any]:
        """Returns the next batches, all that wait by default."""
        taken = self._waiting[:num_batches]
        del self._waiting[:num_batches]
        return [waiting.batch for waiting in taken]
