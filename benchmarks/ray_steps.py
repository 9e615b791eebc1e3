"""What Ray costs: start-up and step time of a job in Ray Train and under `tnt-jax --ray`.

Beside them, in the same rounds, the same job under the plain launcher. A job has two CPU processes
on this machine and trains a network on random data: one for handwritten digits (784-256-10), or
ResNet-20, whose steps are longer. The cluster is up before, and the jobs come one after another, in
an order that changes from round to round.

    python benchmarks/ray_steps.py --output benchmarks/results/ray_steps.json
    python benchmarks/ray_steps.py --network resnet20 \
        --output benchmarks/results/ray_steps_resnet20.json
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

PROCESSES = 2
# Rows of a global batch, steps of an epoch, and epochs.
NETWORKS = {"mlp": (64, 400, 8), "resnet20": (32, 30, 6)}
PLACES = ("tnt-jax", "tnt-jax --ray", "Ray Train")


def train(config: dict[str, Any]) -> dict[str, Any] | None:
    """Trains as one process of a job; returns, on the first, when the first step ended.

    With it come the seconds of a step in each epoch but the first.

    Args:
        config: The name of the network, as `network`.
    """
    import flax.linen as nn
    import numpy as np

    import tnt_jax as tnt
    from tnt_jax.models.resnet import resnet20

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(10)(nn.relu(nn.Dense(256)(x)))

    class Clock(tnt.callbacks.Callback):
        def __init__(self):
            super().__init__()
            self.moments = []

        def on_epoch_begin(self, epoch, logs=None):
            self.moments.append(time.time())

        def on_epoch_end(self, epoch, logs=None):
            # The logs are numbers: all steps have ended.
            self.moments.append(time.time())

    numbers = np.random.default_rng(0)
    batch, steps, epochs = NETWORKS[config["network"]]
    is_mlp = config["network"] == "mlp"
    shape = (784,) if is_mlp else (32, 32, 3)
    x = numbers.normal(size=(steps * batch, *shape)).astype("f4")
    y = numbers.integers(10, size=len(x))
    model = tnt.Model(Net() if is_mlp else resnet20())
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss=loss)
    model.fit(x[:batch], y[:batch], batch_size=batch, verbose=0)
    first_step_at = time.time()
    clock = Clock()
    model.fit(x, y, batch_size=batch, epochs=epochs, verbose=0, callbacks=[clock])
    assert tnt.get_size() == PROCESSES
    if not tnt.is_master_rank():
        return None
    spans = zip(clock.moments[2::2], clock.moments[3::2], strict=True)
    return {
        "first_step_at": first_step_at,
        "step_s": [(end - start) / steps for start, end in spans],
    }


def run_launcher(network: str, *options: str) -> dict[str, Any]:
    """Runs the job under the launcher."""
    command = [sys.executable, "-m", "tnt_jax.launch", *options, "-n", str(PROCESSES), "--no-gpu"]
    done = subprocess.run(
        [*command, "--", __file__, "--work", "--network", network],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def run_ray_train(network: str) -> dict[str, Any]:
    """Runs the job in a `JaxTrainer`, by a driver of its own, as a user does."""
    done = subprocess.run(
        [sys.executable, __file__, "--drive", "--network", network],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def drive(network: str) -> None:
    """Is the driver of a `JaxTrainer`, and prints what the first worker returns."""
    import tempfile

    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer

    ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False)
    with tempfile.TemporaryDirectory() as storage:
        result = JaxTrainer(
            train,
            train_loop_config={"network": network},
            scaling_config=ScalingConfig(num_workers=PROCESSES),
            run_config=RunConfig(storage_path=storage),
        ).fit()
    print(json.dumps(result.return_value))


def run_in(place: str, network: str) -> dict[str, float]:
    """Runs the job; returns the seconds to its first step, and the median of a step."""
    began_at = time.time()
    if place == "Ray Train":
        found = run_ray_train(network)
    else:
        found = run_launcher(network, *place.split()[1:])
    return {
        "start_s": found["first_step_at"] - began_at,
        "step_ms": 1e3 * statistics.median(found["step_s"]),
        "job_s": time.time() - began_at,
    }


def summary(values: list[float]) -> str:
    """Returns the median, and the smallest and largest value."""
    return f"{statistics.median(values):8.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    """Runs the rounds, and prints and writes what they took."""
    from machine import commit, versions
    from ray_clusters import ray_cluster_of

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--network", choices=NETWORKS, default="mlp", help="(default: mlp)")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--drive", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        found = train({"network": given.network})
        if found is not None:
            print(json.dumps(found))
        return
    if given.drive:
        drive(given.network)
        return
    rounds: dict[str, list[dict[str, float]]] = {place: [] for place in PLACES}
    with ray_cluster_of() as cluster:
        os.environ["RAY_ADDRESS"] = cluster.address
        for number in range(given.rounds):
            shift = number % len(PLACES)
            for place in (*PLACES[shift:], *PLACES[:shift]):
                rounds[place].append(run_in(place, given.network))
                print(place, rounds[place][-1], flush=True)
    for what, unit in (
        ("start_s", "s to the first step"),
        ("step_ms", "ms a step"),
        ("job_s", "s"),
    ):
        for place in PLACES:
            print(f"{place:14} {summary([each[what] for each in rounds[place]])} {unit}")
    if given.output:
        about = {
            "command": " ".join(["python", *sys.argv]),
            "commit": commit(),
            "cores": os.cpu_count(),
            "versions": versions(),
        }
        given.output.write_text(json.dumps({**about, "rounds": rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()
