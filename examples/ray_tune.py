"""Searches the learning rate and width of a network for scikit-learn's handwritten digits with Ray
Tune. Several trials run at once, each of them on several workers, and ASHA ends those that fall
behind.

    python examples/ray_tune.py                                # a Ray cluster of this machine alone
    python examples/ray_tune.py --address auto --workers 2     # the cluster that runs here
"""

import argparse

import flax.linen as nn
import numpy as np
import ray
from ray import train, tune
from ray.train.v2.jax import JaxTrainer
from ray.tune.integration.ray_train import TuneReportCallback
from ray.tune.schedulers import ASHAScheduler
from sklearn.datasets import load_digits

import tnt_jax as tnt

BATCH_SIZE = 64


class DigitNet(nn.Module):
    """Two dense layers; logits `[batch, 10]`."""

    units: int

    @nn.compact
    def __call__(self, images):
        return nn.Dense(10)(nn.relu(nn.Dense(self.units)(images)))


def split_digits():
    """Returns images `[n, 64]` in [0, 1] and labels, for training and for the choice of parameters;
    every fifth image is for the latter.
    """
    digits = load_digits()
    images, is_held_out = (
        (digits.data / 16).astype(np.float32),
        np.arange(len(digits.data)) % 5 == 0,
    )
    return [(images[rows], digits.target[rows]) for rows in (~is_held_out, is_held_out)]


def train_model(config):
    """Runs on each worker of a trial. The global batch is split over them."""
    training, held_out = split_digits()
    model = tnt.Model(DigitNet(config["units"]))
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(tnt.optimizers.SGD(config["learning_rate"]), loss, metrics=["accuracy"])
    model.fit(
        *training,
        batch_size=BATCH_SIZE,
        epochs=config["epochs"],
        validation_data=held_out,
        # ASHA counts reports: one for each epoch.
        callbacks=[tnt.callbacks.RayReport(save_freq=None)],
        verbose=0,
    )


def run_trial(config):
    """Starts the workers of a trial, and tells Tune what they report. They end with it."""
    trainer = JaxTrainer(
        train_model,
        train_loop_config=config,
        scaling_config=train.ScalingConfig(num_workers=config["workers"]),
        run_config=train.RunConfig(
            name=tune.get_context().get_trial_id(), callbacks=[TuneReportCallback()]
        ),
    )
    trainer.fit()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", help="the Ray cluster, such as auto (default: a new one)")
    parser.add_argument("--workers", type=int, default=1, help="workers of a trial (default: 1)")
    parser.add_argument("--trials", type=int, default=8, help="trials to run (default: 8)")
    parser.add_argument("--at-once", type=int, default=2, help="trials at one time (default: 2)")
    parser.add_argument("--epochs", type=int, default=9, help="epochs of a full trial (default: 9)")
    args = parser.parse_args()
    ray.init(address=args.address)
    tuner = tune.Tuner(
        # The trial itself only waits for its workers.
        tune.with_resources(run_trial, {"cpu": 0.1}),
        param_space={
            "learning_rate": tune.loguniform(1e-3, 1.0),
            "units": tune.choice([16, 32, 64]),
            "epochs": args.epochs,
            "workers": args.workers,
        },
        tune_config=tune.TuneConfig(
            metric="val_accuracy",
            mode="max",
            num_samples=args.trials,
            max_concurrent_trials=args.at_once,
            scheduler=ASHAScheduler(max_t=args.epochs, grace_period=1, reduction_factor=3),
        ),
    )
    results = tuner.fit()
    best = results.get_best_result()
    epochs = [result.metrics["training_iteration"] for result in results]
    print(f"epochs of the trials: {sorted(epochs)}")
    print(
        f"best validation accuracy: {best.metrics['val_accuracy']:.3f} with learning rate "
        f"{best.config['learning_rate']:.3g} and {best.config['units']} units"
    )


if __name__ == "__main__":
    main()
