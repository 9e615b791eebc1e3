"""Steps of one's own on the workers: schedule, join and fetch.

They are called as in `tf.distribute.coordinator.ClusterCoordinator`.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

from tnt_jax.parameter_server.asynchronous import Asynchronous
from tnt_jax.parameter_server.coordinator import Work


class RemoteValue:
    """The value of a scheduled step, which may still run.

    Args:
        scheduler: What runs it.
    """

    def __init__(self, scheduler: "Scheduler") -> None:
        self._scheduler = scheduler
        self._value: Any = None
        self._is_known = False
        self._error: BaseException | None = None

    def fetch(self) -> Any:
        """Waits for the step and returns its value, as NumPy arrays.

        Raises:
            RuntimeError: If this step, or another one before it was done, failed.
        """
        while not self._is_known and self._error is None:
            self._scheduler.advance()
        if self._error is not None:
            raise RuntimeError("A scheduled step failed, so this one was ended.") from self._error
        return self._value

    def fail(self, error: BaseException) -> None:
        """Notes that the step was ended."""
        self._error = error

    def set(self, value: Any) -> None:
        """Notes the value."""
        self._value, self._is_known = value, True


class Scheduler:
    """Gives steps of the user's to workers, in order, each to the next that is free.

    Args:
        asynchronous: Applies their gradients.
        put: Puts a function where workers can read it.
        note_update: Called after updates were ordered.
    """

    def __init__(
        self,
        asynchronous: Asynchronous,
        put: Callable[[Any], Any],
        note_update: Callable[[], None],
    ) -> None:
        self._asynchronous = asynchronous
        self._put = put
        self._note_update = note_update
        self._steps: dict[Callable, tuple[int, Any]] = {}
        self._queue: deque[Work] = deque()
        self._values: dict[Work, RemoteValue] = {}

    @property
    def is_busy(self) -> bool:
        """Whether steps were scheduled that have not ended."""
        return bool(self._values)

    def schedule(self, step: Callable, arguments: tuple[Any, ...]) -> RemoteValue:
        """Schedules a step; it starts when a worker is free and something is scheduled or fetched.

        Args:
            step: The function `(params, *arguments) -> (grads, value)`.
            arguments: Its other arguments.
        """
        if step not in self._steps:
            self._steps[step] = (len(self._steps), self._put(step))
        name = getattr(step, "__name__", "step")
        work = Work("run", (*self._steps[step], arguments), f"the scheduled {name}")
        value = self._values[work] = RemoteValue(self)
        self._queue.append(work)
        self._start()
        return value

    def join(self) -> None:
        """Waits for all scheduled steps, and for the updates that they make."""
        while self._values:
            self.advance()
        self._asynchronous.settle()

    def advance(self) -> None:
        """Starts what can be started, and waits until something happens.

        An error of one step ends all that were scheduled.
        """
        self._start()
        try:
            ended = self._asynchronous.advance()
        except BaseException as error:
            for value in self._values.values():
                value.fail(error)
            self._values.clear()
            self._queue.clear()
            self._asynchronous.forget()
            raise
        for work, value in ended:
            self._values.pop(work).set(value)
            self._note_update()
        self._start()

    def _start(self) -> None:
        while self._queue and self._asynchronous.may_start():
            self._asynchronous.start(self._queue.popleft())
