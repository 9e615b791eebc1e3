"""One process of one contender of `benchmarks/first_step.py`: trains one step from a standing start
and tells where the time went.

    python benchmarks/first_step_worker.py JSON PROCESS LAUNCHED

LAUNCHED is the time, in seconds since 1970, at which the process was started.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

# What a script of a user imports at its top.
IMPORTS = {
    "tnt_jax": ("jax", "flax.linen", "optax", "tnt_jax"),
    "tnt_jax, sockets": ("jax", "flax.linen", "optax", "tnt_jax"),
    "PyTorch DDP": ("torch",),
    "PyTorch DDP, torch.compile": ("torch",),
    "Keras 3 DataParallel": ("jax", "keras"),
}


def find_devices(contender: str) -> None:
    if contender.startswith("PyTorch"):
        import torch

        if torch.cuda.is_available():
            torch.zeros(1, device="cuda")
        return
    import jax

    jax.devices()


def connect(contender: str) -> None:
    """Joins the job, which precedes the devices."""
    if contender.startswith("tnt_jax"):
        import tnt_jax

        tnt_jax.init()


def measure(task: dict[str, Any], process: int, launched: float) -> dict[str, float]:
    """Returns the seconds of each phase, in order, and their sum `total`."""
    seconds: dict[str, float] = {}
    before = launched

    def mark(phase: str) -> None:
        nonlocal before
        now = time.time()
        seconds[phase], before = now - before, now

    mark("start")
    import numpy  # noqa: F401

    for name in IMPORTS[task["contender"]]:
        importlib.import_module(name)
    mark("import")
    # Keras joins within its own function, so that its devices are found there with several.
    connect(task["contender"])
    if task["processes"] == 1 or not task["contender"].startswith("Keras"):
        find_devices(task["contender"])
    mark("devices")
    sys.path.insert(0, str(Path(__file__).parent))
    from scaling_models import load

    x, y = load(task["model"], real=False, num_rows=task["batch"])
    mark("data")
    from scaling_worker import CONTENDERS

    run = CONTENDERS[task["contender"]](task, process, x, y)
    mark("model")
    run()
    mark("first step")
    seconds["total"] = before - launched
    run()
    mark("second step")
    return seconds


def main() -> None:
    process = int(sys.argv[2])
    task = json.loads(sys.argv[1])
    found = measure(task, process, float(sys.argv[3]))
    if process == 0:
        print("RESULT " + json.dumps(found), flush=True)
    # Leaving in order takes seconds and measures nothing; process 0 must not leave the others
    # without their coordinator.
    time.sleep(1 if process == 0 else 0.5)
    os._exit(0)


if __name__ == "__main__":
    main()
