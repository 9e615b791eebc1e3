"""When the callback reports, and what it refuses; tests/search has it in several processes."""

import pytest

import tnt_jax as tnt

optuna = pytest.importorskip("optuna", reason="needs the extra optuna")


def trial_that_prunes_above(limit):
    pruner = optuna.pruners.ThresholdPruner(upper=limit)
    return optuna.create_study(pruner=pruner).ask()


def run(callback, values):
    """Calls the hook with a value for each epoch; returns the epoch that it was pruned after."""
    for epoch, value in enumerate(values):
        try:
            callback.on_epoch_end(epoch, {"val_loss": value})
        except optuna.TrialPruned:
            return epoch
    return None


def test_a_trial_is_pruned_at_the_first_epoch_beyond_the_limit():
    trial = trial_that_prunes_above(2.0)
    assert run(tnt.callbacks.OptunaPruning(trial), [1.0, 1.5, 3.0, 1.0]) == 2


def test_nan_is_reported_and_pruned():
    assert run(tnt.callbacks.OptunaPruning(trial_that_prunes_above(2.0)), [1.0, float("nan")]) == 1


def test_with_an_interval_epochs_between_are_left_out():
    trial = trial_that_prunes_above(2.0)
    assert run(tnt.callbacks.OptunaPruning(trial, interval=2), [9.0, 1.0, 9.0, 9.0]) == 3


def test_an_unknown_log_causes_a_warning_and_no_report():
    callback = tnt.callbacks.OptunaPruning(trial_that_prunes_above(0.0), monitor="val_mae")
    with pytest.warns(UserWarning, match="OptunaPruning watches 'val_mae', but the logs are: loss"):
        callback.on_epoch_end(0, {"loss": 1.0})


def test_an_interval_below_one_is_refused():
    with pytest.raises(ValueError, match="interval must be at least 1 epoch, but is 0"):
        tnt.callbacks.OptunaPruning(trial_that_prunes_above(0.0), interval=0)


def test_it_must_run_on_every_process():
    callback = tnt.callbacks.OptunaPruning(trial_that_prunes_above(0.0))
    with pytest.raises(ValueError, match="OptunaPruning must run on every process"):
        tnt.callbacks.OnMaster(callback)
