"""Makes fresh variables in a thread of process 0, while the host does what else a first step needs.

    coming = coming_state(adapter, inputs, seed=seed)
    ...  # The model is traced, and its step is lowered, with descriptions of the state.
    variables = coming.variables()

Without kept programs, the compiler may take longer for the random numbers of a deep network than
the host takes to trace and lower its step.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from tnt_jax import _jax
from tnt_jax.adapters.base import Adapter, FreshVariables, Variables
from tnt_jax.distributed import timeline
from tnt_jax.distributed.host import collectives
from tnt_jax.distributed.liveness import phases
from tnt_jax.job import Slot
from tnt_jax.log import logger
from tnt_jax.train.state import TrainState

# Not the thread of `compiled_steps`: it may compile the step at the same time.
_first_reader = Slot(
    lambda: ThreadPoolExecutor(1, thread_name_prefix="tnt_jax-variables"),
    close=ThreadPoolExecutor.shutdown,
)


def coming_state(adapter: Adapter, inputs: Any, *, seed: int) -> "ComingState | None":
    """Returns the state of a model whose fresh variables a thread makes; None if none can."""
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    fresh = adapter.fresh_variables(inputs, seed=seed)
    return None if fresh is None else ComingState(fresh)


class ComingState:
    """The state of a model whose variables are being computed, by process 0 for all."""

    def __init__(self, fresh: FreshVariables) -> None:
        # Descriptions of its arrays, once `describe` was called; None if not known.
        self.described: TrainState | None = None
        self._finish = fresh.finish
        self._shapes: Variables = jax.eval_shape(fresh.finish, fresh.traced.out_info)
        self._running = (
            _first_reader.get().submit(_run, fresh.traced.lower(), fresh.arguments)
            if jax.process_index() == 0
            else None
        )

    def describe(self, describe: Callable[[Variables], TrainState | None]) -> None:
        """Sets `described` to the result of a function of descriptions of the variables, or None.

        Only real arrays will do for the `init` of some optimizers.
        """
        try:
            self.described = describe(self._shapes)
        except Exception as error:  # One of another cause is raised again with the real arrays.
            logger.debug("The state is not known before its variables: %s", error)
            self.described = None

    def variables(self) -> Variables:
        """Returns the variables, once they are computed; all processes must ask.

        It raises what the compiler or the program raised on process 0; the other processes raise a
        RuntimeError that quotes it.
        """
        with phases.in_phase("compile", spent="compiling"):
            held = collectives.call_on_all_processes(self._held)
            if jax.process_count() == 1:
                return held
            return Variables(*collectives.broadcast(tuple(held)))

    def _held(self) -> Variables:
        """Returns the variables; on processes that did not make them zeros in their place."""
        if self._running is not None:
            return self._finish(self._running.result())
        # Without memory of their own: process 0 may find none for its variables.
        return jax.tree.map(lambda x: np.broadcast_to(np.zeros((), x.dtype), x.shape), self._shapes)


def _run(lowered: jax.stages.Lowered, arguments: Callable[[], tuple[Any, ...]]) -> Any:
    with timeline.span("make the variables", "compile"):
        return _jax.finished(lowered.compile()(*arguments()))
