"""Draws the loss of one training on 1 and on 8 devices, with dropout and an uneven last batch.

    python benchmarks/loss_curves.py --output benchmarks/results/loss_curves.json
    --picture benchmarks/results/loss_curves.png

The devices are virtual ones of the CPU. The images are scikit-learn's digits; 1437 of them in
batches of 100 leave 37 for the last batch, which 8 devices cannot share evenly. The difference is
that of rounding: sums are added in another order.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ.setdefault("PJRT_NPROC", "16")  # Threads, at least twice as many as devices.

import argparse
import json
import platform
from importlib.metadata import version

import flax.linen as nn
import numpy as np
from sklearn.datasets import load_digits

import tnt_jax as tnt

DEVICES, EPOCHS, BATCH_SIZE = (1, 8), 20, 100


class DigitNet(nn.Module):
    """A convolution, synchronised BatchNorm, dropout and two dense layers; logits `[batch, 10]`."""

    @nn.compact
    def __call__(self, images, train: bool):
        x = nn.Conv(16, (3, 3))(images)
        x = nn.relu(nn.BatchNorm(use_running_average=not train, axis_name="data")(x))
        x = nn.max_pool(x, (2, 2), (2, 2)).reshape(len(x), -1)
        x = nn.Dropout(0.3, deterministic=not train)(nn.relu(nn.Dense(64)(x)))
        return nn.Dense(10)(x)


def train(num_devices: int) -> dict[str, list[float]]:
    """Returns the logs of each epoch."""
    tnt.shutdown()
    tnt.init(devices=range(num_devices))
    digits = load_digits()
    images, labels = (digits.images[..., None] / 16).astype(np.float32), digits.target
    is_test = np.arange(len(images)) % 5 == 0
    model = tnt.Model(DigitNet(), seed=0)
    model.compile(
        tnt.optimizers.SGD(0.05, momentum=0.9),
        tnt.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    history = model.fit(
        images[~is_test],
        labels[~is_test],
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        validation_data=(images[is_test], labels[is_test]),
        verbose=0,
    )
    return {name: [float(value) for value in values] for name, values in history.history.items()}


def draw(logs: dict[int, dict[str, list[float]]], path: str) -> None:
    """Draws the losses of all runs over one another."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axis = plt.subplots(figsize=(6, 3.4), layout="constrained")
    for (num_devices, run), width in zip(logs.items(), (6, 1.8), strict=True):
        name = f"{num_devices} device{'s' * (num_devices > 1)}"
        for key, data, colour in (("loss", "training", "C0"), ("val_loss", "test", "C1")):
            axis.plot(
                range(1, len(run[key]) + 1),
                run[key],
                linewidth=width,
                color=colour if num_devices == 1 else "black",
                alpha=0.6 if num_devices == 1 else 1.0,
                linestyle="-" if key == "loss" else "--",
                label=f"{name}, {data}",
            )
    title = "The same training on 1 and 8 devices"
    axis.set(xlabel="epoch", ylabel="loss", yscale="log", title=title)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Trains, prints the largest difference and writes the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", help="JSON file for the logs")
    parser.add_argument("--picture", help="PNG file for the curves")
    arguments = parser.parse_args()
    logs = {num_devices: train(num_devices) for num_devices in DEVICES}
    first, last = logs[DEVICES[0]], logs[DEVICES[-1]]
    differences = {
        name: float(np.abs(np.subtract(first[name], last[name])).max()) for name in first
    }
    print("Largest differences of an epoch:", json.dumps(differences))
    if arguments.output:
        report = {
            "versions": {name: version(name) for name in ("jax", "flax", "tnt-jax")},
            "machine": platform.processor() or platform.machine(),
            "largest_differences": differences,
            "logs": logs,
        }
        with open(arguments.output, "w") as file:
            json.dump(report, file, indent=1)
    if arguments.picture:
        draw(logs, arguments.picture)


if __name__ == "__main__":
    main()
