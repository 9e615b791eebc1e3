"""What Ray costs: start-up and step time of a job in Ray Train and under `tnt-jax --ray`.

Beside them, in the same rounds, the same job under the plain launcher. A job has two CPU processes
on this machine and trains a network for handwritten digits (784-256-10) on random data. The cluster
is up before, and the jobs come one after another, in an order that changes from round to round.

    python benchmarks/ray_steps.py --output benchmarks/results/ray_steps.json
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

PROCESSES, EPOCHS, STEPS, BATCH = 2, 8, 400, 64
PLACES = ("tnt-jax", "tnt-jax --ray", "Ray Train")


def train(config: dict[str, Any]) -> dict[str, Any] | None:
    """Trains as one process of a job; returns, on the first, when the first step ended.

    With it come the seconds of a step in each epoch but the first, which compiles.
    """
    import flax.linen as nn
    import numpy as np

    import tnt_jax as tnt

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
    x = numbers.normal(size=(STEPS * BATCH, 784)).astype("f4")
    y = numbers.integers(10, size=len(x))
    model = tnt.Model(Net())
    loss = tnt.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss=loss)
    model.fit(x[:BATCH], y[:BATCH], batch_size=BATCH, verbose=0)
    first_step_at = time.time()
    clock = Clock()
    model.fit(x, y, batch_size=BATCH, epochs=EPOCHS, verbose=0, callbacks=[clock])
    assert tnt.get_size() == PROCESSES
    if not tnt.is_master_rank():
        return None
    spans = zip(clock.moments[2::2], clock.moments[3::2], strict=True)
    return {
        "first_step_at": first_step_at,
        "step_s": [(end - start) / STEPS for start, end in spans],
    }


def run_launcher(*options: str) -> dict[str, Any]:
    """Runs the job under the launcher."""
    command = [sys.executable, "-m", "tnt_jax.launch", *options, "-n", str(PROCESSES), "--no-gpu"]
    done = subprocess.run(
        [*command, "--", __file__, "--work"], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def run_ray_train() -> dict[str, Any]:
    """Runs the job in a `JaxTrainer`, by a driver of its own, as a user does."""
    done = subprocess.run(
        [sys.executable, __file__, "--drive"], capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


def drive() -> None:
    """Is the driver of a `JaxTrainer`, and prints what the first worker returns."""
    import tempfile

    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer

    ray.init(os.environ["RAY_ADDRESS"], log_to_driver=False)
    with tempfile.TemporaryDirectory() as storage:
        result = JaxTrainer(
            train,
            train_loop_config={},
            scaling_config=ScalingConfig(num_workers=PROCESSES),
            run_config=RunConfig(storage_path=storage),
        ).fit()
    print(json.dumps(result.return_value))


def run_in(place: str) -> dict[str, float]:
    """Runs the job; returns the seconds to its first step, and the median of a step."""
    began_at = time.time()
    if place == "Ray Train":
        found = run_ray_train()
    else:
        found = run_launcher(*place.split()[1:])
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
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--drive", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        found = train({})
        if found is not None:
            print(json.dumps(found))
        return
    if given.drive:
        drive()
        return
    rounds: dict[str, list[dict[str, float]]] = {place: [] for place in PLACES}
    with ray_cluster_of() as cluster:
        os.environ["RAY_ADDRESS"] = cluster.address
        for number in range(given.rounds):
            shift = number % len(PLACES)
            for place in (*PLACES[shift:], *PLACES[:shift]):
                rounds[place].append(run_in(place))
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
