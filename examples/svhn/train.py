"""Trains on SVHN by a custom loop and by `fit`, and compares their times.

    python svhn_data.py data
    tnt-jax -n 2 -- train.py --data data

The exercise of the lesson: `--steps exercise` runs what you write in exercise.py.
"""

import argparse
import time

import exercise
import jax
import numpy as np
import solution
import svhn_data
from network import Network, make_optimizer, make_state

import tnt_jax as tnt

NUM_DRAWN = 16
STEPS = {"exercise": exercise, "solution": solution}


def custom_loop(steps, train, test, *, batch_size, epochs, seed):
    """Trains by the steps of a module; returns the seconds of each epoch and the test accuracy.

    Every epoch ends with an evaluation, as it does in `fit`.
    """
    state, key, seconds = make_state(seed), jax.random.key(seed), []
    train_data = tnt.distribute(*train, batch_size=batch_size, seed=seed)
    test_data = tnt.distribute(*test, batch_size=batch_size, shuffle=False)
    for epoch in range(epochs):
        start = time.perf_counter()
        for batch in train_data:
            state, _ = steps.train_step(state, batch, key)
        for batch in test_data:
            steps.eval_step(state, batch)
        metrics = steps.train_loss, steps.train_accuracy, steps.eval_loss, steps.eval_accuracy
        results = [float(metric.result()) for metric in metrics]
        for metric in metrics:
            metric.reset_state()
        seconds.append(time.perf_counter() - start)
        report("loop", epoch, *results)
    return seconds, results[-1]


def fit(train, test, *, batch_size, epochs, seed, plot=None):
    """Trains by `fit`; returns the seconds of each epoch and the test accuracy.

    Draws the first test images to the file `plot`, if there is one.
    """
    times = EpochTimes()
    model = tnt.Model(Network(), seed=seed)
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(make_optimizer(), loss, metrics=["accuracy"])
    history = model.fit(
        *train,
        batch_size=batch_size,
        epochs=epochs,
        validation_data=test,
        callbacks=[times],
        verbose=0,
    ).history
    for epoch, logs in enumerate(zip(*map(history.get, LOGS), strict=True)):
        report("fit", epoch, *logs)
    if plot:
        images, labels = test[0][:NUM_DRAWN], test[1][:NUM_DRAWN]
        draw_images(plot, images, labels, model.predict(images, verbose=0).argmax(-1))
    return times.seconds, history["val_accuracy"][-1]


def draw_images(file, images, labels, predicted):
    """Draws images with their labels and predictions, wrong ones in red, on the master."""
    if not tnt.is_master_rank():
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 8.5), layout="constrained")
    drawn = zip(figure.subplots(4, 4).flat, images, labels, predicted, strict=False)
    for axes, image, label, found in drawn:
        axes.imshow(image)
        axes.set_title(f"{label}, predicted {found}", color="black" if label == found else "red")
        axes.set_axis_off()
    figure.savefig(file)


LOGS = ("loss", "accuracy", "val_loss", "val_accuracy")


class EpochTimes(tnt.callbacks.Callback):
    """Notes the seconds of each epoch, validation included."""

    def on_train_begin(self, logs=None):
        self.seconds = []

    def state(self):
        return {"seconds": list(self.seconds)}

    def set_state(self, state):
        self.seconds = state["seconds"]

    def on_epoch_begin(self, epoch, logs=None):
        self._start = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self._start)


def report(way, epoch, *values):
    """Prints loss and accuracy of an epoch, on the master."""
    if tnt.is_master_rank():
        texts = (f"{name} {value:.4f}" for name, value in zip(LOGS, values, strict=True))
        print(f"{way}, epoch {epoch + 1}: {', '.join(texts)}", flush=True)


def print_table(results, num_images):
    """Prints the times of both ways, on the master; the first epoch, which compiles, is apart."""
    if not tnt.is_master_rank():
        return
    print(f"\n{tnt.get_size()} device(s)")
    print(
        f"{'way':<6} {'first epoch':>12} {'later epochs':>13} {'images/s':>9} {'test accuracy':>14}"
    )
    for way, (seconds, accuracy) in results.items():
        later = float(np.median(seconds[1:] or seconds))
        speed = num_images / later
        print(f"{way:<6} {seconds[0]:>10.2f} s {later:>11.2f} s {speed:>9.0f} {accuracy:>14.4f}")


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", required=True, help="folder with train_32x32.mat and test_32x32.mat, or of TFDS")
    add("--steps", choices=tuple(STEPS), default="solution", help="whose steps the loop takes")
    add("--batch_size", type=int, default=128, help="images of all devices together in a step")
    add("--epochs", type=int, default=5, help="epochs")
    add("--seed", type=int, default=0, help="seed of weights, order and dropout")
    add("--plot", help="file for a picture of test images with predictions, such as a.png")
    return parser.parse_args()


def main():
    args = parse_args()
    try:
        train, test = svhn_data.load(args.data)
    except (ValueError, FileNotFoundError) as error:
        raise SystemExit(f"train.py: {error}") from error
    options = {"batch_size": args.batch_size, "epochs": args.epochs, "seed": args.seed}
    results = {
        "loop": custom_loop(STEPS[args.steps], train, test, **options),
        "fit": fit(train, test, plot=args.plot, **options),
    }
    print_table(results, len(train[1]))


if __name__ == "__main__":
    main()
