"""Ray, imported on first use, and the place of this process in it.

That is a worker of Ray Train, a trial of Ray Tune, or neither. Ray's own modules tell, where they
are loaded: what Ray did not start never imports it for this.
"""

import importlib
import sys
from dataclasses import dataclass
from typing import Any, Literal

_OLDEST = (2, 60)


def import_ray(needed_by: str, module: str = "ray") -> Any:
    """Returns the module `ray`, or one below it; imports it on first use.

    `needed_by` is what needs Ray, as its user writes it, such as `tnt-jax --ray`. Errors say what
    to install: a ModuleNotFoundError, or an ImportError if Ray is older than 2.60.
    """
    try:
        ray = importlib.import_module("ray")
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{needed_by} needs Ray, but {error.name} is not installed here. Install it with: "
            'pip install "tnt-jax[ray]"',
            name=error.name,
        ) from error
    if tuple(int(part) for part in ray.__version__.split(".")[:2]) < _OLDEST:
        raise ImportError(
            f"{needed_by} needs Ray {'.'.join(map(str, _OLDEST))} or later, but {ray.__version__} "
            'is installed here. Upgrade it with: pip install --upgrade "tnt-jax[ray]"'
        )
    return found


@dataclass(frozen=True)
class TrainWorker:
    """A worker of a Ray Train run, whose name stays the same when Ray starts its workers again."""

    rank: int
    size: int
    local_rank: int
    run: str


def train_worker() -> TrainWorker | None:
    """Returns the worker of Ray Train in whose process this is called, or None."""
    if role() != "worker":
        return None
    context = sys.modules["ray.train"].get_context()
    return TrainWorker(
        context.get_world_rank(),
        context.get_world_size(),
        context.get_local_rank(),
        context.get_experiment_name(),
    )


def role() -> Literal["worker", "trial"] | None:
    """Returns whether this process is a worker of Ray Train or a trial of Ray Tune, or None."""
    # A worker, or a trial, has loaded these modules; Ray offers no question that raises nothing.
    train: Any = sys.modules.get("ray.train")
    # Two threads may import at once.
    if train is not None and hasattr(train, "get_context") and _is_worker(train):
        return "worker"
    tune = sys.modules.get("ray.tune.trainable.trainable_fn_utils")
    return "trial" if tune is not None and tune._in_tune_session() else None


def _is_worker(train: Any) -> bool:
    try:
        context = train.get_context()
    except (RuntimeError, DeprecationWarning):
        # The first outside of workers, the second, which Ray raises, in a trial of Ray Tune.
        return False
    # Ray Train before its second version describes a single worker everywhere.
    return type(context).__module__.startswith("ray.train.v2.")


def broadcast(value: Any) -> Any:
    """Returns the value of worker 0, on all workers; waits until all of them have called it."""
    return import_ray("Ray Train", "ray.train.collective").broadcast_from_rank_zero(value)


def node_address() -> str:
    """Returns the address at which the other nodes of the cluster reach this one."""
    return import_ray("Ray Train").util.get_node_ip_address()
