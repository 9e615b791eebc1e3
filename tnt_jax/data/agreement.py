"""Processes tell one another about their data through the coordination service, from the thread that reads it.

No device takes part and the training step waits for nothing: reports are posted for several batches at once and ahead of their use.
"""

import json
from dataclasses import asdict, dataclass
from itertools import count
from typing import Protocol

import jax

from tnt_jax import _jax
from tnt_jax.log import logger

# A dead process is noticed by the coordination service; a slow one is only reported, every so many seconds.
_PATIENCE_S = 60


@dataclass(frozen=True)
class Report:
    """What a process says about its next batches.

    Attributes:
        num_rows: Real rows of each of its next batches.
        has_ended: Whether its data ends after them.
        local_ranks: Ranks of the process.
        error: What went wrong in its data; empty when nothing did.
    """

    num_rows: list[int]
    has_ended: bool
    local_ranks: int
    error: str = ""


class Board(Protocol):
    """Where reports are posted under names that all processes use in the same order."""

    num_processes: int
    process: int

    def post(self, name: str, text: str) -> None:
        """Shows `text` of this process under `name`."""
        ...

    def read(self, name: str, process: int) -> str:
        """Waits for what `process` shows under `name`."""
        ...

    def remove(self, name: str) -> None:
        """Takes this process's text under `name` away."""
        ...


class CoordinationBoard:
    """A board in the key/value store of `jax.distributed`; with one process nothing is stored elsewhere."""

    def __init__(self) -> None:
        self.num_processes, self.process = jax.process_count(), jax.process_index()
        self._own: dict[str, str] = {}

    def post(self, name: str, text: str) -> None:
        """Shows `text` of this process under `name`."""
        self._own[name] = text
        if self.num_processes > 1:
            _jax.coordination_client().key_value_set(f"tnt_jax/{name}/{self.process}", text)

    def read(self, name: str, process: int) -> str:
        """Waits for what `process` shows under `name`; warns every minute."""
        if process == self.process:
            return self._own[name]
        client = _jax.coordination_client()
        for waited in count(_PATIENCE_S, _PATIENCE_S):
            try:
                return client.blocking_key_value_get(f"tnt_jax/{name}/{process}", _PATIENCE_S * 1000)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                logger.warning("Waited %d s for the data of process %d; its input may be slow or stuck.", waited, process)
        raise AssertionError("unreachable")

    def remove(self, name: str) -> None:
        """Takes this process's text under `name` away."""
        del self._own[name]
        if self.num_processes > 1:
            _jax.coordination_client().key_value_delete(f"tnt_jax/{name}/{self.process}")


class Exchange:
    """A sequence of rounds in each of which every process posts one report and reads those of all.

    Args:
        board: Where reports are posted.
        name: Name of the sequence, the same on all processes and used once.
    """

    def __init__(self, board: Board, name: str) -> None:
        self._board, self._name = board, name
        self._posted = self._read = 0

    def post(self, report: Report) -> None:
        """Posts this process's report of the next round."""
        self._board.post(f"{self._name}/{self._posted}", json.dumps(asdict(report)))
        self._posted += 1

    def read(self) -> list[Report]:
        """Waits for the next round's reports of all processes and returns them, by process.

        Raises:
            RuntimeError: If a process reports an error in its data; the text names the process and the error.
        """
        name = f"{self._name}/{self._read}"
        reports = [Report(**json.loads(self._board.read(name, process))) for process in range(self._board.num_processes)]
        if self._read:
            # Who posted this round has read the one before.
            self._board.remove(f"{self._name}/{self._read - 1}")
        self._read += 1
        for process, report in enumerate(reports):
            if report.error:
                raise RuntimeError(f"The data of process {process} failed: {report.error}")
        return reports
