"""Evaluation beside training, by a process of its own that training does not wait for."""

from collections.abc import Sequence
from typing import Any

from tnt_jax.keras_compat.callbacks import Callback
from tnt_jax.keras_compat.core import Core
from tnt_jax.log import logger
from tnt_jax.parameter_server.coordinator import Coordinator
from tnt_jax.train.contracts import Batch


class SidecarEvaluation(Callback):
    """Evaluates the variables of the servers while they are trained.

    `ParameterServer.sidecar` makes it; pass it to `fit` among the callbacks. It begins an
    evaluation after every so many updates, once the one before has ended, and one at the end.

    Args:
        core: What the parts of the model share.
        coordinator: What knows the variables.
        batches: Data to evaluate.
        every: Updates between two evaluations, at least 1.

    Attributes:
        results: For each evaluation the `version` of the variables, `loss` and metrics.
    """

    def __init__(
        self, core: Core, coordinator: Coordinator, batches: Sequence[Batch], *, every: int
    ) -> None:
        super().__init__()
        self.results: list[dict[str, float]] = []
        self._core = core
        self._coordinator = coordinator
        self._batches = list(batches)
        self._every = every
        self._actor: Any = None
        self._asked: tuple[int, Any] | None = None
        self._last = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Forgets the results of earlier training."""
        self.results = []
        self._last = self._coordinator.servers.version

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Begins an evaluation if it is time, and none runs."""
        self._collect(waits=False)
        if self._asked is None and self._coordinator.servers.version - self._last >= self._every:
            self._begin()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Evaluates the last variables, and ends the process."""
        self._collect(waits=True)
        if not self.results or self.results[-1]["version"] != self._coordinator.servers.version:
            self._begin()
            self._collect(waits=True)
        if self._actor is not None:
            self._coordinator.crew.kill(self._actor)
            self._actor = None

    def _begin(self) -> None:
        crew = self._coordinator.crew
        if self._actor is None:
            self._actor = crew.start_beside()
            self._actor.load.remote(self._coordinator.model)
        version = self._coordinator.servers.version
        self._last = version
        arguments = (crew.ray.put(self._batches), *self._coordinator.servers.pull())
        self._asked = (version, self._actor.evaluate_all.remote(*arguments))

    def _collect(self, *, waits: bool) -> None:
        """Takes the result of the evaluation that runs, if it has ended or `waits` is True."""
        if self._asked is None:
            return
        ray = self._coordinator.crew.ray
        version, ref = self._asked
        if not waits and not ray.wait([ref], timeout=0)[0]:
            return
        self._asked = None
        try:
            sums = ray.get(ref)
        except ray.exceptions.RayActorError as error:
            logger.warning("The evaluation of version %d was lost: %s", version, error)
            self._actor = None
            return
        found = {"version": version, **self._core.logs(sums)}
        self.results.append(found)
        logger.info("Evaluated beside training: %s.", found)
