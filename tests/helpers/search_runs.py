"""A study of a small classifier, as Optuna alone runs it and as `tnt.search` does."""

import functools

import flax.linen as nn
import numpy as np
import optuna

import tnt_jax as tnt

ROWS, FEATURES, CLASSES, EPOCHS = 45, 6, 3, 4
SUGGESTIONS = ("learning_rate", "units", "activation")


def rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(ROWS, FEATURES)).astype(np.float32)
    return x, (x @ rng.normal(size=(FEATURES, CLASSES))).argmax(1)


class Net(nn.Module):
    units: int
    activation: str

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.units)(x)
        return nn.Dense(CLASSES)(x if self.activation == "none" else nn.tanh(x))


def make_study():
    """Returns a study whose decisions depend on its seed and the values that it is told alone."""
    return optuna.create_study(
        direction="minimize",
        sampler=optuna.samplers.RandomSampler(seed=3),
        pruner=optuna.pruners.MedianPruner(n_startup_trials=1),
    )


def train(trial, callback):
    """Trains with the parameters that the trial suggests; returns the last validation loss."""
    rate = trial.suggest_float("learning_rate", 1e-4, 1.0, log=True)
    module = Net(
        trial.suggest_int("units", 4, 8, step=4),
        trial.suggest_categorical("activation", ["tanh", "none"]),
    )
    x, y = rows()
    model = tnt.Model(module, seed=0)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tnt.optimizers.SGD(rate), loss)
    history = model.fit(
        x[:30], y[:30], batch_size=8, epochs=EPOCHS, verbose=0,
        validation_data=(x[30:], y[30:]), callbacks=[callback],
    )  # fmt: skip
    return history.history["val_loss"][-1]


class PlainPruning(tnt.callbacks.Callback):
    """What Optuna's documentation says to do in one process."""

    def __init__(self, trial):
        super().__init__()
        self.trial = trial

    def on_epoch_end(self, epoch, logs=None):
        self.trial.report(logs["val_loss"], epoch)
        if self.trial.should_prune():
            raise optuna.TrialPruned


def with_optuna_alone(num_trials):
    study = make_study()
    study.optimize(lambda trial: train(trial, PlainPruning(trial)), n_trials=num_trials)
    return study


def shared_objective(trial):
    return train(trial, tnt.callbacks.OptunaPruning(trial, "val_loss"))


def told(trials):
    """Returns what Optuna was told of its trials, as JSON values."""
    return [
        {
            "params": trial.params,
            "state": trial.state.name,
            "reported": {str(k): v for k, v in trial.intermediate_values.items()},
            "value": trial.value,
        }
        for trial in trials
    ]


@functools.cache
def quiet():
    optuna.logging.set_verbosity(optuna.logging.ERROR)
