"""Ends a loop of steps after the same step on all processes, though one alone may ask for it.

A step completes only if every process starts it, so a process that stopped alone would leave the
others waiting. The process that asks therefore goes on until all have answered:

1. It posts the number k of its last program, and starts no other one.
2. A thread of each process waits for such a post. Once its process has ended program k, it answers
   whether that process asks for the end, too; if not, it has first set the end to k + `ahead`.
3. Who asks reads all answers. If all ask after program k, that is the end. Otherwise it goes on,
   and all end after program k + `ahead`.

Nobody can be further than that when the end is set: program k + 1 needs a process that waits for
the answers, and a process is at most `ahead` - 1 programs ahead of the last complete one. A step
costs a comparison of numbers; nothing is sent unless a process asks.
"""

import contextlib
import threading
from collections.abc import Iterator
from itertools import count

import jax

from tnt_jax import _jax
from tnt_jax.distributed.host.comparison import name_processes
from tnt_jax.distributed.liveness.rendezvous import await_key, read_key
from tnt_jax.distributed.liveness.threads import start_thread
from tnt_jax.job import Slot
from tnt_jax.log import logger

_KEY = "tnt_jax/stop"
_numbers = Slot(count)
_NO_ANSWER = "This process does not answer one that asks for the end of training:"


@contextlib.contextmanager
def shared_stop(*, ahead: int, is_watched: bool) -> Iterator["SharedStop"]:
    """Surrounds a loop of steps; see `SharedStop`.

    If the loop ends without an error, all processes have met since its last step.
    """
    stop = SharedStop(ahead=ahead, is_watched=is_watched)
    try:
        yield stop
    except BaseException:
        # The error of the loop says more than that the service has gone, too.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            stop.close(failed=True)
        raise
    stop.close(failed=False)


class SharedStop:
    """The decision of all processes to end one loop of steps.

    All processes make these objects in the same order, and `close` them.

    Args:
        ahead: Programs after which every process has seen the post of one that has stopped.
        is_watched: Whether a process may ask for the end between the steps; the same on all.

    Attributes:
        is_asked: Whether this process has asked for the end.
        is_over: Whether the loop has ended.
    """

    def __init__(self, *, ahead: int, is_watched: bool) -> None:
        self.is_asked = self.is_over = False
        self._ahead = ahead
        self._is_alone = jax.process_count() == 1
        self._is_watched = is_watched and not self._is_alone
        self._folder = f"{_KEY}/{next(_numbers.get())}"
        self._changed = threading.Condition()
        # Programs so far; the program that was posted, the first after which this process asked,
        # and the last one.
        self._num_done = 0
        self._posted: int | None = None
        self._asked_at: int | None = None
        self._end: int | None = None
        self._has_answered = self._is_closed = self._has_posted = False
        if self._is_watched:
            start_thread(self._watch, name="stop", lost=_NO_ANSWER)

    def after_program(self, asks: bool) -> bool:
        """Returns whether the loop ends after the program that was just started.

        Args:
            asks: Whether this process asks for the end.
        """
        if not self._is_watched:
            self.is_over = asks and self._is_alone
            return self.is_over
        with self._changed:
            self._num_done += 1
            number = self._num_done
            is_first = asks and self._asked_at is None
            if is_first:
                self._asked_at, self.is_asked = number, True
            if self._posted is not None:
                self._changed.notify()
        if is_first:
            self._post(number)
        if self._asks_after(self._posted) and number == self._posted:
            self._settle(number)
        self.is_over = self._end is not None and number >= self._end
        return self.is_over

    def close(self, *, failed: bool) -> None:
        """Ends the thread and takes the messages of this process away.

        Args:
            failed: Whether the loop ended by an error, of which others may not know. If not, all
                processes have met since the last step.
        """
        if not self._is_watched:
            return
        with self._changed:
            self._is_closed = True
            leaves = failed and not self._has_answered
            self._changed.notify()
        client, process = _jax.coordination_client(), jax.process_index()
        if leaves:
            client.key_value_set(f"{self._folder}/{process}", "left", allow_overwrite=True)
        elif not failed and self._has_answered:
            client.key_value_delete(f"{self._folder}/{process}")
            if self._has_posted:
                client.key_value_delete(f"{self._folder}/post")

    def _post(self, number: int) -> None:
        """Asks all processes, unless another one has done so already."""
        client = _jax.coordination_client()
        try:
            client.key_value_set(f"{self._folder}/post", str(number))
            self._has_posted = True
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
        posted = read_key(f"{self._folder}/post", "end of training")
        with self._changed:
            self._posted = int(posted or number)

    def _settle(self, number: int) -> None:
        """Decides on the end with all processes, after the program that was posted."""
        self._answer("asks")
        answers = []
        for process in range(jax.process_count()):
            answer = read_key(f"{self._folder}/{process}", "end of training")
            if answer == "left":
                raise RuntimeError(
                    f"Process {process} has left the training loop by an error, while this one "
                    "was asked to end it."
                )
            answers.append(answer == "asks")
        with self._changed:
            self._end = number if all(answers) else number + self._ahead
        if self._has_posted and not all(answers):
            asking = name_processes([one for one, asks in enumerate(answers) if asks])
            logger.warning(
                "stop_training was set on %s alone. All processes end training together, %d "
                "program(s) later or with the epoch. A callback should decide alike on every "
                "process.",
                asking,
                self._ahead,
                extra={"on_every_process": True},
            )

    def _watch(self) -> None:
        """Answers the process that asks, if this one does not."""
        posted = await_key(f"{self._folder}/post", is_over=lambda: self._is_closed)
        if posted is None:
            return
        with self._changed:
            self._posted = int(posted)
            self._changed.wait_for(lambda: self._is_closed or self._num_done >= int(posted))
            if self._is_closed or self._asks_after(self._posted):
                return
            self._end = self._posted + self._ahead
        try:
            self._answer("goes on")
        except jax.errors.JaxRuntimeError as error:
            # The service has gone, and the job with it.
            logger.debug("Nobody can ask for the end of training: %s", error)

    def _asks_after(self, number: int | None) -> bool:
        """Returns whether this process asks for the end after a program, or did so before."""
        return number is not None and self._asked_at is not None and self._asked_at <= number

    def _answer(self, text: str) -> None:
        with self._changed:
            self._has_answered = True
        _jax.coordination_client().key_value_set(f"{self._folder}/{jax.process_index()}", text)
