"""Ray Train runs with faults: is training that goes on the training that was never disturbed?

Each trial trains the same network in `JaxTrainer`, with two CPU workers on a cluster of its own on
this machine, disturbs it at a random step, and compares its weights and history, bit by bit, with
those of a run that nothing disturbed. Faults:

    worker      SIGKILL to a worker
    exception   an exception in one worker's training function

    python benchmarks/ray_faults.py --trials 5 --output benchmarks/results/ray_faults.json
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "helpers"))

EPOCHS, STEPS, SAVED_EVERY = 3, 8, 3
KINDS = ("worker", "exception")


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Trains in a worker of Ray Train; disturbs itself if it is asked to.

    Args:
        config: `folder` for notes; `step` and `rank` of the fault, with its `kind`, or none.
    """
    import flax.linen as nn
    import jax
    import numpy as np

    import tnt_jax as tnt

    folder = Path(config["folder"])

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            x = nn.relu(nn.Dense(16)(x))
            x = nn.Dropout(0.3, deterministic=not train)(x)
            return nn.Dense(1)(x)

    class Fault(tnt.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            step = self.model.optimizer.iterations
            if tnt.get_process_index() != config.get("rank") or step != config.get("step"):
                return
            note = folder / "fault"
            if note.exists():
                return
            note.write_text(f"{step} {time.time()}")
            if config["kind"] == "worker":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("a fault on purpose")

    numbers = np.random.default_rng(0)
    # 61 examples: the last batch of an epoch is smaller, and odd.
    x = numbers.normal(size=(STEPS * 8 - 3, 8)).astype("f4")
    y = (x @ numbers.normal(size=(8, 1)) + 0.1 * numbers.normal(size=(len(x), 1))).astype("f4")
    model = tnt.Model(Net(), seed=7)
    # A fault comes at a step of its own.
    model.compile(
        tnt.optimizers.SGD(0.01, momentum=0.9), loss="mse", metrics=["mae"], steps_per_execution=1
    )
    history = model.fit(
        x, y, batch_size=8, epochs=EPOCHS, verbose=0, shuffle=True,
        callbacks=[Fault(), tnt.callbacks.RayReport(save_freq=SAVED_EVERY)],
    )  # fmt: skip
    weights = [np.asarray(leaf) for leaf in jax.tree.leaves(model.get_weights())]
    return {
        "weights": [leaf.tolist() for leaf in weights],
        "history": history.history,
        "size": tnt.get_size(),
        "updates": int(model.optimizer.iterations),
    }


def run(config: dict[str, Any], *, storage: str, failures: int = 1) -> Any:
    """Runs `train` in a `JaxTrainer` on the cluster to which this process is connected."""
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer

    return JaxTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=Path(config["folder"]).name,
            storage_path=storage,
            failure_config=FailureConfig(max_failures=failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Returns the largest difference between the weights of two runs."""
    import numpy as np

    pairs = zip(one["weights"], other["weights"], strict=True)
    return max(float(np.abs(np.subtract(a, b)).max()) for a, b in pairs)


def disturb(kind: str, rng: random.Random, folder: Path, truth: dict[str, Any]) -> dict[str, Any]:
    """Carries out one trial, on a cluster of its own; returns what came of it."""
    import ray
    from ray_clusters import ray_cluster_of

    folder.mkdir()
    config = {
        "folder": str(folder),
        "kind": kind,
        "step": rng.randrange(1, EPOCHS * STEPS),
        "rank": rng.randrange(2),
    }
    with ray_cluster_of() as cluster:
        ray.init(cluster.address, log_to_driver=False)
        try:
            result = run(config, storage=str(folder / "storage")).return_value
        finally:
            ray.shutdown()
    ended_at = time.time()
    _, fault_at = (folder / "fault").read_text().split()
    gap = difference(result, truth)
    return {
        "kind": kind, "step": config["step"], "rank": config["rank"],
        "ranks_at_end": result["size"], "largest_difference": gap,
        "same_bits": gap == 0 and result["history"] == truth["history"],
        "same_updates": result["updates"] == truth["updates"],
        "from_fault_to_end_s": round(ended_at - float(fault_at), 1),
    }  # fmt: skip


def undisturbed(folder: Path) -> dict[str, Any]:
    """Returns the result of a run that nothing disturbs."""
    import ray
    from ray_clusters import ray_cluster_of

    folder.mkdir()
    with ray_cluster_of() as cluster:
        ray.init(cluster.address, log_to_driver=False)
        try:
            result = run({"folder": str(folder)}, storage=str(folder / "storage"), failures=0)
        finally:
            ray.shutdown()
    return result.return_value


def main() -> None:
    """Runs the trials, and prints and writes how they ended."""
    from scaling import versions

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=5, help="trials of each kind")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    trials: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as base:
        truth = undisturbed(Path(base, "undisturbed"))
        for number in range(given.trials):
            for kind in given.kinds:
                trials.append(disturb(kind, rng, Path(base, f"{kind}-{number}"), truth))
                print(json.dumps(trials[-1]), flush=True)
                if given.output:
                    about = {"command": " ".join(sys.argv), "versions": versions()}
                    text = json.dumps({**about, "trials": trials}, indent=1)
                    given.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
