"""Ray Train: detects a worker, in whose process Ray calls the training function."""

import socket
from functools import cache

from tnt_jax.cluster.job import Job
from tnt_jax.on_ray.worker import TrainWorker, broadcast, node_address, train_worker

SOURCE = "Ray Train"


def detect_ray_train() -> Job | None:
    """Returns the job of a process that is one of several workers of Ray Train, otherwise None.

    All workers must call it, the first time: worker 0 tells the others where it will listen.
    """
    worker = train_worker()
    if worker is None or worker.size == 1:
        return None
    return Job(_address(worker), worker.size, worker.rank, None, SOURCE)


# For the life of the process, which is a worker of one run only: a second call asks nobody.
@cache
def _address(worker: TrainWorker) -> str:
    """Returns the address of the coordinator, which worker 0 chooses."""
    if worker.rank:
        return broadcast(None)
    with socket.socket() as found:
        found.bind(("", 0))
        port = found.getsockname()[1]
    host = node_address()
    return broadcast(f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
