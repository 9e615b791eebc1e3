"""A training state whose fresh variables a thread still computes.

    coming = ComingState(adapter.fresh_variables(inputs, seed=seed))
    ...  # The model is traced, and its step is lowered, with descriptions of the state.
    variables = coming.variables()

Without kept programs, the compiler may take longer for the random numbers of a deep network than
the host takes to trace and lower its step.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from tnt_jax import _jax
from tnt_jax.adapters.base import FreshVariables, Variables
from tnt_jax.distributed import stall, timeline
from tnt_jax.job import Slot
from tnt_jax.log import logger
from tnt_jax.train.state import TrainState

# Not the thread of `ahead`: it may compile the step at the same time.
_thread = Slot(
    lambda: ThreadPoolExecutor(1, thread_name_prefix="tnt_jax-variables"),
    close=ThreadPoolExecutor.shutdown,
)


class ComingState:
    """The state of a model whose variables are being computed.

    Args:
        fresh: The program that makes them.

    Attributes:
        described: Descriptions of the arrays of the state, once `describe` was called; None if they
            are not known.
    """

    def __init__(self, fresh: FreshVariables) -> None:
        self.described: TrainState | None = None
        self._finish = fresh.finish
        self._shapes: Variables = jax.eval_shape(fresh.finish, fresh.traced.out_info)
        self._running = _thread.get().submit(_run, fresh.traced.lower(), fresh.arguments)

    def describe(self, describe: Callable[[Variables], TrainState | None]) -> None:
        """Sets `described` to the result of a function of descriptions of the variables.

        It may fail where only real arrays will do, as in the `init` of some optimizers. An error of
        another cause is raised again with the real arrays.
        """
        try:
            self.described = describe(self._shapes)
        except Exception as error:
            logger.debug("The state is not known before its variables: %s", error)
            self.described = None

    def variables(self) -> Variables:
        """Returns the variables, once they are computed.

        Raises:
            Exception: What the compiler or the program raised.
        """
        with stall.in_phase("compile", spent="compiling"):
            return self._finish(self._running.result())


def _run(lowered: jax.stages.Lowered, arguments: tuple[Any, ...]) -> Any:
    with timeline.span("make the variables", "compile"):
        return _jax.finished(lowered.compile()(*arguments))
