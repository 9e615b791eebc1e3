"""A network that workers of Ray Train learn, and that one of them can disturb at a step."""

import os
import signal
import time
from pathlib import Path
from typing import Any

EPOCHS, STEPS, SAVED_EVERY = 3, 8, 3


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Trains in a worker of Ray Train; disturbs itself if it is asked to.

    Args:
        config: `folder` for notes; `step` and `rank` of a worker's death, or none.
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
            os.kill(os.getpid(), signal.SIGKILL)

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


def run(config: dict[str, Any], *, storage: str, workers: Any = 2, failures: int = 1) -> Any:
    """Runs `train` in a `JaxTrainer` on the cluster to which this process is connected."""
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer

    return JaxTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers),
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
