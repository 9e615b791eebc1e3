"""Ray Train: detects a worker, in whose process Ray calls the training function."""

import secrets
import socket
from functools import cache

from tnt_jax.cluster.job import Job
from tnt_jax.on_ray.worker import TrainWorker, broadcast, node_address, train_worker

SOURCE = "Ray Train"
_SECRET_BYTES = 32


def detect_ray_train() -> Job | None:
    """Returns the job of a process that is one of several workers of Ray Train, otherwise None.

    All workers must call it, the first time: worker 0 tells the others where it will listen.
    """
    worker = train_worker()
    if worker is None or worker.size == 1:
        return None
    return Job(_agreed(worker)[0], worker.size, worker.rank, None, SOURCE)


def train_secret() -> bytes:
    """Returns what only the workers of this process's run know; all of them must call it.

    It travels within Ray, beside the address.
    """
    worker = train_worker()
    assert worker is not None
    return _agreed(worker)[1]


# For the life of the process, which is a worker of one run only: a second call asks nobody.
@cache
def _agreed(worker: TrainWorker) -> tuple[str, bytes]:
    """Returns the address of the coordinator and the secret of the job; worker 0 chooses both."""
    if worker.rank:
        return broadcast(None)
    with socket.socket() as found:
        found.bind(("", 0))
        port = found.getsockname()[1]
    host = node_address()
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return broadcast((address, secrets.token_bytes(_SECRET_BYTES)))
