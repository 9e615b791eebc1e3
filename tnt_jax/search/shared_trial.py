"""A trial of Optuna that all processes share: the master asks, and all get the same answer."""

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any, TypeVar

from tnt_jax.distributed.host.collectives import call_on_all_processes
from tnt_jax.distributed.host.objects import broadcast_object
from tnt_jax.distributed.joining.runtime import is_master_rank
from tnt_jax.distributed.liveness import phases

_T = TypeVar("_T")


class SharedTrial:
    """An Optuna trial in a job of several processes.

    The master alone talks to Optuna. Each method and property is that of `optuna.trial.Trial`; all
    processes must use it, in the same order, and get what Optuna has told the master. An error of
    Optuna is raised on all of them.

    Args:
        trial: The `optuna.trial.Trial` of the master; of other processes it is not looked at, and
            may be None.

    Raises:
        TypeError: On every process, if the master has none.
    """

    def __init__(self, trial: Any = None) -> None:
        if isinstance(trial, SharedTrial):
            trial = trial._trial
        self._trial = trial if is_master_rank() else None
        with phases.calling("SharedTrial"):
            call_on_all_processes(self._check)

    def _check(self) -> None:
        if is_master_rank() and not hasattr(self._trial, "suggest_float"):
            raise TypeError(
                "The master, process 0, needs the trial that Optuna gave it, but has "
                f"{type(self._trial).__name__}. Call the objective by tnt_jax.search.optimize, or "
                "pass the result of study.ask()."
            )

    def suggest_float(
        self,
        name: str,
        low: float,
        high: float,
        *,
        step: float | None = None,
        log: bool = False,
    ) -> float:
        """Returns a value from `low` to `high`, both included."""
        return self._ask(
            f"suggest_float({name!r})",
            lambda trial: trial.suggest_float(name, low, high, step=step, log=log),
        )

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        """Returns an integer from `low` to `high`, both included."""
        return self._ask(
            f"suggest_int({name!r})",
            lambda trial: trial.suggest_int(name, low, high, step=step, log=log),
        )

    def suggest_categorical(self, name: str, choices: Sequence[_T]) -> _T:
        """Returns one of `choices`."""
        return self._ask(
            f"suggest_categorical({name!r})", lambda trial: trial.suggest_categorical(name, choices)
        )

    def report(self, value: float, step: int) -> None:
        """Tells Optuna an intermediate value, by which it decides on pruning."""
        self._ask(f"report(step={step})", lambda trial: trial.report(value, step))

    def should_prune(self) -> bool:
        """Returns whether Optuna ends this trial early."""
        return self._ask("should_prune()", lambda trial: bool(trial.should_prune()))

    def set_user_attr(self, key: str, value: Any) -> None:
        """Notes a value, one that JSON can hold, beside the trial."""
        self._ask(f"set_user_attr({key!r})", lambda trial: trial.set_user_attr(key, value))

    @property
    def number(self) -> int:
        """Number of the trial in its study, from 0 on."""
        return self._ask("number", lambda trial: trial.number)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters that were suggested so far."""
        return self._ask("params", lambda trial: dict(trial.params))

    @property
    def distributions(self) -> dict[str, Any]:
        """The distributions of the parameters that were suggested so far."""
        return self._ask("distributions", lambda trial: dict(trial.distributions))

    @property
    def user_attrs(self) -> dict[str, Any]:
        """Attributes that `set_user_attr` has set."""
        return self._ask("user_attrs", lambda trial: dict(trial.user_attrs))

    @property
    def datetime_start(self) -> datetime | None:
        """When the trial began."""
        return self._ask("datetime_start", lambda trial: trial.datetime_start)

    def _ask(self, what: str, function: Callable[[Any], Any]) -> Any:
        """Returns what a function of the master's trial returns, on every process."""
        # The name of the call is compared, too: processes that ask for different parameters would
        # train different models.
        with phases.calling(f"SharedTrial.{what}"):
            answer = call_on_all_processes(
                lambda: None if self._trial is None else function(self._trial)
            )
            return broadcast_object(answer)
