"""Distributed steps: a function that is written for one device, as one program over all ranks."""

import inspect
import os
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any, Literal, overload

import jax

from tnt_jax.distributed.elastic import link
from tnt_jax.distributed.joining.runtime import init
from tnt_jax.distributed.leaving import flush
from tnt_jax.log import logger
from tnt_jax.train.loops.context import steps_in_use
from tnt_jax.train.loops.dataset import DistributedBatch
from tnt_jax.train.loops.engine import Engine
from tnt_jax.train.loops.explained import ExplainedSteps, explained_if_asked


class DistributedStep:
    """A training step over all ranks; `tnt_jax.distributed_step` makes it."""

    def __init__(
        self, step: Callable, *, rows_at_once: int | Literal["auto"] | None = None
    ) -> None:
        if rows_at_once not in (None, "auto") and not (
            isinstance(rows_at_once, int) and rows_at_once >= 1
        ):
            raise ValueError(
                f"rows_at_once must be a number of rows, 'auto' or None, but is {rows_at_once!r}."
            )
        update_wrapper(self, step)
        self._engine = _EngineOfJob(
            step, takes_key=_takes_key(step), trains=True, rows_at_once=rows_at_once
        )

    def __call__(
        self, state: Any, batch: DistributedBatch, key: jax.Array | None = None
    ) -> tuple[Any, Any]:
        """Makes one step on a global batch.

        Args:
            state: What the step changes: any pytree of arrays. It is given away (donated): go on
                with the one that is returned.
            batch: Batch of a `tnt_jax.distribute` dataset.
            key: Key of the run, `jax.random.key(seed)`, the same in every step: the number of the
                batch is folded in. Needed if the function takes one.

        Returns:
            State and metrics after the step, the same on every rank.

        Raises:
            TypeError: If the batch did not come from a distributed dataset, a result differs
                between ranks, or the state comes back as another.
            ValueError: If the state was given to an earlier step, or differs between processes.
        """
        return self._engine.get().run(state, batch, key, stacked=False)

    def scan(
        self, state: Any, batches: DistributedBatch, key: jax.Array | None = None
    ) -> tuple[Any, Any]:
        """Makes the steps of stacked batches in one program, by `jax.lax.scan`.

        The arguments are as in a call, with batches of `dataset.stacked()`. The metrics are those
        of all steps, with a leading dimension `[steps]`.
        """
        return self._engine.get().run(state, batches, key, stacked=True)


class DistributedEvalStep:
    """An evaluation step over all ranks; `tnt_jax.distributed_eval_step` makes it."""

    def __init__(self, step: Callable) -> None:
        update_wrapper(self, step)
        self._engine = _EngineOfJob(step, takes_key=_takes_key(step), trains=False)

    def __call__(self, state: Any, batch: DistributedBatch, key: jax.Array | None = None) -> Any:
        """Evaluates one global batch; returns what the function does, the same on every rank.

        Args:
            state: What the step reads, any pytree of arrays; it stays the caller's.
            batch: Batch of a `tnt_jax.distribute` dataset.
            key: As for a training step, if the function takes one.

        Raises:
            TypeError: If the batch did not come from a distributed dataset, or a result differs
                between ranks.
        """
        return self._engine.get().run(state, batch, key, stacked=False)[1]

    def scan(self, state: Any, batches: DistributedBatch, key: jax.Array | None = None) -> Any:
        """Evaluates stacked batches of `dataset.stacked()` in one program.

        The results have a leading dimension `[steps]`.
        """
        return self._engine.get().run(state, batches, key, stacked=True)[1]


@overload
def distributed_step(
    step: Callable, *, rows_at_once: int | Literal["auto"] | None = None
) -> DistributedStep: ...


@overload
def distributed_step(
    step: None = None, *, rows_at_once: int | Literal["auto"] | None = None
) -> Callable[[Callable], DistributedStep]: ...


def distributed_step(
    step: Callable | None = None, *, rows_at_once: int | Literal["auto"] | None = None
) -> DistributedStep | Callable[[Callable], DistributedStep]:
    """Turns a training step that is written for one device into one program over all ranks.

    ```python
    @tnt.distributed_step
    def train_step(state, batch, key):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch.inputs, rngs={"dropout": key})
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
            return tnt.compute_average_loss(losses)

        loss, grads = tnt.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}
    ```

    Inside, the state is the same on every rank, and the batch holds this rank's rows. `key` draws
    random numbers by the row of the global batch: the same on one device and on many. What the step
    returns must be the same on every rank: `reduce` makes it so. Metrics of `tnt_jax.metrics` that
    the step updates count the rows of all ranks.

    Args:
        step: The function `step(state, batch, key) -> (state, metrics)`; `key` may be left out.
        rows_at_once: Most rows of a rank whose gradients are computed in one pass, as in
            `@tnt.distributed_step(rows_at_once=64)`; None for all, `"auto"` for as many as fit the
            memory. The result is that of one pass. The loss function takes the batch, or its
            arrays, and the key as arguments: `tnt.value_and_grad(loss_fn)(params, batch, key)`.

    Returns:
        A callable of the same arguments and results, with a method `scan` for stacked batches.
        Without a step, a decorator.

    Raises:
        TypeError: If the function takes other arguments.
        ValueError: If `rows_at_once` is something else.
    """
    if step is None:
        return partial(DistributedStep, rows_at_once=rows_at_once)
    return DistributedStep(step, rows_at_once=rows_at_once)


def distributed_eval_step(step: Callable) -> DistributedEvalStep:
    """Turns an evaluation step that is written for one device into one program over all ranks.

    Args:
        step: The function `step(state, batch) -> metrics`, or `step(state, batch, key)`; see
            `distributed_step`. It returns no state, and none is given away.

    Returns:
        A callable of the same arguments and results, with a method `scan` for stacked batches.

    Raises:
        TypeError: If the function takes other arguments.
    """
    return DistributedEvalStep(step)


class _EngineOfJob:
    """The engine of a step in the job that runs: steps may be defined before it is joined."""

    def __init__(self, step: Callable, **options: Any) -> None:
        self._step = step
        self._options = options
        self._engine: Engine | ExplainedSteps | None = None

    def get(self) -> Engine | ExplainedSteps:
        """Returns the engine, a new one if a job was left for another."""
        runtime = init()
        if self._engine is None or self._engine.runtime is not runtime:
            _note_use(_name(self._step))
            engine = Engine(self._step, _name(self._step), runtime, **self._options)
            self._engine = explained_if_asked(engine)
        return self._engine


def _note_use(name: str) -> None:
    """Says, in an elastic job, that a custom training loop does not go on after a loss."""
    own = link()
    if own is not None and not own.has_joined:
        own.refuse(f"it has not the state of {name}, a step of a custom training loop.")
        flush()
        os._exit(1)
    if own is not None and name not in steps_in_use.get():
        logger.warning(
            "If a process of this elastic job is lost, %s cannot go on in place, because a custom "
            "training loop holds its state itself. The job ends then; --max-restarts starts it "
            "again, and tnt_jax.LoopCheckpoints lets it go on from its last checkpoint.",
            name,
        )
    steps_in_use.get().add(name)


def _name(step: Callable) -> str:
    return getattr(step, "__name__", type(step).__name__)


def _takes_key(step: Callable) -> bool:
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError) as error:
        raise TypeError(f"A step must be a function, but is {step!r}.") from error
    plain = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(plain) not in (2, 3) or len(plain) != len(parameters):
        raise TypeError(
            f"A step takes (state, batch) or (state, batch, key), but {_name(step)} takes "
            f"({', '.join(p.name for p in parameters)}). Put what else it needs into the state, or "
            "into a closure."
        )
    return len(plain) == 3
