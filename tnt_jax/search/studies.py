"""Optuna's trials, trained by all processes together: the master asks, all get the same answer."""

import contextlib
import gc
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple, TypeVar

from tnt_jax.distributed.host.collectives import call_on_all_processes
from tnt_jax.distributed.host.objects import broadcast_object, check_secret
from tnt_jax.distributed.joining.runtime import get_process_count, is_master_rank
from tnt_jax.distributed.liveness import phases
from tnt_jax.distributed.liveness.rendezvous import meet


def import_optuna(needed_by: str) -> Any:
    """Returns the module `optuna`; a ModuleNotFoundError says what to install for a caller."""
    try:
        import optuna
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{needed_by} needs Optuna, but {error.name} is not installed here. Install it with: "
            'pip install "tnt-jax[optuna]"',
            name=error.name,
        ) from error
    return optuna


_T = TypeVar("_T")


class SharedTrial:
    """An Optuna trial in a job of several processes.

    The master alone talks to Optuna. Each method and property is that of `optuna.trial.Trial`; all
    processes must use it, in the same order, and get what Optuna has told the master. An error of
    Optuna is raised on all of them.

    Args:
        trial: The `optuna.trial.Trial` of the master; on other processes it may be None.

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
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        """Returns a value from `low` to `high`, both included."""
        return self._call("suggest_float", name, low, high, step=step, log=log)

    def suggest_int(
        self, name: str, low: int, high: int, *, step: int = 1, log: bool = False
    ) -> int:
        """Returns an integer from `low` to `high`, both included."""
        return self._call("suggest_int", name, low, high, step=step, log=log)

    def suggest_categorical(self, name: str, choices: Sequence[_T]) -> _T:
        """Returns one of `choices`."""
        return self._call("suggest_categorical", name, choices)

    def report(self, value: float, step: int) -> None:
        """Tells Optuna an intermediate value, by which it decides on pruning."""
        self._ask(f"report(step={step})", lambda trial: trial.report(value, step))

    def should_prune(self) -> bool:
        """Returns whether Optuna ends this trial early."""
        return self._ask("should_prune()", lambda trial: bool(trial.should_prune()))

    def set_user_attr(self, key: str, value: Any) -> None:
        """Notes a value, one that JSON can hold, beside the trial."""
        self._call("set_user_attr", key, value)

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

    def _call(self, method: str, name: str, *args: Any, **options: Any) -> Any:
        what = f"{method}({name!r})"
        return self._ask(what, lambda trial: getattr(trial, method)(name, *args, **options))

    def _ask(self, what: str, function: Callable[[Any], Any]) -> Any:
        """Returns what a function of the master's trial returns, on every process."""
        # The name of the call is compared, too: processes that ask for different parameters would
        # train different models.
        with phases.calling(f"SharedTrial.{what}"):
            try:
                answer = None if self._trial is None else function(self._trial)
            except Exception as error:
                broadcast_object((None, error))
                raise
            answer, error = broadcast_object((answer, None))
        if error is not None:
            raise error
        return answer


_CALL = "search.optimize"
Objective = Callable[[SharedTrial], Any]
Errors = tuple[type[Exception], ...]


def optimize(
    study: Any,
    objective: Objective,
    n_trials: int | None = None,
    timeout: float | None = None,
    catch: Iterable[type[Exception]] | type[Exception] = (),
    callbacks: Iterable[Callable[[Any, Any], None]] | None = None,
    gc_after_trial: bool = False,
    show_progress_bar: bool = False,
) -> list[Any]:
    """Runs trials as `study.optimize` does, each of them on all processes together.

    Every process must call it. The master asks the study for each trial, and tells it the result
    that its own call of the objective returned; the objective runs on every process. Arguments but
    the first two are those of `optuna.study.Study.optimize`, and those of the master decide.

    Args:
        study: The `optuna.study.Study`, or a function that makes it, which the master alone calls.
            On other processes it may be None.
        objective: Given a `SharedTrial`, returns the value to optimize, the same on every process,
            or raises `optuna.TrialPruned` on every process.
        n_trials: Trials to run; by default there is no limit.
        timeout: Seconds after which no further trial begins.
        catch: Errors of the objective that end its trial alone, where all processes raise them.
        callbacks: Functions of the study and the trial, called on the master after each trial.
        gc_after_trial: Whether each process collects garbage after each trial.
        show_progress_bar: Whether the master shows a bar.

    Returns:
        The best trials of the study, on every process: those with the best value or, with several
        objectives, those that no other beats in all of them. Empty if no trial has ended.

    Raises:
        ModuleNotFoundError: If Optuna is not installed.
        RuntimeError: On every process, if several have no secret (docs/launching.md), or if the
            objective returned on some processes and was pruned on others; on processes other than
            the master, if the study failed.
        Exception: What the objective raised.
    """
    optuna = import_optuna("tnt_jax.search.optimize")
    errors = tuple(catch) if isinstance(catch, Iterable) else (catch,)
    errors = (optuna.TrialPruned, *errors)
    is_master = is_master_rank()  # It joins the job, whose secret is looked for.
    check_secret("tnt_jax.search.optimize")
    if not is_master:
        return _follow(objective, errors, gc_after_trial)
    has_failed = False

    def lead(trial: Any) -> Any:
        nonlocal has_failed
        _announce(_Next(is_trial=True))
        try:
            return _run_trial(objective, trial, errors)
        except BaseException as error:
            # By what ends all processes, so that none waits to be told.
            has_failed = not isinstance(error, errors)
            raise

    try:
        if callable(study) and not hasattr(study, "optimize"):
            study = study()
        study.optimize(
            lead,
            n_trials=n_trials,
            timeout=timeout,
            catch=errors[1:],
            callbacks=callbacks,
            gc_after_trial=gc_after_trial,
            show_progress_bar=show_progress_bar,
        )
        is_complete = (optuna.trial.TrialState.COMPLETE,)
        best = study.best_trials if study.get_trials(deepcopy=False, states=is_complete) else []
    except BaseException as error:
        if not has_failed:
            _announce(_Next(error=f"{type(error).__name__}: {error}"))
        raise
    _announce(_Next(best=best))
    return best


class _Next(NamedTuple):
    """Next event on all processes: a trial, the best ones at the end, or an error."""

    is_trial: bool = False
    best: Sequence[Any] = ()
    error: str = ""


def _follow(objective: Objective, errors: Errors, gc_after_trial: bool) -> list[Any]:
    """Takes part in the trials that the master begins."""
    while True:
        following = _announce(None)
        if following.error:
            raise RuntimeError(f"The study failed on process 0: {following.error}")
        if not following.is_trial:
            return [*following.best]
        with contextlib.suppress(*errors):
            _run_trial(objective, None, errors)
        if gc_after_trial:
            gc.collect()


def _announce(following: _Next | None) -> _Next:
    """Returns what the master says comes next."""
    with phases.calling(_CALL):
        return broadcast_object(following)


def _run_trial(objective: Objective, trial: Any, errors: Errors) -> Any:
    """Returns the value of the objective, or raises its error, once all processes have ended it."""
    # Any other error is raised at once: as in any script, it ends the process, and all others.
    value, error = None, None
    try:
        value = objective(SharedTrial(trial))
    except errors as raised:
        error = raised
    if get_process_count() > 1:
        own = "returned a value" if error is None else f"raised {type(error).__name__}"
        with phases.calling(_CALL):
            outcomes = meet("end of a trial", own)
        other = next((number for number, text in enumerate(outcomes) if text != outcomes[0]), None)
        if other is not None:
            raise RuntimeError(
                f"The objective {outcomes[0]} on process 0 and {outcomes[other]} on process "
                f"{other}, but must end alike on all processes. Decide on pruning by the "
                "SharedTrial or tnt_jax.callbacks.OptunaPruning."
            )
    if error is not None:
        raise error
    return value
