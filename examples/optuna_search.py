"""Searches the learning rate, width and dropout of a network for scikit-learn's handwritten digits
with Optuna. All processes train each trial together, and trials that fall behind end early.

    python examples/optuna_search.py
    tnt-jax -n 2 -- examples/optuna_search.py
    tnt-jax -n 2 -- examples/optuna_search.py --storage sqlite:///digits.db   # goes on with a study
"""

import argparse

import flax.linen as nn
import numpy as np
import optuna
from sklearn.datasets import load_digits

import tnt_jax as tnt

EPOCHS, BATCH_SIZE = 12, 64


class DigitNet(nn.Module):
    """Two dense layers; logits `[batch, 10]`."""

    units: int
    dropout: float

    @nn.compact
    def __call__(self, images, train: bool):
        x = nn.relu(nn.Dense(self.units)(images))
        x = nn.Dropout(self.dropout, deterministic=not train)(x)
        return nn.Dense(10)(x)


def split_digits():
    """Returns images `[n, 64]` in [0, 1] and labels: 60 % for training, 20 % for the choice of
    parameters, 20 % for testing.
    """
    digits = load_digits()
    images, part = (digits.data / 16).astype(np.float32), np.arange(len(digits.data)) % 5
    return [(images[rows], digits.target[rows]) for rows in (part > 1, part == 1, part == 0)]


def build(params):
    model = tnt.Model(DigitNet(params["units"], params["dropout"]))
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tnt.optimizers.Adam(params["learning_rate"]), loss, metrics=["accuracy"])
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=20, help="trials to run (default: 20)")
    parser.add_argument(
        "--epochs", type=int, default=EPOCHS, help=f"epochs of a full trial (default: {EPOCHS})"
    )
    parser.add_argument("--storage", help="database that keeps the study (default: none)")
    args = parser.parse_args()
    train, validation, test = split_digits()

    def objective(trial):
        # Every process gets the values that the master's Optuna suggests.
        params = {
            "learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True),
            "units": trial.suggest_int("units", 16, 128, step=16),
            "dropout": trial.suggest_float("dropout", 0.0, 0.5),
        }
        history = build(params).fit(
            *train,
            batch_size=BATCH_SIZE,
            epochs=args.epochs,
            validation_data=validation,
            callbacks=[tnt.callbacks.OptunaPruning(trial, monitor="val_accuracy")],
            verbose=0,
        )
        return history.history["val_accuracy"][-1]

    def create_study():
        """Called on the master alone."""
        return optuna.create_study(
            study_name="digits",
            storage=args.storage,
            load_if_exists=True,
            direction="maximize",
            sampler=optuna.samplers.TPESampler(seed=0),
            pruner=optuna.pruners.MedianPruner(n_warmup_steps=2),
        )

    best = tnt.search.optimize(create_study, objective, n_trials=args.trials)
    model = build(best[0].params)
    model.fit(*train, batch_size=BATCH_SIZE, epochs=args.epochs, verbose=0)
    _, accuracy = model.evaluate(*test, verbose=0)
    if tnt.is_master_rank():
        print(f"trial {best[0].number} was the best: {best[0].params}")
        print(f"validation accuracy: {best[0].value:.3f}, test accuracy: {accuracy:.3f}")


if __name__ == "__main__":
    main()
