"""A network that workers of Ray Train learn, and faults that come at a step.

Kinds of faults, of the process `rank` after the update `step`:

    worker      SIGKILL to the worker
    exception   an exception in its training function
    node        SIGKILL to the worker's node, that is to its raylet
    pause       the process does nothing until it is ended: by Ray, to start another number of
                workers, or by tnt_jax, because the others wait for it
"""

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

EPOCHS, STEPS, SAVED_EVERY = 3, 8, 3
NODE = {"num_cpus": 1, "object_store_memory": 100_000_000}
# Ray takes the reports of workers at the first interval. For the second time it waits for the places
# of a worker group, whose number it takes from what it knew of the nodes up to 20 seconds ago. What
# is left out is a process that asks clouds which nodes they will take away.
VARIABLES = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Trains in a worker of Ray Train, and disturbs itself if it is asked to.

    Args:
        config: `folder` for notes; `faults`, each with `kind`, `step` and `rank`, or none;
            `environment` with variables of tnt_jax.
    """
    os.environ.update(config.get("environment", {}))
    import flax.linen as nn
    import jax
    import numpy as np

    import tnt_jax as tnt

    folder = Path(config["folder"])
    (folder / f"worker-{os.getpid()}").touch()

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train=False):
            x = nn.relu(nn.Dense(16)(x))
            x = nn.Dropout(0.3, deterministic=not train)(x)
            return nn.Dense(1)(x)

    class Faults(tnt.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            step, rank = self.model.optimizer.iterations, tnt.get_process_index()
            if rank == 0:
                # All processes have agreed on this step: its weights are those of its number.
                with open(folder / "steps", "a") as notes:
                    notes.write(f"{step} {tnt.get_size()}\n")
            for number, fault in enumerate(config.get("faults", [])):
                note = folder / f"fault-{number}"
                if (rank, step) == (fault["rank"], fault["step"]) and not note.exists():
                    note.write_text(str(time.time()))
                    disturb(fault["kind"])

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
        callbacks=[Faults(), tnt.callbacks.RayReport(save_freq=SAVED_EVERY)],
    )  # fmt: skip
    weights = [np.asarray(leaf) for leaf in jax.tree.leaves(model.get_weights())]
    return {
        "weights": [leaf.tolist() for leaf in weights],
        "history": history.history,
        "size": tnt.get_size(),
        "updates": int(model.optimizer.iterations),
    }


def disturb(kind: str) -> None:
    """Does to this process what a fault of a kind does."""
    if kind == "exception":
        raise RuntimeError("a fault on purpose")
    if kind == "pause":
        threading.Event().wait()
    # Ray's workers are the children of the raylet, and end with it.
    os.kill(os.getppid() if kind == "node" else os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def run(config: dict[str, Any], *, storage: str, workers: Any = 2, failures: int = 1) -> Any:
    """Runs `train` in a `JaxTrainer` on the cluster to which this process is connected."""
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.jax import JaxTrainer

    return JaxTrainer(
        train,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=workers, elastic_resize_monitor_interval_s=1),
        run_config=RunConfig(
            name=Path(config["folder"]).name,
            storage_path=storage,
            failure_config=FailureConfig(max_failures=failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


def run_amid(
    config: dict[str, Any],
    changes: Sequence[Callable[[], Any] | None],
    *,
    hang_s: float = 300,
    **options: Any,
) -> Any:
    """Does `run`, and after the fault of each number what is to be changed then, or nothing.

    The changes are made in the thread of the caller: a node can be added in the main thread alone.

    Raises:
        TimeoutError: If training has not ended after `hang_s` seconds.
    """
    training: Future[Any] = Future()

    def fulfil() -> None:
        try:
            training.set_result(run(config, **options))
        except BaseException as error:
            training.set_exception(error)

    until = time.monotonic() + hang_s
    threading.Thread(target=fulfil, daemon=True).start()
    for number, change in enumerate(changes):
        note = Path(config["folder"], f"fault-{number}")
        while not (note.exists() or training.done() or time.monotonic() > until):
            wait([training], timeout=0.1)
        if change is not None and note.exists():
            change()
    return training.result(max(0, until - time.monotonic()))


def sizes(config: dict[str, Any]) -> list[int]:
    """Returns the numbers of ranks that trained, one after another."""
    lines = Path(config["folder"], "steps").read_text().splitlines()
    return [size for size, _ in itertools.groupby(int(line.split()[1]) for line in lines)]


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Returns the largest difference between the weights of two runs."""
    import numpy as np

    pairs = zip(one["weights"], other["weights"], strict=True)
    return max(float(np.abs(np.subtract(a, b)).max()) for a, b in pairs)
