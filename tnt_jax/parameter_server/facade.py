"""`ParameterServer`: training on Ray with variables on servers and gradients of workers."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import jax

from tnt_jax import _jax
from tnt_jax.data.layout import RankSlice
from tnt_jax.distributed.joining import runtime
from tnt_jax.distributed.sums.reduction import choose_reduction
from tnt_jax.keras_compat.callbacks import History
from tnt_jax.keras_compat.compiling.compiled import Compilation
from tnt_jax.keras_compat.facade.model import Model
from tnt_jax.keras_compat.fit.data_intake import DataArguments, to_batch
from tnt_jax.keras_compat.optimizers import LossScaleOptimizer
from tnt_jax.keras_compat.state.core import Core
from tnt_jax.keras_compat.state.options import ModelOptions
from tnt_jax.log import logger
from tnt_jax.parameter_server.applying import Asynchronous, RemoteValue, Scheduler, Synchronous
from tnt_jax.parameter_server.coordinator import Coordinator, SidecarEvaluation
from tnt_jax.parameter_server.partition import Partitioner, check_at_least
from tnt_jax.parameter_server.server_group import Actors, ServerGroup, StalenessBound, Statistics
from tnt_jax.parameter_server.trainer import ServedTrainer
from tnt_jax.train.steps.data_parallel import StepsOfSlice


def check_workers(num_workers: int, max_staleness: int | None, backup_workers: int) -> None:
    """Raises a ValueError if so many workers cannot train in this way."""
    check_at_least(1, num_workers=num_workers)
    check_at_least(0, backup_workers=backup_workers)
    check_at_least(0, max_staleness=0 if max_staleness is None else max_staleness)
    if backup_workers and max_staleness != 0:
        raise ValueError(
            "backup_workers are for synchronous training: pass max_staleness=0. Asynchronous "
            "training waits for no slow worker."
        )
    if backup_workers >= num_workers:
        raise ValueError(
            f"backup_workers ({backup_workers}) must be fewer than num_workers ({num_workers}): "
            "the others share each global batch."
        )


def check_options(options: ModelOptions) -> None:
    """Raises a ValueError if the model has an option for sums over ranks."""
    for name, instead in (
        ("gradient_compression", "Pass compression='bfloat16' to ParameterServer instead."),
        ("shard_optimizer_state", "Servers divide the optimizer's state themselves."),
        ("mesh", "Servers divide the variables themselves."),
        ("reproducible", "Synchronous training adds the shares of a batch in a fixed order."),
    ):
        if getattr(options, name):
            raise ValueError(
                f"A model with {name} sums gradients over ranks, which a parameter server does not "
                f"do. {instead} Make the model without {name}."
            )


def check_compilation(compilation: Compilation) -> None:
    """Raises a ValueError if `compile` chose what servers and workers cannot do."""
    if compilation.accumulation_steps > 1:
        raise ValueError(
            f"gradient_accumulation_steps={compilation.accumulation_steps} is not possible with a "
            "parameter server: use a larger batch, or synchronous training with more workers."
        )
    if compilation.on_nan is not None:
        raise ValueError(
            f"on_nan={compilation.on_nan!r} is not possible with a parameter server: other "
            "gradients are under way when a step is found not to be finite. Leave it out."
        )
    if isinstance(compilation.optimizer, LossScaleOptimizer):
        raise ValueError(
            "A LossScaleOptimizer is not possible with a parameter server: workers do not know the "
            "optimizer's state. Use bfloat16, which needs no scaling, instead of float16."
        )


_ONE_CPU = {"CPU": 1.0}


class ParameterServer:
    """Trains a model on Ray: servers hold its variables, and workers compute gradients.

    ```python
    model = tnt.Model(module)
    model.compile("adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    with tnt.ParameterServer(model, num_servers=2, num_workers=4) as server:
        server.fit(x, y, batch_size=64, epochs=3)
    model.evaluate(x_test, y_test)
    ```

    Asynchronous training (the default) makes one update for each batch of each worker: the batch
    size is that of one worker, and gradients may be stale. With `max_staleness=0` training is
    synchronous: workers share each global batch, and the results are those of `Model.fit` with as
    many ranks. See docs/parameter_server.md.

    Args:
        model: The compiled model. Its variables are the servers' while a method runs, and hold the
            results afterwards.
        num_servers: Servers that hold the variables.
        num_workers: Workers that compute gradients.
        max_staleness: Updates that may lie between the variables of a gradient and those that it
            changes: None for any number, 0 for synchronous training.
        backup_workers: With `max_staleness=0`, workers more than there are shares of a global
            batch: nobody waits for as many slow ones. Every row still counts once.
        partitioner: Into how many parts an array is divided over servers, such as
            `tnt_jax.parameter_server.MinSizePartitioner()`; by default arrays stay whole.
        compression: `"bfloat16"` sends 16 bits for each 32-bit gradient; what rounding leaves out
            is sent later.
        checkpoint_every: Updates between two snapshots of the servers: the most that can be lost
            with a server. The coordinator waits for each snapshot and holds the last one.
        worker_timeout_s: Seconds after which a worker that does not answer is replaced; None for
            never. The first batch includes compilation.
        resources_per_worker: Ray's resources of a worker, such as `{"CPU": 4, "GPU": 1}`.
        resources_per_server: Ray's resources of a server.
        worker_env: Environment variables of workers.
        start_timeout_s: Seconds in which all processes must have started.

    Attributes:
        model: The model.
        statistics: What happened so far: versions, staleness of gradients, rates, losses.

    Raises:
        ModuleNotFoundError: If Ray is not installed.
        ValueError: If an argument is invalid, or an option of the model is not possible here.
        RuntimeError: If the cluster has no place, or this is a job of several processes.
    """

    def __init__(
        self,
        model: Model,
        *,
        num_servers: int = 2,
        num_workers: int = 4,
        max_staleness: int | None = None,
        backup_workers: int = 0,
        partitioner: Partitioner | None = None,
        compression: Literal["bfloat16"] | None = None,
        checkpoint_every: int = 100,
        worker_timeout_s: float | None = None,
        resources_per_worker: Mapping[str, float] = _ONE_CPU,
        resources_per_server: Mapping[str, float] = _ONE_CPU,
        worker_env: Mapping[str, str] | None = None,
        start_timeout_s: float = 120.0,
    ) -> None:
        check_at_least(1, num_servers=num_servers, checkpoint_every=checkpoint_every)
        check_workers(num_workers, max_staleness, backup_workers)
        if compression not in (None, "bfloat16"):
            raise ValueError(f"compression must be None or 'bfloat16', but is {compression!r}.")
        self._core: Core = model._core
        check_options(self._core.options)
        job = runtime.init()
        if runtime.get_process_count() > 1:
            raise RuntimeError(
                "A parameter server is used by one process, which starts its workers through Ray, "
                f"but this is one of {runtime.get_process_count()} processes of a job. Start the "
                "script once, without -n."
            )
        self.model = model
        self.statistics = Statistics()
        self._actors = Actors(
            num_servers=num_servers,
            num_workers=num_workers,
            resources_per_server=resources_per_server,
            resources_per_worker=resources_per_worker,
            worker_env=worker_env or {},
            start_timeout_s=start_timeout_s,
        )
        servers = ServerGroup(self._actors, self.statistics, checkpoint_every=checkpoint_every)
        self._coordinator = Coordinator(self._actors, servers, self.statistics, worker_timeout_s)
        is_synchronous = max_staleness == 0
        self._num_shares = num_workers - backup_workers if is_synchronous else 1
        self._trainer = self._make_trainer(job, partitioner, compression == "bfloat16")
        asynchronous = Asynchronous(self._coordinator, StalenessBound(max_staleness))
        self._trainer.training = asynchronous
        if is_synchronous:
            self._trainer.training = Synchronous(
                self._coordinator, self._num_shares, self._trainer.counts
            )
        self._scheduler = Scheduler(asynchronous, self._trainer.note_update, self._give_back)
        # The functions that the trainer was compiled for.
        self._functions: Any = None

    def __enter__(self) -> "ParameterServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def fit(self, *args: Any, **kwargs: Any) -> History:
        """Trains as `Model.fit`, with its arguments, on the workers; returns the history.

        Logs are sums over the gradients in the order in which they were applied. At the end of an
        epoch all workers have ended.

        Raises:
            RuntimeError: If the model was not compiled, or work cannot be done.
            ValueError: If data and arguments contradict one another, or the optimizer cannot run on
                several servers.
        """
        with self._serving(trains=True):
            return self.model.fit(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> float | list[float] | dict[str, float]:
        """Returns loss and metrics as `Model.evaluate`, computed by the workers."""
        with self._serving():
            return self.model.evaluate(*args, **kwargs)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the model's outputs as `Model.predict`, computed by the workers."""
        with self._serving():
            return self.model.predict(*args, **kwargs)

    def schedule(self, step: Callable, *arguments: Any) -> RemoteValue:
        """Has a worker run a step of your own, when one is free.

        ```python
        def step(params, x, y):
            loss, grads = jax.value_and_grad(loss_of)(params, x, y)
            return grads, loss

        values = [server.schedule(step, x, y) for x, y in batches]
        server.join()
        losses = server.fetch(values)
        ```

        Args:
            step: Function of the parameters and the arguments, which is compiled. It returns
                `(grads, value)`: gradients are applied by the servers, with the staleness that the
                server allows; None changes nothing.
            *arguments: Pytrees of arrays.

        Raises:
            RuntimeError: If the model has no variables yet, or was not compiled.
        """
        if not self._scheduler.is_busy:
            with self._serving(trains=True):
                self._trainer.require_state()
                self._trainer.load()
        return self._scheduler.schedule(step, arguments)

    def join(self) -> None:
        """Waits for all scheduled steps; the model holds their results afterwards."""
        self._scheduler.join()

    def _give_back(self) -> None:
        self._trainer.give_back()
        self._core.write_back()

    def fetch(self, values: Any) -> Any:
        """Waits for the values of scheduled steps, in any pytree, and returns them."""
        return jax.tree.map(lambda x: x.fetch() if isinstance(x, RemoteValue) else x, values)

    def sidecar(
        self,
        x: Any,
        y: Any = None,
        batch_size: int | None = None,
        *,
        sample_weight: Any = None,
        every: int = 100,
    ) -> SidecarEvaluation:
        """Returns a callback that evaluates data beside training, in a process of its own.

        The process needs the resources of one worker more.

        Args:
            x: Data, as in `Model.evaluate`.
            y: As there.
            batch_size: As there.
            sample_weight: As there.
            every: Updates between two evaluations.
        """
        check_at_least(1, every=every)
        data = DataArguments(x, y, sample_weight, batch_size)
        with self._serving():
            source = self.model._shared.source(data)
            batches = [to_batch(item) for item in source.batches(0)]
        return SidecarEvaluation(self._core, self._coordinator, batches, every=every)

    def shutdown(self) -> None:
        """Ends all servers and workers; the model keeps its variables."""
        self._actors.close()

    @contextmanager
    def _serving(self, *, trains: bool = False) -> Iterator[None]:
        """Lets the servers' trainer take the place of the model's own, and gives the state back."""
        if not self._actors.servers:
            raise RuntimeError("The parameter server was shut down. Make a new one.")
        self._scheduler.join()
        core, trainer = self._core, self._trainer
        if trains:
            core.require_trainable()
        if core.compilation is not None:
            core.use_optimizer()
            compilation = core.compilation
            assert compilation.transformation is not None
            check_compilation(compilation)
            if core.functions is not None and core.functions is not self._functions:
                trainer.compile(core.step_parts(), compilation.transformation)
            trainer.use_optimizer(compilation.transformation)
        trainer.adopt()
        try:
            with core.trained_by(trainer):
                yield
        except BaseException:
            try:
                trainer.give_back()
            except RuntimeError as error:
                logger.warning(
                    "The variables of the servers cannot be read (%s). The model keeps those that "
                    "it had before.",
                    error,
                )
            raise
        finally:
            self._functions = core.functions
        trainer.give_back()

    def _make_trainer(
        self, job: runtime.Runtime, partitioner: Partitioner | None, compresses: bool
    ) -> ServedTrainer:
        # The coordinator computes next to nothing, on one device.
        alone = replace(job, mesh=_jax.make_data_mesh(list(job.mesh.devices.flat[:1])))
        num_ranks = self._num_shares * self._actors.devices_per_worker
        reduction = choose_reduction(alone.platform, 1, settings=job.settings)
        # Workers get the batches of all ranks one by one.
        steps = StepsOfSlice(alone, reduction, RankSlice(num_ranks, 0, num_ranks))
        return ServedTrainer(
            self._core,
            alone,
            steps,
            coordinator=self._coordinator,
            partitioner=partitioner,
            compresses=compresses,
        )
