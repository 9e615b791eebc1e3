"""The agreement of all processes to stop at the same point, for which any of them may ask.

All processes pass the same points in the same order, and count them. The one that asks posts a
request in the job's coordination service. Every process answers with the first point at which it
can stop, by a thread, whatever its main thread does; all stop at the greatest. A point costs two
attributes until somebody asks. No device takes part.
"""

import contextlib
import threading
import time
from collections.abc import Callable

import jax

from tnt_jax import _jax
from tnt_jax.distributed.liveness.rendezvous import await_key, read_key
from tnt_jax.distributed.liveness.threads import start_thread
from tnt_jax.log import logger

_LEFT = "left"
_TICK_S = 0.01


class Agreement:
    """The points that all processes pass, and the one at which they stop.

    Its keys in the coordination service begin with `folder`. `answer` returns, for this and the
    text of a request, the first point at which this process can stop, or None if it has left; it
    runs in the thread, may wait, and may close the points. `name`, `what` and `lost` are for the
    thread and its messages.

    Attributes:
        passed: Points so far.
        is_closed: Whether this process waits for the end at the next point.
        end: The point where all stop; None until it is known from the `answers`.
        has_asked: Whether the request of this process is the one that counts.
        stopped: Set once this process has left.
    """

    def __init__(
        self,
        folder: str,
        answer: Callable[["Agreement", str], int | None],
        *,
        name: str,
        what: str,
        lost: str,
    ) -> None:
        self.passed = 0
        self.is_closed = self.has_asked = False
        self.end: int | None = None
        self.answers: list[int] = []
        self.stopped = threading.Event()
        self._folder, self._answer, self._what = folder, answer, what
        self._has_answered = False
        self._lock = threading.Lock()
        self._process, self._num_processes = jax.process_index(), jax.process_count()
        if self._num_processes > 1:
            self._client = _jax.coordination_client()
            self._thread = start_thread(self._agree, name=name, lost=lost)

    def ask(self, text: str) -> str:
        """Asks all processes to stop; returns the request that counts, which is the first."""
        if self._num_processes == 1:
            self.end = self._answer(self, text)
            return text
        try:
            self._client.key_value_set(f"{self._folder}/request", text)
            self.has_asked = True
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
        return _jax.value_of_key(self._client, f"{self._folder}/request") or text

    def stops_here(self) -> bool:
        """Passes the next point; returns whether all processes stop there.

        Once the points are closed, it waits until all have answered.
        """
        # Before the look at `is_closed`: the thread closes the points, and then reads the number.
        self.passed += 1
        return self.is_closed and self._await_end() <= self.passed

    def answer(self, point: int) -> None:
        """Closes the points and answers, unless this process has."""
        self.is_closed = True
        self._post(str(point))

    def leave(self, answer: int | None, *, wait_s: float = 0) -> None:
        """Ends the thread; answers in place of later points, with None after an error."""
        self.stopped.set()
        if self._num_processes > 1:
            if wait_s:
                self._thread.join(wait_s)
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # The service has ended.
                self._post(_LEFT if answer is None else str(answer))

    def clean(self) -> None:
        """Ends the thread and deletes what this process has posted; all have met since the end."""
        self.stopped.set()
        if self._has_answered:
            self._client.key_value_delete(f"{self._folder}/{self._process}")
        if self.has_asked:
            self._client.key_value_delete(f"{self._folder}/request")

    def _post(self, answer: str) -> None:
        with self._lock:
            if self._has_answered:
                return
            self._has_answered = True
        self._client.key_value_set(f"{self._folder}/{self._process}", answer)

    def _await_end(self) -> int:
        while self.end is None:
            if self._num_processes == 1:
                time.sleep(_TICK_S)  # The thread of the signal is about to set it.
                continue
            texts = [
                read_key(f"{self._folder}/{process}", self._what) or ""
                for process in range(self._num_processes)
            ]
            if _LEFT in texts:
                raise RuntimeError(
                    f"Process {texts.index(_LEFT)} has left the training loop by an error, while "
                    "this one was asked to end it."
                )
            self._settle(texts)
        return self.end

    def _agree(self) -> None:
        """Waits for a request, answers, and learns the end."""
        try:
            request = self._await_key("request")
            point = None if request is None else self._answer(self, request)
            if point is None:
                return
            self.answer(point)
            texts = [self._await_key(str(process)) for process in range(self._num_processes)]
            if None not in texts and _LEFT not in texts:
                self._settle([str(text) for text in texts])
        except jax.errors.JaxRuntimeError as error:
            # The service has gone, and the job with it.
            logger.debug("Nobody can ask for %s: %s", self._what, error)

    def _await_key(self, name: str) -> str | None:
        return await_key(f"{self._folder}/{name}", is_over=self.stopped.is_set)

    def _settle(self, texts: list[str]) -> None:
        self.answers = [int(text) for text in texts]
        self.end = max(self.answers)
