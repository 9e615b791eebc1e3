"""Studies whose trials are trained by several ranks or processes tell Optuna what one would."""

import json
import pickle
import re
import sys

import numpy as np
import pytest
from processes import SCRIPTS, launch

import tnt_jax as tnt
from tnt_jax.search import studies

optuna = pytest.importorskip("optuna", reason="needs the extra optuna")
import search_runs  # noqa: E402

NUM_TRIALS = 4


@pytest.fixture(autouse=True)
def quiet():
    search_runs.quiet()


@pytest.fixture(scope="module")
def expected():
    """What Optuna alone is told on one device: some trials are pruned, after some epochs."""
    tnt.shutdown()
    tnt.init(devices=[0])
    search_runs.quiet()
    study = search_runs.with_optuna_alone(NUM_TRIALS)
    tnt.shutdown()
    told = search_runs.told(study.trials)
    assert {trial["state"] for trial in told} == {"COMPLETE", "PRUNED"}
    return told, search_runs.told(study.best_trials)


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one["params"], one["state"]) == (other["params"], other["state"])
        assert list(one["reported"]) == list(other["reported"])
        np.testing.assert_allclose(
            list(one["reported"].values()), list(other["reported"].values()), rtol=2e-5
        )
        np.testing.assert_allclose(one["value"], other["value"], rtol=2e-5)


def test_a_study_on_several_ranks_is_told_the_same_as_on_one(expected, two_ranks):
    study = search_runs.make_study()
    best = tnt.search.optimize(study, search_runs.shared_objective, n_trials=NUM_TRIALS)
    assert_same(search_runs.told(study.trials), expected[0])
    assert_same(search_runs.told(best), expected[1])


@pytest.mark.multiprocess
@pytest.mark.slow
@pytest.mark.long  # Several ranks, above, show it, too.
@pytest.mark.parametrize("num_processes", [2, 3])
def test_all_processes_get_the_same_parameters_and_prune_together(
    num_processes, expected, tmp_path
):
    done = launch(
        num_processes, SCRIPTS / "search_trials.py", tmp_path, NUM_TRIALS,
        flags=["--output-on-all-devices"],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads((tmp_path / f"{p}.json").read_text()) for p in range(num_processes)]
    assert_same(results[0]["told"], expected[0])
    ends = {"COMPLETE": "value", "PRUNED": "pruned"}
    for process, result in enumerate(results):
        assert_same(result["best"], expected[1])
        assert result["seen"] == [
            {"number": number, "ended": ends[trial["state"]], "params": trial["params"]}
            for number, trial in enumerate(expected[0])
        ]
        assert f"process {process} has ended" in done.stdout


def test_several_objectives_have_several_best_trials(two_ranks):
    study = optuna.create_study(directions=["minimize", "maximize"])
    study.enqueue_trial({"x": 0.0})
    study.enqueue_trial({"x": 1.0})
    best = tnt.search.optimize(
        study, lambda trial: [trial.suggest_float("x", 0, 1)] * 2, n_trials=2
    )
    assert [trial.params["x"] for trial in best] == [0.0, 1.0]


def test_a_study_without_a_complete_trial_has_no_best():
    def prune(trial):
        raise optuna.TrialPruned

    assert tnt.search.optimize(optuna.create_study(), prune, n_trials=2) == []


def test_without_optuna_an_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "tnt-jax\[optuna\]"'):
        tnt.search.optimize(None, None)
    with pytest.raises(ModuleNotFoundError, match=r"OptunaPruning needs Optuna"):
        tnt.callbacks.OptunaPruning(None)


def test_an_error_of_optuna_is_of_the_same_kind_on_all_processes(monkeypatch):
    sent = []
    monkeypatch.setattr(studies, "broadcast_object", lambda x: sent.append(pickle.dumps(x)) or x)
    trial = tnt.search.SharedTrial(optuna.create_study().ask())
    assert 1 <= trial.suggest_int("width", 1, 4) <= 4
    with pytest.raises(ValueError, match="Cannot set different distribution kind") as told:
        trial.suggest_categorical("width", [1, 4])
    monkeypatch.setattr(studies, "is_master_rank", lambda: False)
    monkeypatch.setattr(studies, "broadcast_object", lambda _: pickle.loads(sent[-1]))
    with pytest.raises(ValueError, match=re.escape(str(told.value))):
        tnt.search.SharedTrial().suggest_categorical("width", [1, 4])
