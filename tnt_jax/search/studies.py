"""The loop over the trials of an Optuna study, with each trial trained by all processes."""

import contextlib
import gc
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from tnt_jax.distributed.host.objects import broadcast_object
from tnt_jax.distributed.joining.runtime import get_process_count, is_master_rank
from tnt_jax.distributed.liveness import phases
from tnt_jax.distributed.liveness.rendezvous import meet
from tnt_jax.search.require import import_optuna
from tnt_jax.search.shared_trial import SharedTrial

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
            Of other processes it is not looked at, and may be None.
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
        RuntimeError: On every process, if the objective returned on some processes and was pruned
            on others; on processes other than the master, if the study failed.
        Exception: What the objective raised.
    """
    optuna = import_optuna("tnt_jax.search.optimize")
    errors = tuple(catch) if isinstance(catch, Iterable) else (catch,)
    errors = (optuna.TrialPruned, *errors)
    if not is_master_rank():
        return _follow(objective, errors, gc_after_trial)
    lead = _Lead(objective, errors)
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
        best = _best_trials(optuna, study)
    except BaseException as error:
        if not lead.has_failed:
            _announce(_Next(error=f"{type(error).__name__}: {error}"))
        raise
    _announce(_Next(best=best))
    return best


class _Next(NamedTuple):
    """Next event on all processes: a trial, the best ones at the end, or an error."""

    is_trial: bool = False
    best: Sequence[Any] = ()
    error: str = ""


class _Lead:
    """The objective on the master; `has_failed` if the trial ended by an error that ends all."""

    def __init__(self, objective: Objective, errors: Errors) -> None:
        self._objective = objective
        self._errors = errors
        self.has_failed = False

    def __call__(self, trial: Any) -> Any:
        _announce(_Next(is_trial=True))
        self.has_failed = True
        try:
            value = _run_trial(self._objective, trial, self._errors)
        except self._errors:
            self.has_failed = False
            raise
        self.has_failed = False
        return value


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
    """Returns the value of the objective, or raises its error, once all processes have ended it.

    An error that is not one of `errors` is raised at once: as in any script, it ends the process,
    and with it the others.
    """
    value, error = None, None
    try:
        value = objective(SharedTrial(trial))
    except errors as raised:
        error = raised
    if get_process_count() > 1:
        _check_outcome("returned a value" if error is None else f"raised {type(error).__name__}")
    if error is not None:
        raise error
    return value


def _check_outcome(own: str) -> None:
    with phases.calling(_CALL):
        outcomes = meet("end of a trial", own)
    other = next((number for number, text in enumerate(outcomes) if text != outcomes[0]), None)
    if other is not None:
        raise RuntimeError(
            f"The objective {outcomes[0]} on process 0 and {outcomes[other]} on process {other}, "
            "but must end alike on all processes. Decide on pruning by the SharedTrial or "
            "tnt_jax.callbacks.OptunaPruning."
        )


def _best_trials(optuna: Any, study: Any) -> list[Any]:
    complete = study.get_trials(deepcopy=False, states=(optuna.trial.TrialState.COMPLETE,))
    return study.best_trials if complete else []
