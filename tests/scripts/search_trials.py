"""Every process takes part in studies, quiet and hostile; writes what it saw to FOLDER.

tnt-jax -n 2 -- search_trials.py FOLDER NUM_TRIALS
"""

import json
import sys
from pathlib import Path

import optuna
import pytest

import tnt_jax as tnt

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
import search_runs

folder, num_trials = Path(sys.argv[1]), int(sys.argv[2])
process = tnt.get_process_index()
is_master = tnt.is_master_rank()
search_runs.quiet()
seen = []


def objective(trial):
    """Notes what this process sees of the trial, and how it ends."""
    note = {"number": trial.number, "ended": "error"}
    seen.append(note)
    try:
        value = search_runs.shared_objective(trial)
    except optuna.TrialPruned:
        note["ended"] = "pruned"
        raise
    finally:
        note["params"] = trial.params
    note["ended"] = "value"
    return value


# Other processes need no study, and one of theirs is not looked at.
study = search_runs.make_study() if is_master else [None, optuna.create_study()][process % 2]
best = tnt.search.optimize(study, objective, n_trials=num_trials)
result = {"seen": seen, "best": search_runs.told(best)}
if is_master:
    result["told"] = search_runs.told(study.trials)
(folder / f"{process}.json").write_text(json.dumps(result))


def refused(objective, error, text, study=None, **arguments):
    study = study if study is not None else optuna.create_study()
    with pytest.raises(error, match=text):
        tnt.search.optimize(study, objective, n_trials=3, **arguments)
    return study


def other_parameters(trial):
    return trial.suggest_float("x" if is_master else "y", 0, 1)


def pruned_on_one(trial):
    if is_master:
        return 0.0
    raise optuna.TrialPruned


def out_of_range(trial):
    return trial.suggest_float("x", 1, 0)


def fails_on_all(trial):
    calls.append(trial.number)
    if trial.number == 1:
        raise OSError("no data")
    return float(trial.number)


def no_study():
    raise OSError("no storage")


refused(other_parameters, RuntimeError, r"suggest_float\('x'\).*suggest_float\('y'\)")
refused(pruned_on_one, RuntimeError, "a value on process 0 and raised TrialPruned on process 1")
refused(out_of_range, ValueError if is_master else RuntimeError, "low <= high|low")
calls = []
refused(fails_on_all, OSError, "no data")
assert calls == [0, 1]
refused(fails_on_all, OSError if is_master else RuntimeError, "no storage", study=no_study)
calls = []
best = tnt.search.optimize(
    optuna.create_study, fails_on_all, n_trials=3, catch=OSError, gc_after_trial=True
)
assert calls == [0, 1, 2]
assert [trial.number for trial in best] == [0]
with pytest.raises(TypeError if is_master else RuntimeError, match="needs the trial"):
    tnt.callbacks.OptunaPruning(None)
# The callback alone, for those who ask and tell themselves.
trial = tnt.search.SharedTrial(optuna.create_study().ask() if is_master else None)
trial.set_user_attr("processes", tnt.get_process_count())
assert trial.user_attrs == {"processes": tnt.get_process_count()}
assert trial.distributions == {}
assert trial.datetime_start is not None
print(f"process {process} has ended", flush=True)
